"""Do the packaged peers, as we call them, do the harm that others measured? Their KL beside figures from elsewhere.

    python benchmarks/peers_validation.py [--text FILE …] [--windows N] [--model DIR] [--peers NAME,…]

Elsewhere: one text (the vim manual), 1,024 tokens of context, 512 read behind it by teacher forcing, KL in nats to the
uncompressed cache, SmolLM2-135M-Instruct. Here the same lengths, one window a file of `--text` (default: documentation
that comes with Python). transformers' quantized caches were read through there: new tokens were quantized as they
came, so `hf-…-through` stands beside those figures, and beside it the KL of `hf-…`, which quantizes the saved prefix
alone and is the one that recipes are compared with. A ratio within 1.5 either way counts as the same peer.

Uncompressed sides and scores are kept as the bench keeps them: a second run goes on where one was stopped. A peer that
is not installed is left out and named. Writes benchmarks/results/peers_validation.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import add_model, machine, rounded, write_result
from kvcellar.errors import KVCellarError
from kvcellar.evaluate.scores import WindowScore
from kvcellar.evaluate.texts import Window, standard_library, texts_from_files, windows
from kvcellar.frontends.bench.peers import THROUGH, coded_by
from kvcellar.frontends.bench.reference import References, continuation_logits, key, write_scores
from kvcellar.frontends.bench.rows import Result, rows_of
from kvcellar.frontends.bench.run import peer_folder
from kvcellar.frontends.cli.models import MeasuredModel
from kvcellar.frontends.library import open as open_archive

PREFIX, SCORED, WINDOWS = 1024, 512, 6
TOLERANCE = 1.5


class Figure(NamedTuple):
    """KL in nats and share of agreeing best tokens, measured elsewhere."""

    kl: float
    top1: float


ELSEWHERE = {
    "hf-fp8-through": Figure(0.017, 0.945),
    "hf-hqq4-through": Figure(0.017, 0.936),
    "hf-quanto4-through": Figure(0.022, 0.951),
    "hf-quanto2-axis0-through": Figure(2.2, 0.271),
    "hf-quanto2-axis-1-through": Figure(0.83, 0.594),
    "kakeyalattice-q10": Figure(0.0027, 0.979),
    "kakeyalattice-q4": Figure(0.022, 0.939),
    "kakeyalattice-q2": Figure(0.114, 0.861),
    "nexusquant-k4v4": Figure(0.0084, 0.971),
    "nexusquant-k3v3": Figure(0.021, 0.936),
    "nexusquant-k3v2": Figure(0.031, 0.930),
    "nexusquant-k2v2": Figure(0.122, 0.861),
    "cachegen-1024": Figure(0.032, 0.926),
    "cachegen-8bins-1024": Figure(0.50, 0.680),
    "turboquant-4": Figure(0.028, 0.924),
    "turboquant-3": Figure(0.23, 0.814),
    "turboquant-2": Figure(1.92, 0.330),
}


def main() -> None:
    options = _options()
    local = MeasuredModel(options.model)
    documents = texts_from_files(options.text) if options.text else standard_library("test")
    chosen = windows(
        documents, lambda text: local.encode(text, continues=True), PREFIX, SCORED, options.windows, options.kinds
    )
    if not chosen:
        raise SystemExit(f"no document reaches {PREFIX + SCORED:,} tokens")
    references = References(local)
    references.ensure(chosen, quiet=False)
    wanted = options.peers.split(",") if options.peers else list(ELSEWHERE)
    names = dict.fromkeys(each for name in wanted for each in (name, prefix_alone(name)) if each)
    rows, left_out = {}, {}
    for number, name in enumerate(names, 1):
        try:
            rows[name] = peer_row(references, name, chosen)
        except KVCellarError as error:
            left_out[name] = str(error)
            _say(f"[{number}/{len(names)}] {name} left out: {error}")
        else:
            _say(f"[{number}/{len(names)}] {name}: KL {rows[name]['kl']:.4f} on {len(chosen)} windows")
    by_name = {document.name: document.text for document in documents}
    result = {
        "benchmark": "peers_validation",
        "model": local.folder.name,
        "machine": machine(),
        "setting": {"prefix": PREFIX, "read": SCORED, "windows": len(chosen), "tolerance": TOLERANCE},
        "texts": {w.article: hashlib.sha256(by_name[w.article].encode()).hexdigest() for w in chosen},
        "rows": compared(rows),
        "left_out": left_out,
    }
    write_result("peers_validation", result)
    print(json.dumps(rounded(result), ensure_ascii=False))


def prefix_alone(name: str) -> str | None:
    """The peer that keeps the same of the prefix and quantizes nothing behind it; None where `name` is that already."""
    return name.removesuffix("-through") if name in THROUGH else None


def peer_row(references: References, name: str, chosen: Sequence[Window]) -> dict[str, Any]:
    """The bench's row of a peer over all windows; scores that are kept are not computed again.

    Raises KVCellarError when the peer is not here or fails.
    """
    folder = references.folder / "results" / f"{peer_folder(name)}-validation"
    folder.mkdir(parents=True, exist_ok=True)
    for window in chosen:
        out = folder / f"{key(window)}.npz"
        if not out.is_file():
            part = out.with_suffix(".part")
            write_scores(references.load(window), _logits(references, name, window), part)
            part.replace(out)
    return rows_of(f"peer:{name}", [_kept(folder, window) for window in chosen], PREFIX)[0]


def _logits(references: References, name: str, window: Window) -> Any:
    with open_archive(references.archive(window), identity=references.local.identity) as archive:
        cache = archive.restore().cache
    prefix, following = window.ids[: window.prefix], window.ids[window.prefix :]
    coded = coded_by(name, cache, references.local.model.config, tokens=prefix, following=following)
    if coded.logits is not None:
        return coded.logits
    return continuation_logits(references.local.model, following, coded.cache)


def _kept(folder: Path, window: Window) -> Result:
    with np.load(folder / f"{key(window)}.npz", allow_pickle=False) as scores:
        named = {name: scores[name] for name in scores}
    return Result(WindowScore(id=window.id, article=window.article, kind=window.kind, **named), {})


def compared(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each measured peer beside its figure from elsewhere, in the order of `ELSEWHERE`."""
    table = []
    for name, figure in ELSEWHERE.items():
        if name not in rows:
            continue
        row, alone = rows[name], prefix_alone(name)
        ratio = row["kl"] / figure.kl
        table.append(
            {
                "peer": name,
                "elsewhere": figure.kl,
                "kl": row["kl"],
                "kl_ci": row["kl_ci"],
                "ratio": ratio,
                "within": 1 / TOLERANCE <= ratio <= TOLERANCE,
                "kl_by_window": [each["kl"] for each in row["by_window"].values()],
                "top1": row["top1"],
                "top1_elsewhere": figure.top1,
                "kl_of_prefix_alone": rows[alone]["kl"] if alone in rows else None,
            }
        )
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="one window each, where long enough")
    parser.add_argument("--windows", type=int, default=WINDOWS, metavar="N")
    parser.add_argument("--peers", metavar="NAME,…", help="these alone")
    options = parser.parse_args()
    if unknown := set((options.peers or "").split(",")) - {"", *ELSEWHERE}:
        parser.error(f"unknown peers {sorted(unknown)}, expected some of {', '.join(ELSEWHERE)}")
    options.kinds = None if options.text else ("docs",)
    return options


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
