"""Reducers on generated tasks: what share of the right answers' margins is left with fewer tokens.

Contexts are reduced before the question is known. Rows are those of the other task benches (`margins.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...evaluate.tasks import Task
from ..cli.models import LocalModel
from ..library import open as open_archive
from .margins import TaskBench
from .reducers import METHODS, Case, Sampler, made_by, reduced_by
from .tasks import scored


class ReduceTasks(TaskBench):
    """Tasks of one model under reducers, with the sample queries of `sampler`."""

    def __init__(self, local: LocalModel, tasks: Sequence[Task], sampler: Sampler, *, quiet: bool = False):
        super().__init__(local, tasks, quiet=quiet)
        self.sampler = sampler

    def reduced(self, case: Case) -> list[dict[str, Any]]:
        """Rows of a case, one for each kind of task; an interrupted run goes on."""
        asks = METHODS[case.method].asks
        queries = f"-{self.sampler.digest()}" if asks in ("both", "own", "foreign") else ""

        def ask(task: Task) -> dict[str, Any]:
            with open_archive(self._archive(task), identity=self.local.identity) as original:
                tokens, cache = original.tokens, original.restore().cache
            reduced, costs = reduced_by(case, self.sampler, cache, tokens, {})
            del cache
            return {**scored(self.local, reduced, task), **costs}

        folder = f"reduce-{case.method}-{case.keep:g}-{case.seed}{queries}-{made_by()}"
        rows = self._rows(f"reduce:{case.method}@{case.keep:g}", self._each(case.label, folder, ask))
        return [{**row, "method": case.method, "keep": case.keep, "seed": case.seed} for row in rows]
