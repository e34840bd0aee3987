"""An archive of a million tokens, built by appends: what appending, opening, reading and matching cost by then.

    python benchmarks/million.py [--model DIR] [--tokens 1000000]

The numbers are those of a real cache, cut to a small geometry and repeated; blocks are coded apart, so repeating
makes nothing smaller. Appends are of 100 to 1,000 tokens with single tokens between them. Needs the extra:
pip install -e '.[hf]'. Prints tables and one JSON line; writes benchmarks/results/million.json. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import kvcellar
from common import add_model, give_memory_back, machine, rounded, summary, timed, write_result
from kvcellar.archive.writer import BLOCKS_PER_COMMIT_WALKED, INDEX_EVERY
from kvcellar.recipe import Recipe
from millionreport import claims, show
from realcache import Pairs, load, prefill, topics_ids

IDENTITY = "benchmark"
RECIPE = Recipe(name="exact, blocks of 256", symbols={"id": "byteplanes-zstd/1"}, block=256)
LAYERS, WIDTH, PERIOD = (10, 20), 8, 2048
TENTHS = 10
REPEATS = 31
RANDOM_READS = 400
WHOLE_APPENDS = 11


@dataclass(frozen=True)
class Source:
    """Tokens without end: `PERIOD` real ones over and over."""

    pairs: Pairs
    ids: np.ndarray

    def part(self, start: int, stop: int) -> tuple[Pairs, np.ndarray]:
        """Keys and values (1, 1, T, WIDTH) per layer, and ids (T,), of tokens `start`…`stop`."""
        where = np.arange(start, stop) % len(self.ids)
        index = torch.from_numpy(where)
        return [(k[:, :, index], v[:, :, index]) for k, v in self.pairs], self.ids[where]


def real_source(model: Path) -> Source:
    ids = topics_ids(model, PERIOD)
    layers = prefill(load(model, torch.bfloat16), ids).layers
    pairs = [tuple(x[:, :1, :, :WIDTH].clone() for x in (layers[i].keys, layers[i].values)) for i in LAYERS]
    return Source(pairs, ids[0].numpy())  # type: ignore[arg-type]


class Step(NamedTuple):
    """One append: tokens before it, tokens added, seconds, CPU seconds, and whether it rewrote the file."""

    before: int
    added: int
    seconds: float
    cpu: float
    compacted: bool


@dataclass
class Build:
    steps: list[Step] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)  # bytes at the end of each tenth
    longest_walk: int = 0


def main() -> None:
    options = _options()
    load_before = os.getloadavg()[0]
    source = real_source(options.model)
    give_memory_back()
    with tempfile.TemporaryDirectory(prefix="kvcellar-") as folder:
        path = Path(folder) / "million.kvc"
        build = built(path, source, options.tokens)
        result = {"build": measured_build(build, options.tokens), **measured(path, source, build)}
    where = {**machine(), "load": [load_before, os.getloadavg()[0]]}
    result = {"benchmark": "million", "machine": where, **result}
    result["claims"] = claims(result)
    show(result)
    write_result("million", result)
    print(json.dumps(rounded(result), ensure_ascii=False))


def sizes() -> Iterator[int]:
    rng = np.random.default_rng(0)
    while True:
        yield from (1, 1, int(rng.integers(100, 1001)))


def built(path: Path, source: Source, tokens: int) -> Build:
    """Append until `tokens` are stored, and then single tokens until the next one would write an index.

    That is when opening has the longest chain of commits to walk.
    """
    build, held = Build(), RECIPE.block
    cache, ids = source.part(0, held)
    kvcellar.save(path, cache, tokens=ids, identity=IDENTITY, recipe=RECIPE)
    more = sizes()
    with kvcellar.open(path, identity=IDENTITY, mode="a") as archive:
        while held < tokens:
            held = _append(archive, source, held, min(next(more), tokens - held), build)
            if held * TENTHS // tokens > len(build.resident):
                build.resident.append(_resident())
        while archive._open().since_index + 2 < _index_due(archive):
            held = _append(archive, source, held, 1, Build())
        build.longest_walk = archive._open().since_index
    return build


def _append(archive: Any, source: Source, held: int, added: int, build: Build) -> int:
    cache, ids = source.part(held, held + added)
    wall, cpu = time.perf_counter(), time.process_time()
    info = archive.append(cache, ids, start=held)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    build.steps.append(Step(held, added, wall, cpu, info.commits == 1))
    return held + added


def _index_due(archive: Any) -> int:
    return max(INDEX_EVERY, len(archive._open().entries) // BLOCKS_PER_COMMIT_WALKED)


def measured_build(build: Build, tokens: int) -> dict[str, Any]:
    """Medians of each tenth, of single tokens and of many; rewriting the file counts apart."""
    plain = [step for step in build.steps if not step.compacted]
    rewrites = [step for step in build.steps if step.compacted]
    kinds: dict[str, Callable[[Step], bool]] = {
        "1 token": lambda s: s.added == 1,
        "100–1,000": lambda s: s.added >= 100,
    }
    found: dict[str, Any] = {}
    for name, chosen in kinds.items():
        tenths = [[s for s in plain if chosen(s) and s.before * TENTHS // tokens == i] for i in range(TENTHS)]
        found[name] = {
            "median_s": [statistics.median(s.seconds for s in tenth) for tenth in tenths],
            "cpu_s": [statistics.median(s.cpu for s in tenth) for tenth in tenths],
            "worst_s": max(s.seconds for s in plain if chosen(s)),
        }
        for key in ("median_s", "cpu_s"):
            found[name][f"last_by_first_{key}"] = found[name][key][-1] / found[name][key][0]
    return {
        "appends": len(build.steps),
        "seconds": sum(step.seconds for step in build.steps),
        "kinds": found,
        "rewrites": {
            "count": len(rewrites),
            "seconds": sum(s.seconds for s in rewrites),
            "at": [s.before for s in rewrites],
        },
        "resident_bytes": build.resident,
        "resident_growth": build.resident[-1] - build.resident[0],
    }


def measured(path: Path, source: Source, build: Build) -> dict[str, Any]:
    """What the finished archive costs to open, read, match, go on with, check, and rewrite."""
    with kvcellar.open(path, identity=IDENTITY) as archive:
        info = archive.info()
        _, ids = source.part(0, len(archive))
        reads = random_reads(archive, source)
        restore = timed(archive.restore)
        started = time.perf_counter()
        sound = archive.verify().ok
        verify = time.perf_counter() - started
    opening = [timed(lambda: kvcellar.open(path).close()) for _ in range(REPEATS + 1)][1:]
    result = {
        "size": {key: info[key] for key in ("tokens", "file_bytes", "live_bytes", "raw_bytes", "blocks", "commits")},
        "open": {**summary(opening), "commits_walked": build.longest_walk},
        "read_one_token": reads,
        "restore_all_s": restore,
        "verify_s": verify,
        "sound": sound,
        "match": measured_match(path, ids),
        "whole_sequence_append": whole_sequence(path, source, info.tokens),
    }
    with kvcellar.open(path, mode="a") as archive:
        started = time.perf_counter()
        compact = archive.compact()
        result["compact"] = {"seconds": time.perf_counter() - started, "file_bytes": compact.file_bytes}
    opening = [timed(lambda: kvcellar.open(path).close()) for _ in range(REPEATS + 1)][1:]
    result["open_compact"] = summary(opening)
    return result


def random_reads(archive: Any, source: Source) -> dict[str, float]:
    """One token of one layer at random places, each from a block that was not read just before; values are checked."""
    rng = np.random.default_rng(1)
    spent = []
    for token in rng.integers(0, len(archive), RANDOM_READS).tolist():
        layer = token % len(LAYERS)
        started = time.perf_counter()
        keys, values = archive.read(layer, token, token + 1)
        spent.append(time.perf_counter() - started)
        expected, _ = source.part(token, token + 1)
        if not all(map(_same, (keys, values), expected[layer])):
            raise SystemExit(f"token {token} of layer {layer} differs from what was appended")
    return {**summary(spent), "p95_s": float(np.percentile(spent, 95))}


def _same(read: Tensor, given: Tensor) -> bool:
    return torch.equal(read.view(torch.int16), given[0].contiguous().view(torch.int16))


def measured_match(path: Path, ids: np.ndarray) -> dict[str, Any]:
    """The longest stored prefix of the whole sequence and 8 more tokens, and of one that differs half-way."""
    longer, middle = np.concatenate([ids, ids[:8]]), len(ids) // 2
    other = longer.copy()
    other[middle] += 1
    found = {}
    for name, prompt, expected in (("whole", longer, len(ids)), ("half", other, middle)):
        started = time.perf_counter()
        match = kvcellar.find(path.parent, prompt, identity=IDENTITY)
        found[name] = {"seconds": time.perf_counter() - started, "matched": match.matched, "reason": match.reason}
        if match.matched != expected:
            raise SystemExit(f"{match.matched} tokens match, expected {expected}")
    return found


def whole_sequence(path: Path, source: Source, held: int) -> dict[str, Any]:
    """Appends of one token that hand over the whole sequence: the first one reads all stored ids to compare them."""
    cache, ids = source.part(0, held + WHOLE_APPENDS)
    spent = []
    with kvcellar.open(path, identity=IDENTITY, mode="a") as archive:
        for stop in range(held + 1, held + WHOLE_APPENDS + 1):
            view = [(k[:, :, :stop], v[:, :, :stop]) for k, v in cache]
            spent.append(timed(lambda view=view, stop=stop: archive.append(view, ids[:stop])))
    return {"first_s": spent[0], **summary(spent[1:])}


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        parser.error(f"no model in {options.model}")
    return options


if __name__ == "__main__":
    main()
