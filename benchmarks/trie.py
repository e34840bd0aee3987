"""The language trie: memory and look-up time at 100,000 sessions, its file, `find` with and without it, a real model.

    python benchmarks/trie.py [--model DIR] [--parts sessions,chat,file,folder,model] [--sessions N]

Sessions are token ids of Python's reference topics and standard library under the demo model's tokenizer. Half of them
begin as a system prompt of their own does, the others part from an earlier session somewhere, as chats and retries do;
200 to 400 tokens each. Their probabilities are the tokens' frequencies in that text: a model's would take hours, and
the trie does not care. `chat`: one text of 4,000 tokens stored again after every token, the deepest trie there is, and
after every 32. `file`: a tenth of the sessions written and read. `folder`: 1,000 archives found by opening each, and by
the trie. `model`: what keeping probabilities costs a prefill, and how deep the paper's two sentences lie. Each part is
written when it is done; --parts repeats some and keeps the others. Times are processor time where nothing else is said.
One core. Prints progress and one JSON line; writes benchmarks/results/trie.json. Needs the extra [hf].
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from common import RESULTS, add_model, interleaved, machine, summary, write_result
from kvcellar.language.trie import LanguageTrie
from kvcellar.language.triefile import Entry, Stamp, trie_key
from kvcellar.profile import home
from search import token_ids

LIMIT_MB, LIMIT_MS = 500, 1.0
ASKED = 2000
TEXTS = ("You are a helpful assistant", "You are an AI assistant", "You are a helpless zebra")


def main() -> None:
    options = _options()
    path = RESULTS / "trie.json"
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for part in options.parts:
        print(f"{part} …", file=sys.stderr, flush=True)
        result[part] = {**PARTS[part](options), "machine": machine()}
        write_result("trie", result)
    result = json.loads(path.read_text(encoding="utf-8"))
    result["claims"] = claims(result)
    write_result("trie", result)
    for row in result["claims"]:
        print(f"{'holds' if row['holds'] else 'FAILS'}  {row['claim']}: {row['figures']}")
    print(json.dumps(result, ensure_ascii=False))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--parts", default=",".join(PARTS), help="which to measure; others keep their last figures")
    parser.add_argument("--sessions", type=int, default=100_000)
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    return options


def text_of(model: Path) -> np.ndarray:
    """uint32 (T,), kept beside the bench's files. Another process makes it: its memory would blur the figures."""
    kept = home() / "bench" / "trie-text.npy"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(1, get_context("spawn")) as other:
            np.save(kept, other.submit(token_ids, model).result().astype(np.uint32))
    return np.load(kept)


def sessions(text: np.ndarray, count: int) -> Iterator[tuple[str, np.ndarray]]:
    """Name and ids (T,) of each; the same on every run."""
    rng = np.random.default_rng(0)

    def cut(length: int) -> np.ndarray:
        start = int(rng.integers(len(text) - length))
        return text[start : start + length]

    systems = [cut(int(length)) for length in rng.integers(40, 160, 50)]
    made: list[np.ndarray] = []
    for number in range(count):
        length = int(rng.integers(200, 401))
        begin = systems[int(rng.integers(len(systems)))]
        if made and rng.random() < 0.5:
            begin = made[int(rng.integers(len(made)))]
            begin = begin[: int(rng.integers(1, len(begin) + 1))]
        ids = np.concatenate([begin, cut(length)])[:length]
        if len(made) < 1000:
            made.append(ids)
        yield f"{number:06}.kvc", ids


def many(options: argparse.Namespace) -> dict[str, Any]:
    text = text_of(options.model)
    log2 = np.log2(np.bincount(text) / len(text), where=np.bincount(text) > 0, out=np.zeros(int(text.max()) + 1))
    gc.collect()
    before, trie, started = resident_mb(), LanguageTrie(49_152), time.process_time()
    tokens, kept = 0, []
    rng = np.random.default_rng(1)
    for number, (name, ids) in enumerate(sessions(text, options.sessions)):
        trie.add(name, ids, log2[ids])
        tokens += len(ids)
        if rng.random() < ASKED / options.sessions:
            kept.append(np.concatenate([ids[: int(rng.integers(1, len(ids) + 1))], text[:50]]))
        if number % 20_000 == 19_999:
            print(f"  {number + 1:,} sessions, {resident_mb() - before:.0f} MB", file=sys.stderr, flush=True)
    built = time.process_time() - started
    gc.collect()
    taken = resident_mb() - before
    nodes = len(trie._start)
    longest, nearest = (times_ms(call, kept) for call in (trie.longest_prefix, trie.nearest))
    return {
        "sessions": len(trie),
        "tokens": tokens,
        "pooled_tokens": trie.pooled_tokens,
        "nodes": nodes,
        "memory_mb": taken,
        "add_s": built,
        "longest_prefix": longest,
        "nearest": nearest,
    }


