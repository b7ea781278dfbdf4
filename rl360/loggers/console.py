"""What someone sees who watches a run in a terminal, or reads its output later.

In: scalars by iteration and the summary. Out: a live progress bar on a terminal, one plain line an iteration
elsewhere, and a short table at the end. Left to others: everything that must be kept.
"""

from __future__ import annotations

import atexit
import shlex
import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

RECENT_STEPS = 5  # whose median step time the remaining time is guessed from
ATTEMPT_KINDS = ("trained", "filtered", "masked", "requeued", "stale", "evaluated", "unused")


class ConsoleLogger:
    """protocols.Logger for people.

    Args:
        console: where to; None: standard output.
        live: draw a progress bar; None: when the console is a terminal.
    """

    def __init__(self, console: Console | None = None, live: bool | None = None) -> None:
        self._console = console
        self._live = live
        self._progress: Progress | None = None
        self._task: Any = None
        self._iterations = 0
        self._steps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._run_dir = Path()

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        from rich.console import Console

        self._run_dir = Path(run_dir)
        self._iterations = int(config.get("iterations", 0))
        self._console = self._console or Console()
        if self._live is None:
            self._live = self._console.is_terminal
        self._print(f"run folder: {self._run_dir}")
        if self._live:
            self._start_progress()

    def log(self, iteration: int, scalars: Mapping[str, float]) -> None:
        done = iteration + 1
        if "time/step_s" in scalars:
            self._steps_s.append(scalars["time/step_s"])
            shown: dict[str, Any] = {
                "reward": _number(scalars.get("reward/unfiltered_mean")),
                "success": _number(scalars.get("reward/success_rate")),
                "step": _number(scalars["time/step_s"], "{:.1f} s"),
                "left": _duration(statistics.median(self._steps_s) * max(0, self._iterations - done)),
            }
            if self._progress is not None:
                self._progress.update(self._task, completed=done, **shown)
            else:
                parts = "  ".join(f"{name} {value}" for name, value in shown.items())
                self._print(f"iteration {done}/{self._iterations}  {parts}")
        if "eval/success_rate" in scalars:
            self._print(f"evaluation at iteration {iteration}: success {_number(scalars['eval/success_rate'])}")

    def log_text(self, iteration: int, name: str, text: str) -> None:
        """Nothing: texts are for TensorBoard and the trajectory files."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._stop_progress()
        assert self._console is not None, "ConsoleLogger.start() comes first"
        self._console.print(_table(summary))
        # One line each and without wrapping, so that they can be copied.
        self._print(f"run folder:  {self._run_dir}")
        self._print(f"curves:      tensorboard --logdir {shlex.quote(str(self._run_dir))}")

    # ---- inside

    def _print(self, line: str) -> None:
        assert self._console is not None, "ConsoleLogger.start() comes first"
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _start_progress(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = [TextColumn(f"{name} {{task.fields[{name}]}}") for name in ("reward", "success", "step", "left")]
        self._progress = Progress(
            TextColumn("iteration"),
            MofNCompleteColumn(),
            BarColumn(),
            *columns,
            TimeElapsedColumn(),
            console=self._console,
        )
        unknown: dict[str, Any] = dict.fromkeys(("reward", "success", "step", "left"), "-")
        self._task = self._progress.add_task("train", total=self._iterations, **unknown)
        self._progress.start()
        atexit.register(self._stop_progress)  # a run that fails must not leave the terminal without a cursor

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            atexit.unregister(self._stop_progress)


def _table(summary: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"{summary.get('exit_reason', 'ended')} after {summary.get('iterations', '?')} iterations")
    table.add_column("")
    table.add_column("start", justify="right")
    table.add_column("end", justify="right")
    table.add_row("reward", _number(summary.get("reward_first")), _number(summary.get("reward_last")))
    table.add_row("success rate", _number(summary.get("success_rate_first")), _number(summary.get("success_rate_last")))
    attempts: Mapping[str, int] = summary.get("attempts") or {}
    kinds = ", ".join(f"{attempts[kind]} {kind}" for kind in ATTEMPT_KINDS if attempts.get(kind))
    table.add_section()
    table.add_row("attempts", str(attempts.get("started", 0)), kinds)
    causes: Mapping[str, int] = summary.get("masked_by_cause") or {}
    if causes:
        table.add_row("masked by", "", ", ".join(f"{count} {cause}" for cause, count in causes.items()))
    step = _number(summary.get("step_s_median"), "{:.1f} s")
    table.add_row("time", _duration(summary.get("wall_s")), f"{step} an iteration")
    return table


def _number(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
