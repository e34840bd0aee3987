"""Generated tasks under recipes, peers and ∅: what share of the right answers' margins is left.

Contexts are cached once as `exact` archives with the margins of the uncompressed cache and of ∅ beside them. A
recipe's archive is decoded and asked in the process that sees only its path. Rows are like those of the windows, one
per kind of task (`text` is ``task:KIND``), with `margin`, `margin_tasks` (how many counted) and `exact_match`.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...calibrate import find_fitted
from ...evaluate.tasks import Task
from ...geometry import Geometry
from ...profile import Profile
from ...recipe import Recipe
from ...store.local import LocalStore
from ..cli.common import progress
from ..cli.models import LocalModel, empty_cache, held_in
from ..library import open as open_archive
from ..library import save
from .peers import coded_by, gives_cache
from .reference import References, empty_positions, known_log2_probs
from .run import FLOOR_EMPTY, ROW, peer_folder, result_folder
from .scorer import Scorer
from .tasks import Scored, retained, scored


def _key(task: Task) -> str:
    """The name of a task's files: all it says, since files and generators give the same id to other tasks, too."""
    return hashlib.sha256(json.dumps(asdict(task)).encode()).hexdigest()[:32]


class TaskBench:
    """Tasks of one model, and the margins on them."""

    def __init__(self, local: LocalModel, tasks: Sequence[Task], *, quiet: bool = False):
        self.local, self.tasks, self.quiet = local, tasks, quiet
        self.folder = References(local).folder / "tasks"
        self.folder.mkdir(exist_ok=True)

    def prepare(self) -> None:
        """Run the model over every context that was not there before, and ask the uncompressed cache and ∅."""
        self._each("uncompressed side", "reference", self._refer)

    def _archive(self, task: Task) -> Path:
        return self.folder / f"{_key(task)}.kvc"

    def _refer(self, task: Task) -> dict[str, Any]:
        cache, ids = empty_cache(), self.local.encode(task.context, continues=True)
        self.local.prefill(ids, cache, quiet=True)
        held_in(cache, getattr(self.local, "cache_dtype", self.local.model.dtype))
        save(self._archive(task), cache, tokens=ids, identity=self.local.identity)
        with open_archive(self._archive(task), identity=self.local.identity) as archive:
            sparse: Any = archive.restore(positions=empty_positions(len(ids))).cache
        return {"full": scored(self.local, cache, task), "empty": scored(self.local, sparse, task)}

    def _geometry(self) -> Geometry:
        with open_archive(self._archive(self.tasks[0])) as archive:
            return archive.manifest.geometry

    def recipe(self, recipe: Recipe, profile: Profile | None = None) -> list[dict[str, Any]]:
        """Rows of a recipe, with `profile` or the newest fitted for it. Raises KVCellarError when its file cannot be
        decoded."""
        scorer: list[Scorer] = []
        profile = profile or find_fitted(recipe, self.local.identity, self._geometry())

        def ask(task: Task) -> dict[str, Any]:
            if not scorer:
                scorer.append(Scorer(self.local.folder))
            with tempfile.TemporaryDirectory(prefix="kvcellar-bench-") as scratch:
                path = Path(scratch) / "task.kvc"
                with open_archive(self._archive(task), identity=self.local.identity) as original:
                    tokens, cache = original.tokens.tolist(), original.restore().cache
                save(
                    path,
                    cache,
                    tokens=tokens,
                    identity=self.local.identity,
                    recipe=recipe,
                    profile=profile,
                    log2_probs=known_log2_probs(self.local, tokens, self.folder / f"{_key(task)}.log2.npy"),
                    replay_with=self.local.model,
                )
                return scorer[0].ask(path, len(tokens), asdict(task))

        try:
            found = self._each(recipe.name, result_folder(recipe, profile), ask)
        finally:
            for process in scorer:
                process.close()
        return self._rows(recipe.name, found)

    def peer(self, name: str) -> list[dict[str, Any]]:
        """Rows of a peer, none for one that keeps nothing a model here can read. Raises MissingExtra."""
        if not gives_cache(name):
            return []

        def ask(task: Task) -> dict[str, Any]:
            with open_archive(self._archive(task), identity=self.local.identity) as original:
                tokens, cache = original.tokens.tolist(), original.restore().cache
            coded = coded_by(name, cache, self.local.model.config, tokens=tokens)
            return dict(scored(self.local, coded.cache, task))

        return self._rows(f"peer:{name}", self._each(f"peer {name}", peer_folder(name), ask))

    def floor(self) -> list[dict[str, Any]]:
        """Rows of ∅: its margin is 0 by definition, its exact matches are not."""
        return self._rows(FLOOR_EMPTY, [reference["empty"] for reference in self._references()])

    def _references(self) -> list[dict[str, Scored]]:
        return [json.loads((self.folder / "reference" / f"{_key(task)}.json").read_text()) for task in self.tasks]

    def _each(self, label: str, folder: str, ask: Callable[[Task], dict[str, Any]]) -> list[Any]:
        """`ask(task)` for each task whose answer is not kept yet; all answers, in order."""
        kept = self.folder / folder
        kept.mkdir(exist_ok=True)
        todo = [task for task in self.tasks if not (kept / f"{_key(task)}.json").is_file()]
        with progress(f"{label}: {len(todo)} tasks", len(todo), quiet=self.quiet or not todo) as advance:
            for task in todo:
                answer = ask(task)
                with LocalStore(kept).replacing(f"{_key(task)}.json") as pending:
                    pending.append(json.dumps(answer).encode())
                advance(1)
        return [json.loads((kept / f"{_key(task)}.json").read_text()) for task in self.tasks]

    def _rows(self, name: str, answers: list[Scored]) -> list[dict[str, Any]]:
        rows = []
        for kind in dict.fromkeys(task.kind for task in self.tasks):
            triples = [
                (reference["full"], reference["empty"], answer)
                for task, reference, answer in zip(self.tasks, self._references(), answers, strict=True)
                if task.kind == kind
            ]
            share = retained(*([side["margin"] for side in sides] for sides in zip(*triples, strict=True)))
            row = {
                **dict.fromkeys(ROW),
                "recipe": name,
                "text": f"task:{kind}",
                "windows": len(triples),
                "margin": None if share is None else share.share,
                "margin_tasks": 0 if share is None else share.tasks,
                "exact_match": sum(answer["exact"] for *_, answer in triples) / len(triples),
                "exact_match_full": sum(full["exact"] for full, *_ in triples) / len(triples),
            }
            rows.append(row)
        return rows
