"""Fuzzing of everything that reads an archive: opening, info, verify, restore, read, match, repair.

    python benchmarks/fuzz.py --inputs 1000000      goes on where the last run with this seed stopped
    python benchmarks/fuzz.py --only 1234           one input, in this process, with its traceback

Each input is a small archive damaged by `fuzzmutate`, known by the seed and its number. A result must be right or an
error of ours, within a second of CPU time and 64 MB of memory. Right means, after blind damage: one of the states the
archive has had, bit for bit; after a repair: a prefix of all its tokens in a file that verifies. A forger who sets all
checksums right can state any numbers; then the results must agree with each other. Chunks of inputs run in processes
of their own, so that a crash is a finding too. Results: benchmarks/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import RESULTS, machine, write_result
from fuzzcases import Case, cases
from fuzzcheck import Input, exercise, input_of

CHUNK = 2_000
SECONDS, MEGABYTES = 1.0, 64
STUCK = 60.0
FINDINGS_KEPT = 40


def run(seed: int, numbers: range, held: list[Case], at: Any = None) -> dict[str, Any]:
    """Counts of outcomes and findings of these inputs; `at` is told the number about to be tried."""
    outcomes: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    slowest, peak = 0.0, _peak()
    ended, before = time.process_time(), peak
    for number in numbers:
        if at is not None:
            at.value = number
        given = input_of(seed, number, held)
        try:
            outcomes[exercise(given)] += 1
        except Exception as error:
            outcomes["finding"] += 1
            findings.append(_finding(given, f"{type(error).__name__}: {str(error)[:300]}", error))
        started, ended = ended, time.process_time()  # asking twice an input would be a tenth of all time
        spent = ended - started
        slowest = max(slowest, spent)
        if spent > SECONDS:
            findings.append(_finding(given, f"{spent:.1f} s", None))
        was, before = before, _peak()
        if before - was > MEGABYTES:
            findings.append(_finding(given, f"{before - was:.0f} MB more", None))
    return {"outcomes": dict(outcomes), "findings": findings, "slowest_s": slowest, "grown_mb": _peak() - peak}


def _finding(given: Input, problem: str, error: Exception | None) -> dict[str, Any]:
    where = traceback.extract_tb(error.__traceback__)[-1] if error is not None else None
    place = f"{Path(where.filename).name}:{where.lineno}" if where else ""
    return {"input": given.number, "case": given.case.name, "damage": given.kind, "problem": problem, "where": place}


def _peak() -> float:
    """Most memory this process has used so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _child(seed: int, numbers: range, held: list[Case], at: Any, answer: Connection) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 1 << 22
    most = pages * resource.getpagesize() + (2 << 30)  # a bomb ends as MemoryError instead of taking the machine along
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    answer.send(run(seed, numbers, held, at))


def isolated(seed: int, numbers: range, held: list[Case]) -> Iterator[dict[str, Any]]:
    """Results of these inputs from processes of their own: one, and another behind each input that ends a process."""
    fork = multiprocessing.get_context("fork")
    while len(numbers):
        at = fork.Value("q", numbers.start)
        here, there = fork.Pipe(duplex=False)
        process = fork.Process(target=_child, args=(seed, numbers, held, at, there))
        process.start()
        there.close()
        seen, since = -1, time.monotonic()
        while process.is_alive() and not here.poll(0.2):
            if at.value != seen:
                seen, since = at.value, time.monotonic()
            if time.monotonic() - since > STUCK:
                process.kill()
        try:
            yield here.recv()
            numbers = range(0)
        except EOFError:
            process.join()
            found = _finding(input_of(seed, at.value, held), f"the process ended with code {process.exitcode}", None)
            tried = {"process died": 1, "in a process that died": at.value - numbers.start}
            yield {"outcomes": tried, "findings": [found], "slowest_s": 0.0, "grown_mb": 0.0}
            numbers = range(at.value + 1, numbers.stop)
        process.join()