def file(options: argparse.Namespace) -> dict[str, Any]:
    from kvcellar.frontends.trielog import TrieLog
    from kvcellar.identity import Identity
    from kvcellar.store.local import LocalStore

    text, trie = text_of(options.model), LanguageTrie()
    for name, ids in sessions(text, options.sessions // 10):
        trie.add(name, ids, np.full(len(ids), -5.0))
    key, stamp = trie_key(Identity.named("bench"), ""), Stamp(1, 2, 3, 4)
    with tempfile.TemporaryDirectory() as folder:
        log, started = TrieLog(LocalStore(folder), key), time.process_time()
        with log.writing() as written:
            log.append(written, (Entry(n, stamp, trie.tokens_of(n), trie.log2_probs_of(n)) for n in trie.names()))
        write_s, started = time.process_time() - started, time.process_time()
        again, back = TrieLog(LocalStore(folder), key), LanguageTrie()
        for entry in again.read():
            back.add(entry.name, entry.tokens, entry.log2_probs)
        read_s = time.process_time() - started
        assert len(back) == len(trie)
        nbytes = log.path.stat().st_size
    return {"sessions": len(trie), "bytes": nbytes, "write_s": write_s, "read_and_build_s": read_s}


def chat(options: argparse.Namespace) -> dict[str, Any]:
    ids, figures = text_of(options.model)[:4000], []
    for step in (1, 32):
        trie = LanguageTrie()
        for length in range(step, len(ids) + 1, step):
            trie.add(f"{length:05}.kvc", ids[:length])
        times = times_ms(trie.longest_prefix, [ids] * 200)
        figures.append({"tokens_a_turn": step, "sessions": len(trie), "longest_prefix": times})
    return {"tokens": len(ids), "turns": figures}


def folder(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    import kvcellar

    text, count = text_of(options.model), 1000
    side = torch.zeros(1, 1, 400, 2)
    with tempfile.TemporaryDirectory() as name:
        asked = []
        for file, ids in sessions(text, count):
            keys = side[:, :, : len(ids)]
            kvcellar.save(Path(name) / file, [(keys, keys)], tokens=ids.astype(np.int64), identity="bench")
            asked.append(ids)
        times: dict[str, list[float]] = {"scan": [], "first": [], "again": [], "held": []}
        held = kvcellar.Sessions(name, identity="bench")
        started = time.perf_counter()
        kvcellar.find(name, asked[0], identity="bench")
        times["first"].append((time.perf_counter() - started) * 1e3)
        held.refresh()
        for ids in asked[:: count // 20]:
            names = held.store.names()
            names = [each for each in names if each.endswith(".kvc")]
            ways: dict[str, Callable[[], Any]] = {
                "scan": lambda names=names, ids=ids: held._scan(names, ids.astype(np.int64))[0],
                "again": lambda ids=ids: kvcellar.find(name, ids, identity="bench"),
                "held": lambda ids=ids: held.search(ids)[0],
            }
            answers = []
            for way, call in ways.items():
                started = time.perf_counter()
                answers.append(call())
                times[way].append((time.perf_counter() - started) * 1e3)
            assert answers[0] == answers[1] == answers[2]
    return {"archives": count, **{f"{way}_ms": statistics.median(each) for way, each in times.items()}}


def model(options: argparse.Namespace) -> dict[str, Any]:
    from kvcellar.frontends.cli.models import LocalModel, empty_cache

    local, trie = LocalModel(options.model), LanguageTrie(49_152)
    for text in TEXTS:
        ids = local.encode(text)
        trie.add(text, ids, local.prefill(ids, empty_cache(), quiet=True, probabilities=True))
    ids = text_of(options.model)[:1024].tolist()
    cases = {
        name: lambda keep=keep: local.prefill(ids, empty_cache(), quiet=True, probabilities=keep)
        for name, keep in (("last_logits", False), ("all_probabilities", True))
    }
    turns = interleaved(cases, 5, patience=60)
    seconds = {name: summary(each) for name, each in turns.seconds.items()}
    ratio = statistics.median(
        b / a for a, b in zip(turns.seconds["last_logits"], turns.seconds["all_probabilities"], strict=True)
    )
    pairs = []
    for other in TEXTS:
        kin = trie.kinship(TEXTS[0], other)
        pairs.append(
            {
                "texts": [TEXTS[0], other],
                "common": local.tokenizer.decode(trie.tokens_of(other)[: kin.cell.tokens].tolist()),
                "d_t_as_printed_bits": kin.printed,
                "ultrametric": kin.ultrametric,
            }
        )
    return {"model": options.model.name, "tokens": len(ids), "prefill": seconds, "ratio": ratio, "pairs": pairs}


def times_ms(call: Callable[[Any], object], asked: list[np.ndarray]) -> dict[str, float]:
    """Processor time of a call, which other programs on the machine do not add to, and the median wall time."""
    times, walls = [], []
    call(asked[0])
    for ids in asked:
        started, wall = time.thread_time(), time.perf_counter()
        call(ids)
        times.append((time.thread_time() - started) * 1e3)
        walls.append((time.perf_counter() - wall) * 1e3)
    return {
        "median_ms": statistics.median(times),
        "p99_ms": float(np.quantile(times, 0.99)),
        "worst_ms": max(times),
        "wall_median_ms": statistics.median(walls),
    }


def resident_mb() -> float:
    """Memory of this process in MB (10⁶ bytes)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def claims(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    if "sessions" in result:
        many, name = result["sessions"], f"{result['sessions']['sessions']:,} sessions"
        mb, ms = many["memory_mb"], many["nearest"]["p99_ms"]
        rows.append((f"{name} within {LIMIT_MB} MB", mb <= LIMIT_MB, f"{mb:.0f} MB"))
        rows.append(
            (f"{name}: 99 of 100 look-ups below {LIMIT_MS} ms", ms < LIMIT_MS, f"nearest {ms:.3f} ms of processor time")
        )
    if "chat" in result:
        for turn in result["chat"]["turns"]:
            ms, name = (
                turn["longest_prefix"]["median_ms"],
                f"a chat stored after every {turn['tokens_a_turn']} of 4,000",
            )
            rows.append((f"{name} tokens: below {LIMIT_MS} ms", ms < LIMIT_MS, f"{ms:.3f} ms of processor time"))
    return [{"claim": claim, "holds": bool(holds), "figures": figures} for claim, holds, figures in rows]


PARTS = {"sessions": many, "chat": chat, "file": file, "folder": folder, "model": model}

if __name__ == "__main__":
    main()
