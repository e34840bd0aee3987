"""What every benchmark shares: which machine it ran on, how repeats are timed, and where results go."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcellar.evaluate.machine import machine as machine
from kvcellar.frontends.bench.speed import give_memory_back as give_memory_back
from kvcellar.frontends.bench.speed import timed as timed
from kvcellar.profile import home

if TYPE_CHECKING:
    from rich.table import Table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
NOISY = 0.08


def add_model(parser: argparse.ArgumentParser) -> None:
    """The option that says which model is read, by default the demo's."""
    default = home() / "models" / "smollm2-135m-instruct"
    parser.add_argument("--model", type=Path, default=default, metavar="DIR")


class Turns(NamedTuple):
    """Seconds of every call by case, and in how many rounds other programs took a share of the machine."""

    seconds: dict[str, list[float]]
    noisy: int


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    patience: float = 0.0,
    before: Callable[[], object] = gc.collect,
) -> Turns:
    """Seconds of `rounds` calls of each case, the cases taking turns so that a slow minute hits all of them.

    Odd rounds run in reverse order, so none always follows the same other. A result is freed and `before` is called,
    outside the time, before the next call. The first round only warms up. With `patience`, at most so many seconds
    are spent on waiting for other programs to pause and on rounds more; then the rounds with the least work of other
    programs count. Their own times never decide which.
    """
    tried: list[tuple[float, dict[str, float]]] = []
    give_up = time.monotonic() + patience
    for number in itertools.count():
        while time.monotonic() < give_up and _share_while_asleep() > NOISY:
            time.sleep(1.0)
        order = list(cases) if number % 2 else list(cases)[::-1]
        clock, spent = _Foreign(), {}
        for name in order:
            before()
            spent[name] = timed(cases[name])
        if number:
            tried.append((clock.share(), spent))
        quiet = sum(share <= NOISY for share, _ in tried)
        if quiet >= rounds or (len(tried) >= rounds and time.monotonic() >= give_up):
            break
    used = sorted(tried, key=lambda each: max(each[0], NOISY))[:rounds]
    seconds = {name: [spent[name] for _, spent in used] for name in cases}
    return Turns(seconds, sum(share > NOISY for share, _ in used))


class _Foreign:
    """The share of the machine's cores that other programs have used since this was made; 0 where not known."""

    def __init__(self) -> None:
        self.start = self._now()

    def share(self) -> float:
        wall, own, busy = (now - then for now, then in zip(self._now(), self.start, strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), _busy()


def _share_while_asleep(seconds: float = 0.25) -> float:
    clock = _Foreign()
    time.sleep(seconds)
    return clock.share()


def _busy() -> float:
    """Seconds all cores have worked since the machine started (Linux), stolen time included."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, irq, soft, steal, *_ = map(int, stat.read_text().split(maxsplit=11)[1:11])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def summary(seconds: list[float], nbytes: int | None = None) -> dict[str, Any]:
    """Median, fastest and slowest of some repeats; with the bytes they handled, also MB/s (10⁶) at the median."""
    middle = statistics.median(seconds)
    figures = {"median_s": middle, "min_s": min(seconds), "max_s": max(seconds), "repeats": len(seconds)}
    return figures if nbytes is None else {**figures, "mb_per_s": nbytes / middle / 1e6}


def rounded(value: Any) -> Any:
    """`value` with every float cut to five digits, which is more than any of them deserves."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_result(name: str, result: Mapping[str, Any]) -> Path:
    """`benchmarks/results/NAME.json`, from which the README's table is made."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(rounded(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def claims_table(result: Mapping[str, Any]) -> Table:
    """What `result["claims"]` says must hold, whether it does, and the figures."""
    from rich.table import Table

    table = Table(title="Must hold", title_justify="left")
    for column in ("", "holds", "figures"):
        table.add_column(column, justify="left" if not column else "right")
    for row in result["claims"]:
        table.add_row(row["claim"], "yes" if row["holds"] else "no", row["figures"])
    return table