def _supervise(seed: int, chunks: list[range], held: list[Case], results: Any) -> None:
    parent = os.getppid()
    for numbers in chunks:
        if os.getppid() != parent:
            return  # the run was ended
        results.put((numbers.start, len(numbers), list(isolated(seed, numbers, held))))


def go(total: dict[str, Any], inputs: int, processes: int, held: list[Case], name: str) -> dict[str, Any]:
    """Try the inputs below `inputs` that are not done yet, `processes` chunks at a time; saves after each chunk."""
    fork = multiprocessing.get_context("fork")
    starts = [start for start in range(0, inputs, CHUNK) if start not in set(total["done"])]
    chunks = [range(start, min(start + CHUNK, inputs)) for start in starts]
    results = fork.SimpleQueue()
    work = [(total["seed"], chunks[i::processes], held, results) for i in range(processes)]
    supervisors = [fork.Process(target=_supervise, args=each) for each in work]
    began, spent = time.monotonic(), total["seconds"]
    for supervisor in supervisors:
        supervisor.start()
    for number in range(len(chunks)):
        start, count, found = results.get()
        total = added(total, found, count)
        total["done"] += [start] if count == CHUNK else []
        total["seconds"] = spent + time.monotonic() - began
        write_result(name, total)
        if number % 10 == 9 or number + 1 == len(chunks):
            rate = total["inputs"] / total["seconds"]
            line = f"{total['inputs']:,} inputs, {total['findings_in_all']} findings, {rate:,.0f} a second"
            print(line, file=sys.stderr, flush=True)
    for supervisor in supervisors:
        supervisor.join()
    return total


def added(total: dict[str, Any], results: list[dict[str, Any]], inputs: int) -> dict[str, Any]:
    """`total` with the results of `inputs` more."""
    outcomes = Counter(total["outcomes"])
    for result in results:
        outcomes.update(result["outcomes"])
    findings = [finding for result in results for finding in result["findings"]]
    return {
        **total,
        "inputs": total["inputs"] + inputs,
        "outcomes": dict(outcomes.most_common()),
        "findings_in_all": total["findings_in_all"] + len(findings),
        "findings": [*total["findings"], *findings][:FINDINGS_KEPT],
        "slowest_s": max([total["slowest_s"], *(result["slowest_s"] for result in results)]),
        "grown_mb": max([total["grown_mb"], *(result["grown_mb"] for result in results)]),
    }


def empty(seed: int, held: list[Case]) -> dict[str, Any]:
    """Results of no input yet."""
    counts = {"inputs": 0, "outcomes": {}, "findings_in_all": 0, "findings": [], "slowest_s": 0.0, "grown_mb": 0.0}
    archives = {case.name: len(case.data) for case in held}
    return {"seed": seed, **counts, "seconds": 0.0, "archives": archives, "machine": machine(), "done": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="how many in all, those of earlier runs included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int, help="try one input in this process")
    parser.add_argument("--name", default="fuzz", help="name of the results file")
    chosen = parser.parse_args()
    os.cpu_count = lambda: 1  # no threads inside an input: they cost more than they give, and cannot be forked
    held = cases()
    if chosen.only is not None:
        given = input_of(chosen.seed, chosen.only, held)
        print(f"{given.case.name}, {given.kind}, {len(given.data)} bytes")
        print(exercise(given))
        return
    file = RESULTS / f"{chosen.name}.json"
    total = json.loads(file.read_text()) if file.exists() else {}
    if total.get("seed") != chosen.seed:
        total = empty(chosen.seed, held)
    print(f"seed {chosen.seed}: from {total['inputs']:,} inputs to {chosen.inputs:,}", file=sys.stderr)
    run(chosen.seed, range(100), held)  # so that the processes that follow have everything loaded
    total = go(total, chosen.inputs, chosen.processes, held, chosen.name)
    print(json.dumps({key: total[key] for key in ("seed", "inputs", "findings_in_all", "slowest_s", "grown_mb")}))
    sys.exit(1 if total["findings_in_all"] else 0)


if __name__ == "__main__":
    main()
