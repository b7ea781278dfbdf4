"""The tables and progress bars of `rl360 tasks`.

In: reports and rates. Out: tables on stdout; on stderr bars where that is a terminal, else a line every half a minute.
Nothing is decided here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from rl360.tasks.calibration import TaskRate
    from rl360.tasks.validation import TaskReport

_LINE_EVERY_S = 30.0
_COLUMNS = 120  # of a table that goes to a file or a pipe


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table. right: the columns of numbers."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def show_reports(reports: Sequence[TaskReport]) -> None:
    styles = {"valid": "green", "invalid": "red", "unknown": "yellow"}
    columns = ("task", "verdict", "oracle", "no-op", "cheaters", "seconds", "needs")
    rows = []
    for report in reports:
        oracle, no_op, cheater = report.probe("oracle"), report.probe("no-op"), report.highest_cheater
        scores = [_score(result.reward if result else None) for result in (oracle, no_op)]
        highest = _score(cheater.reward) if cheater else "-"
        if cheater and cheater.reward != 0.0:
            highest += f" {cheater.name}"
        seconds = f"{oracle.total_s:.2f}" if oracle else "-"
        verdict = f"[{styles[report.verdict]}]{report.verdict}[/]{' (unchanged)' if report.reused else ''}"
        rows.append((report.task_id, verdict, *scores, highest, seconds, report.needs.in_words))
    show(columns, rows, right=("oracle", "no-op", "seconds"))
    console = _console()
    for report in reports:
        for problem in report.problems:
            console.print(f"{report.task_id}: {problem}", markup=False, highlight=False, soft_wrap=True)
    counts = Counter(str(report.verdict) for report in reports)
    again = sum(report.reused for report in reports)
    words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in styles if counts[verdict])
    print(f"{len(reports)} tasks: {words}; {again} unchanged and not run")


def _score(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:g}"


def show_rates(rates: Sequence[TaskRate], low: float, high: float) -> None:
    columns = ("task", "tag", "solved", "rate", "95 %", "failures", "tokens", "turns", "in band")
    rows = []
    for rate in sorted(rates, key=lambda r: (-(r.rate if r.rate is not None else -1.0), r.task_id)):
        known = rate.rate is not None
        row = (
            rate.task_id,
            rate.tags[0] if rate.tags else "",
            f"{rate.successes}/{rate.attempts}",
            f"{rate.rate:.2f}" if known else "-",
            f"{rate.low:.2f}-{rate.high:.2f}" if known else "-",
            ", ".join(f"{count} {cause}" for cause, count in rate.causes.items()) or "0",
            f"{rate.tokens_mean:.0f}" if known else "-",
            f"{rate.turns_mean:.1f}" if known else "-",
            "[green]yes[/]" if rate.rate is not None and low <= rate.rate <= high else "",
        )
        rows.append(row)
    show(columns, rows, right=("solved", "rate", "95 %", "failures", "tokens", "turns"))
    judged = sum(rate.attempts for rate in rates)
    solved = sum(rate.successes for rate in rates)
    within = sum(rate.rate is not None and low <= rate.rate <= high for rate in rates)
    overall = f"{solved / judged:.3f}" if judged else "none"
    failures = sum(rate.infrastructure_failures for rate in rates)
    print(
        f"{len(rates)} tasks, {judged} attempts, pass rate {overall}, {failures} infrastructure failures; "
        f"{within} tasks from {low:g} to {high:g}"
    )


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_COLUMNS)


class _Lines(Progress):
    """Where stderr is no terminal: a line now and then, so that a log shows that something goes on."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        super().__init__(console=console, disable=True)
        self._clock = clock
        self._said = clock()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if self._clock() - self._said >= _LINE_EVERY_S:
            self._said = self._clock()
            task = self.tasks[task_id]
            print(f"{task.completed:g} of {task.total:g}: {task.description}", file=self.console.file, flush=True)


def progress_bar() -> Progress:
    console = Console(stderr=True)
    if not console.is_terminal:
        return _Lines(console)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.description}"), console=console)
