"""The exact recipe against prefill, blosc2, zstd and memcpy, on one real bfloat16 cache, in one run.

    python benchmarks/exact.py [--model DIR] [--tokens 2000] [--quick] [--patience SECONDS]

Needs the extras: pip install -e '.[hf,bench]'. Prints tables and one JSON line; writes benchmarks/results/exact.json.
Linux only, because peak memory is read from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

import kvcellar
import peers
from common import Turns, add_model, give_memory_back, interleaved, machine, rounded, summary, write_result
from exactreport import claims, show
from fresh import IDENTITY, medians, run_fresh
from kvcellar.recipe import EXACT
from kvcellar.store.local import LocalReader
from realcache import Pairs, measured_prefill, raw_bytes, restore, tensors, topics_ids

FINALISTS = 3
RANGE_TOKENS = 10


@dataclass(frozen=True)
class Repeats:
    prefill: int
    choose: int
    restore: int
    save: int
    processes: int
    patience: float = 0.0


FULL = Repeats(prefill=5, choose=5, restore=31, save=11, processes=5)
QUICK = Repeats(prefill=2, choose=2, restore=15, save=5, processes=2)


@dataclass(frozen=True)
class Bench:
    """A cache, the bytes of it, and the folder its files go to."""

    pairs: Pairs
    ids: Tensor
    raw: np.ndarray
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "exact.kvc"

    @property
    def small(self) -> Path:
        return self.folder / "small.kvc"

    def save(self) -> Any:
        return kvcellar.save(self.path, self.pairs, tokens=self.ids, identity=IDENTITY)

    def restore(self) -> Any:
        return restore(self.path, IDENTITY)


def main() -> None:
    options = _options()
    repeats = replace(QUICK if options.quick else FULL, patience=options.patience)
    load = [os.getloadavg()[0]]
    _say("prefill")
    ids = topics_ids(options.model, options.tokens)
    pairs, prefill = measured_prefill(options.model, ids, repeats.prefill, repeats.patience)
    with tempfile.TemporaryDirectory(prefix="kvcellar-") as folder:
        bench = Bench(pairs, ids[0], raw_bytes(pairs), Path(folder))
        result = measured(bench, repeats)
    load.append(os.getloadavg()[0])
    result = {"benchmark": "exact", "machine": {**machine(), "load": load}, "prefill": prefill, **result}
    result["claims"] = claims(result)
    show(result)
    write_result("exact", result)
    print(json.dumps(rounded(result), ensure_ascii=False))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a look")
    wait = "on a shared machine, wait at most so long in each of six parts for other programs to pause"
    parser.add_argument("--patience", type=float, default=0.0, metavar="SECONDS", help=wait)
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        parser.error(f"no model in {options.model}")
    return options


def measured(bench: Bench, repeats: Repeats) -> dict[str, Any]:
    """Every figure but those of the model itself. Raises SystemExit when a restored cache differs in one bit."""
    _say("save")
    info = bench.save()
    require_same_bits(bench)
    save = interleaved({"save": bench.save}, repeats.save, patience=repeats.patience)
    cache = {
        "tokens": info.tokens,
        "layers": info.layers,
        "raw_bytes": bench.raw.nbytes,
        "file_bytes": info.file_bytes,
        "bytes_per_token": info.bytes_per_token,
        "ratio_16bit": info.ratio_16bit,
        "block": EXACT.block,
    }
    _say("restore and peers, taking turns")
    ways = peers.blosc2_ways(bench.raw, info.layers)
    peers.require_exact(ways, bench.raw)
    speed = measured_restore(bench, ways, repeats)
    _say("sizes, memory and range, in processes of their own")
    sizes = {
        "raw": bench.raw.nbytes,
        "zstd-3": peers.zstd_size(bench.raw),
        "blosc2": min(way.size for way in ways),
        "exact": info.file_bytes,
    }
    first = medians(run_fresh("first", {"path": bench.path}, repeats.processes))
    return {
        "cache": cache,
        "save": {**summary(save.seconds["save"], bench.raw.nbytes), "noisy_rounds": save.noisy},
        **speed,
        "first_restore": first,
        "sizes": sizes,
        "memory": measured_memory(bench, repeats),
        "range": measured_range(bench),
        "info": measured_info(bench, repeats),
    }


def measured_info(bench: Bench, repeats: Repeats) -> dict[str, Any]:
    """What `kvcellar info` prints, and how long the whole command takes."""
    command = [sys.executable, "-m", "kvcellar", "info", bench.path.name]
    seconds = []
    for _ in range(repeats.processes):
        started = time.perf_counter()
        done = subprocess.run(command, cwd=bench.folder, capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - started)
    lines = done.stdout.replace(str(bench.path), bench.path.name).rstrip().splitlines()
    return {"lines": lines, **summary(seconds)}


def require_same_bits(bench: Bench) -> None:
    back = [(layer.keys, layer.values) for layer in bench.restore().layers]
    if not np.array_equal(raw_bytes(back), bench.raw):
        raise SystemExit("the restored cache differs from the saved one")


def measured_restore(bench: Bench, ways: list[peers.Blosc2], repeats: Repeats) -> dict[str, Any]:
    """All blosc2 ways against each other, then the fastest of them against ours and plain copies, taking turns.

    Once as a loop runs, where the allocator may hand out the memory just freed, and once all in fresh memory.
    """
    decodes = {way.name: way.decode for way in ways}
    heats = _summaries(interleaved(decodes, repeats.choose, patience=repeats.patience), bench)
    chosen = sorted(ways, key=lambda way: heats[way.name]["median_s"])[:FINALISTS]
    cases = {
        "exact": bench.restore,
        **{way.name: way.decode for way in chosen},
        "blosc2 into memory already there": peers.blosc2_into(chosen[0], bench.raw),
        "safetensors read": peers.safetensors_read(bench.pairs, bench.folder / "plain.safetensors"),
        "clone": peers.cloned(bench.pairs),
        "copy into memory already there": peers.copied(bench.pairs),
    }
    kept = interleaved(cases, repeats.restore, patience=repeats.patience)
    fresh = interleaved(cases, repeats.restore, patience=repeats.patience, before=give_memory_back)
    restore = _summaries(kept, bench)
    return {
        "restore": restore,
        "restore_fresh_memory": _summaries(fresh, bench),
        "blosc2_fastest": min((way.name for way in chosen), key=lambda name: restore[name]["median_s"]),
        "blosc2_all": heats,
        "noisy_rounds": kept.noisy + fresh.noisy,
    }


def _summaries(turns: Turns, bench: Bench) -> dict[str, Any]:
    return {name: summary(seconds, bench.raw.nbytes) for name, seconds in turns.seconds.items()}


def measured_memory(bench: Bench, repeats: Repeats) -> dict[str, Any]:
    """Peak extra bytes of save and restore, the worst of several processes, and the limit they must keep."""
    plain = bench.folder / "memory.safetensors"
    safetensors.torch.save_file({**tensors(bench.pairs), "ids": bench.ids}, plain)
    small = {"tensors": plain, "small": bench.small, "out": bench.folder / "again.kvc"}
    save = run_fresh("save_memory", small, repeats.processes)
    back = run_fresh("restore_memory", {"path": bench.path, "small": bench.small}, repeats.processes)
    layer = bench.raw.nbytes // len(bench.pairs)
    block = bench.raw.nbytes * min(EXACT.block, len(bench.ids)) // len(bench.ids)
    return {
        "save_extra": max(each["extra"] for each in save),
        "restore_extra": max(each["extra"] for each in back),
        "restored": back[0]["restored"],
        "layer": layer,
        "block": block,
        "limit": max(2 * layer, 2 * block),
    }


def measured_range(bench: Bench) -> dict[str, Any]:
    """What reading a few tokens of one layer takes from the file, and how much of it is not the part they lie in."""
    layer = len(bench.pairs) // 2
    start = len(bench.ids) // 2
    with counted() as at_open:
        archive = kvcellar.open(bench.path)
    with archive:
        with counted() as at_read:
            keys, values = archive.read(layer, start, start + RANGE_TOKENS)
        (block,) = archive._open().blocks(start, start + RANGE_TOKENS)
        part_start = block.body_offset + block.head.part_offset(layer)
        part = range(part_start, part_start + block.head.parts[layer][0])
        blocks = archive._open().blocks(0, len(archive))
        bodies = [range(b.body_offset, b.body_offset + b.head.body_length) for b in blocks]
    expected = [x[0, :, start : start + RANGE_TOKENS] for x in bench.pairs[layer]]
    if not all(map(torch.equal, (keys, values), expected)):
        raise SystemExit("the range read differs from the saved one")
    in_bodies = sum(_overlap(piece, body) for piece in at_read for body in bodies)
    return {
        "tokens": RANGE_TOKENS,
        "layer": layer,
        "opening": sum(map(len, at_open)),
        "reading": sum(map(len, at_read)),
        "heads": sum(map(len, at_read)) - in_bodies,
        "part_read": sum(_overlap(piece, part) for piece in at_read),
        "part": len(part),
        "other_parts_read": in_bodies - sum(_overlap(piece, part) for piece in at_read),
        "file": bench.path.stat().st_size,
    }


def _overlap(a: range, b: range) -> int:
    return max(0, min(a.stop, b.stop) - max(a.start, b.start))


@contextmanager
def counted() -> Iterator[list[range]]:
    """The byte ranges read from local files meanwhile."""
    found: list[range] = []
    read, read_into = LocalReader.read, LocalReader.read_into

    def count_read(self: LocalReader, offset: int, length: int) -> bytes:
        data = read(self, offset, length)
        found.append(range(offset, offset + len(data)))
        return data

    def count_read_into(self: LocalReader, offset: int, buffer: memoryview) -> int:
        got = read_into(self, offset, buffer)
        found.append(range(offset, offset + got))
        return got

    LocalReader.read, LocalReader.read_into = count_read, count_read_into
    try:
        yield found
    finally:
        LocalReader.read, LocalReader.read_into = read, read_into


def _say(what: str) -> None:
    print(f"… {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
