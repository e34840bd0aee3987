"""Recipes and peers over windows: saved here, decoded and scored elsewhere, summed up in rows.

A window's scores are kept per recipe, source of kvcellar and model, so an interrupted run goes on, and a second run
with one more recipe costs only that recipe. The rows' keys are fixed (docs/evaluation.md); None means not measured.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ...archive.reader import ArchiveReader
from ...errors import KVCellarError
from ...evaluate.scores import WindowScore, summarize
from ...evaluate.texts import Window
from ...recipe import Recipe
from ...store.local import LocalStore
from ..cli.common import progress
from ..cli.models import LocalModel
from ..library import open as open_archive
from ..library import save
from .peers import PEERS, Coded
from .reference import References, continuation_logits, empty_positions, key, write_scores

FLOOR_EMPTY = "floor:empty"
ROW = (
    *("recipe", "text", "tokens", "windows", "kept", "file_bytes", "file_bytes_per_token", "payload_bytes_per_token"),
    *("profile_bytes", "kl", "kl_ci", "kl_p99", "dppl", "dppl_ci", "rcb", "rcb_ci", "top1", "margin", "save_s"),
    *("restore_s", "prefill_s", "peak_bytes", "restore_class"),
)
ALL = "all"


@dataclass(frozen=True)
class Result:
    """One window under one recipe: the scores per token, and what the file and its decoding cost."""

    scores: WindowScore
    costs: dict[str, Any]


class Scorer:
    """The process that decodes: started once, told paths, never shown a cache. Raises KVCellarError when it dies."""

    def __init__(self, folder: Path):
        command = [sys.executable, "-m", "kvcellar.frontends.bench.worker", str(folder), str(torch.get_num_threads())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def score(self, archive: Path, reference: Path, prefix: int, out: Path) -> dict[str, Any]:
        task = {"archive": str(archive), "reference": str(reference), "prefix": prefix, "out": str(out)}
        return self._send(task)

    def ask(self, archive: Path, prefix: int, task: dict[str, Any]) -> dict[str, Any]:
        """The margin and exact match of a task behind the archive of its context."""
        return self._send({"archive": str(archive), "prefix": prefix, "task": task})

    def _send(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise KVCellarError(f"the decoding process ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KVCellarError(f"decoding in a new process failed: {answer['error']}")
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def source_digest() -> str:
    """Short hash of kvcellar's own source: results of other code are not taken for this one's."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Bench:
    """Windows of one model, and the results on them."""

    def __init__(self, local: LocalModel, windows: Sequence[Window], *, quiet: bool = False):
        self.local, self.windows, self.quiet = local, windows, quiet
        self.references = References(local)
        self.results = self.references.folder / "results"

    def prepare(self) -> None:
        self.references.ensure(self.windows, quiet=self.quiet)

    def recipe(self, recipe: Recipe) -> list[dict[str, Any]]:
        """Rows of a recipe, per text kind and over all. Raises KVCellarError when its file cannot be decoded."""
        folder = self.results / f"{source_digest()}-{recipe.digest.hex()[:16]}"
        scorer: list[Scorer] = []

        def compute(window: Window, out: Path) -> dict[str, Any]:
            if not scorer:
                scorer.append(Scorer(self.local.folder))
            return self._recipe_window(recipe, window, out, scorer[0])

        try:
            results = self._collect(recipe.name, folder, compute)
        finally:
            for process in scorer:
                process.close()
        return self._rows(recipe.name, results)

    def _recipe_window(self, recipe: Recipe, window: Window, out: Path, scorer: Scorer) -> dict[str, Any]:
        with open_archive(self.references.archive(window), identity=self.local.identity) as original:
            cache: Any = original.restore().cache
        with tempfile.TemporaryDirectory(prefix="kvcellar-bench-") as scratch:
            path = Path(scratch) / "window.kvc"
            prefix = window.ids[: window.prefix]
            started = time.perf_counter()
            info = save(path, cache, tokens=prefix, identity=self.local.identity, recipe=recipe)
            save_s = time.perf_counter() - started
            del cache
            decoded = scorer.score(path, self.references.logits_file(window), len(prefix), out)
            return {
                "file_bytes": info.file_bytes,
                "payload_bytes": payload_bytes(path),
                "payload_tokens": len(prefix),
                "profile_bytes": info.profile_bytes,
                "kept": 1.0,
                "save_s": save_s,
                "restore_class": "none",
                **decoded,
            }

    def peer(self, name: str) -> list[dict[str, Any]]:
        """Rows of a peer on the same caches, decoded in this process. Raises KVCellarError when it is not here."""
        folder = self.results / f"peer-{name}"

        def compute(window: Window, out: Path) -> dict[str, Any]:
            with open_archive(self.references.archive(window), identity=self.local.identity) as original:
                cache: Any = original.restore().cache
            coded: Coded = PEERS[name](cache, self.local.model.config)
            logits = continuation_logits(self.local.model, window.ids[window.prefix :], coded.cache)
            write_scores(self.references.load(window), logits, out)
            return {
                "file_bytes": coded.nbytes,
                "payload_bytes": coded.nbytes,
                "payload_tokens": window.prefix,
                "profile_bytes": 0,
                "kept": 1.0,
                "save_s": coded.save_s,
                "restore_s": coded.restore_s,
                "restore_class": "none",
            }

        return self._rows(f"peer:{name}", self._collect(f"peer {name}", folder, compute))

    def floor(self) -> list[dict[str, Any]]:
        """Rows of ∅: sinks and recent window alone. Whatever is worse than this is no compression of the context."""

        def compute(window: Window, out: Path) -> dict[str, Any]:
            expected = self.references.load(window)
            write_scores(expected, expected["empty"], out)
            return {"kept": len(empty_positions(window.prefix)) / window.prefix}

        return self._rows(FLOOR_EMPTY, self._collect("∅", self.results / "floor-empty", compute))

    def _collect(self, label: str, folder: Path, compute: Callable[[Window, Path], dict[str, Any]]) -> list[Result]:
        folder.mkdir(parents=True, exist_ok=True)
        todo = [w for w in self.windows if not (folder / f"{key(w)}.json").is_file()]
        with progress(f"{label}: {len(todo)} windows", len(todo), quiet=self.quiet or not todo) as advance:
            for window in todo:
                costs = compute(window, folder / f"{key(window)}.npz")
                with LocalStore(folder).replacing(f"{key(window)}.json") as pending:  # last: it says the window is done
                    pending.append(json.dumps(costs).encode())
                advance(1)
        return [self._load(folder, window) for window in self.windows]

    def _load(self, folder: Path, window: Window) -> Result:
        with np.load(folder / f"{key(window)}.npz", allow_pickle=False) as scores:
            score = WindowScore(
                id=window.id, article=window.article, kind=window.kind, **{name: scores[name] for name in scores}
            )
        return Result(score, json.loads((folder / f"{key(window)}.json").read_text()))

    def _rows(self, name: str, results: list[Result]) -> list[dict[str, Any]]:
        kinds = sorted({result.scores.kind for result in results})
        groups = [(kind, [r for r in results if r.scores.kind == kind]) for kind in kinds]
        groups = [(ALL, results), *groups] if len(groups) > 1 else groups
        return [self._row(name, kind, group) for kind, group in groups]

    def _row(self, name: str, kind: str, group: list[Result]) -> dict[str, Any]:
        summary = summarize([result.scores for result in group])
        tokens = {window.prefix for window in self.windows}
        prefix = tokens.pop() if len(tokens) == 1 else None
        files = _known(group, "file_bytes")
        payload, coded = _known(group, "payload_bytes"), _known(group, "payload_tokens")
        prefills = [self.references.prefill_s(w) for w in self.windows if kind in (ALL, w.kind)]
        return {
            "recipe": name,
            "text": kind,
            "tokens": prefix,
            "windows": summary.windows,
            "kept": median(r.costs["kept"] for r in group),
            "file_bytes": median(files) if files else None,
            "file_bytes_per_token": sum(files) / (len(files) * prefix) if files and prefix else None,
            "payload_bytes_per_token": sum(payload) / sum(coded) if payload else None,
            "profile_bytes": group[0].costs.get("profile_bytes"),
            "kl": summary.kl,
            "kl_ci": summary.kl_ci,
            "kl_p99": summary.kl_p99,
            "dppl": summary.dppl,
            "dppl_ci": summary.dppl_ci,
            "rcb": summary.rcb,
            "rcb_ci": summary.rcb_ci,
            "top1": 1 - summary.top1_flips,
            "margin": None,
            "save_s": _median(_known(group, "save_s")),
            "restore_s": _median(_known(group, "restore_s")),
            "prefill_s": median(prefills),
            "peak_bytes": max(_known(group, "peak_bytes"), default=None),
            "restore_class": group[0].costs.get("restore_class"),
            "articles": summary.articles,
            "scored_tokens": summary.tokens,
        }


def payload_bytes(path: Path) -> int:
    """All bytes that code tokens in an archive, ids included: the parts of its blocks and their packed ids."""
    store, name = LocalStore.at(path)
    with ArchiveReader(store.open_reader(name)) as archive:
        heads = [archive.block(i).head for i in range(len(archive.entries))]
    return sum(head.body_length + head.id_bytes for head in heads)


def _known(group: Iterable[Result], cost: str) -> list[Any]:
    return [r.costs[cost] for r in group if r.costs.get(cost) is not None]


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
