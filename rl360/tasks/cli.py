"""`rl360 tasks list | new | validate | calibrate | select`: from a folder of tasks to a set worth training on.

In: arguments. Out: an exit code (0 fine, 1 a problem), tables on stdout, progress on stderr. Left to others: what each
command does (validation.py, calibration.py, selection.py, template.py) and what it runs on (wiring.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rl360.config.names import suggestion
from rl360.errors import ConfigError, TaskError
from rl360.tasks.manifest import MANIFEST_NAME, load_tasks, manifest_path

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from rl360.config.schemas import RootConfig
    from rl360.tasks.validation import ReportFile, TaskReport
    from rl360.types import Task

EXIT_FINE, EXIT_PROBLEM, EXIT_USAGE = 0, 1, 2
_TABLE_COLUMNS = 120  # of a table that goes to a file or a pipe
_OVERRIDE = re.compile(r"^(\+{0,2}|~)[\w./@-]+=")

USAGE = """\
rl360 tasks: from a folder of tasks to a set worth training on

  rl360 tasks list [PATH]               what a pool holds (default: every bundled pool)
  rl360 tasks new NAME                  a new task from a template that validates
  rl360 tasks validate PATH             layout, oracle = 1, no-op < 1, cheaters = 0; only what changed is run
  rl360 tasks calibrate [key=value ...] pass rate of a model on each task; resumable
  rl360 tasks select CALIBRATION        the tasks of a band of pass rates, as a new folder

PATH is a folder with harbor_records.jsonl, a manifest of another name, or a bundled pool such as small_coding.
Each command answers --help.
"""


def main(arguments: Sequence[str]) -> int:
    """Entry point of `rl360 tasks`. Raises ConfigError for what the user wrote wrongly."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return EXIT_FINE
    name, rest = arguments[0], list(arguments[1:])
    command = COMMANDS.get(name)
    if command is None:
        print(f"rl360 tasks {name}: unknown command{suggestion(name, COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    return command(rest)


def list_tasks(arguments: Sequence[str]) -> int:
    """List the tasks of a pool with their tags and what is known of them, or every problem of the pool."""
    from rich.table import Table

    from rl360.tasks.needs import needs_of
    from rl360.tasks.validation import REPORT_NAME, ReportFile

    parser = _parser("list", list_tasks)
    parser.add_argument("path", nargs="?", help="folder, manifest or bundled pool; default: the bundled pools")
    parser.add_argument("--tag", action="append", default=[], help="only tasks with this tag; may be repeated")
    parsed = parser.parse_args(arguments)
    if parsed.path is None:
        return _list_pools()
    pool = find_pool(parsed.path)
    found = load_tasks(pool)
    shown = [task for task in found if set(parsed.tag) <= set(task.tags)]
    reports = ReportFile(manifest_path(pool).parent / REPORT_NAME)
    table = Table(box=None, pad_edge=False)
    for column in ("task", "tags", "validated", "needs"):
        table.add_column(column, overflow="fold")
    for task in shown:
        verdict = reports.last_verdict(task)
        table.add_row(task.task_id, ", ".join(task.tags), verdict, needs_of(task.path).in_words)
    _console().print(table)
    domains = Counter(task.domain for task in shown)
    print(f"{len(shown)} tasks in {pool}: {', '.join(f'{count} {tag}' for tag, count in domains.most_common())}")
    return EXIT_FINE


def _list_pools() -> int:
    from rl360.config.locate import bundled_tasks

    root = bundled_tasks("small_coding").parent
    for folder in sorted(path for path in root.iterdir() if (path / MANIFEST_NAME).is_file()):
        for manifest in sorted(folder.glob("*.jsonl"), key=lambda path: (path.name != MANIFEST_NAME, path.name)):
            whole = manifest.name == MANIFEST_NAME
            name = folder.name if whole else f"{folder.name}/{manifest.name}"
            print(f"{name:<36} {len(load_tasks(manifest)):>3} tasks")
    print("\nrl360 tasks list NAME shows one; tasks.path takes a folder or a manifest")
    return EXIT_FINE


def validate(arguments: Sequence[str]) -> int:
    """Run the oracle, a no-op and the cheaters on every task that changed since its last report.

    The report, validation.json, lies beside the manifest. Exit code 0: every task is valid.
    """
    from rl360.tasks.validation import REPORT_NAME, ReportFile

    parser = _parser("validate", validate)
    parser.add_argument(
        "arguments", nargs="+", metavar="PATH | key=value", help="a pool; overrides such as sandbox=docker"
    )
    parser.add_argument("-j", "--jobs", type=_positive, default=_num_cores(), help="trials at once (default: cores)")
    parser.add_argument("--force", action="store_true", help="run unchanged tasks too")
    parser.add_argument("--task", action="append", default=[], help="only this task; may be repeated")
    parser.add_argument("--report", type=Path, help=f"report file (default: {REPORT_NAME} beside the manifest)")
    parser.add_argument("--logs", type=Path, help="keep the logs of failed trials in this folder")
    parsed = parser.parse_intermixed_args(arguments)
    paths, overrides = _split(parsed.arguments)
    if len(paths) != 1:
        raise ConfigError(f"tasks validate: one PATH expected, got {len(paths)}: {' '.join(paths) or 'none'}")
    pool = find_pool(paths[0])
    config = _config(pool, overrides)
    found = load_tasks(pool, parsed.task)
    report = ReportFile(parsed.report or manifest_path(pool).parent / REPORT_NAME)
    try:
        report.add([])
    except OSError as error:
        raise ConfigError(
            f"{report.path}: cannot be written ({error.strerror}); name another file with --report"
        ) from error
    with _kept_or_temporary(parsed.logs) as folder:
        reports = _validate(found, config, report, parsed.jobs, parsed.force, folder)
    _show_reports(reports)
    print(f"report: {report.path}")
    return EXIT_FINE if all(r.verdict == "valid" for r in reports) else EXIT_PROBLEM


def _validate(
    found: Sequence[Task], config: RootConfig, report: ReportFile, jobs: int, force: bool, folder: Path
) -> list[TaskReport]:
    """Reports in the order of the tasks; those of unchanged tasks come from the file."""
    from rl360.tasks import wiring
    from rl360.tasks.cheaters import PROBES
    from rl360.tasks.needs import needs_of
    from rl360.tasks.probe_urls import probe_url
    from rl360.tasks.validation import ProbeResult, Validator, report_key

    keys = {task.task_id: report_key(task, wiring.sandbox_settings(config)) for task in found}
    reports = {}
    if not force:
        known = [(task, report.known(task, keys[task.task_id])) for task in found]
        reports = {task.task_id: row for task, row in known if row is not None}
    open_tasks = [task for task in found if task.task_id not in reports]
    if not open_tasks:
        return [reports[task.task_id] for task in found]

    async def run_all(progress: Progress) -> None:
        bar = progress.add_task("trials", total=len(open_tasks) * len(PROBES))

        def on_probe(task: Task, result: ProbeResult) -> None:
            progress.update(bar, advance=1, description=task.task_id)

        validator = Validator(
            workers,
            jobs=jobs,
            timeout_s=config.cluster.client_timeout_s,
            score_of=wiring.score_of,
            url_of=probe_url,
            on_probe=on_probe,
        )

        async def one(task: Task) -> None:
            row = await validator.validate(task, needs_of(task.path), keys[task.task_id])
            reports[task.task_id] = row
            report.add([row])
            progress.update(bar, completed=len(PROBES) * sum(not r.reused for r in reports.values()))

        await asyncio.gather(*(one(task) for task in open_tasks))

    with wiring.probe_workers(config, folder, jobs, _num_cores()) as workers, _progress() as progress:
        asyncio.run(run_all(progress))
    return [reports[task.task_id] for task in found]


def _show_reports(reports: Sequence[TaskReport]) -> None:
    from rich.table import Table

    styles = {"valid": "green", "invalid": "red", "unknown": "yellow"}
    table = Table(box=None, pad_edge=False)
    for column in ("task", "verdict", "oracle", "no-op", "cheaters", "seconds", "needs"):
        table.add_column(column, justify="right" if column in ("oracle", "no-op", "seconds") else "left")
    for report in reports:
        oracle, no_op, cheater = report.probe("oracle"), report.probe("no-op"), report.highest_cheater
        scores = [_score(result.reward if result else None) for result in (oracle, no_op)]
        highest = _score(cheater.reward) if cheater else "-"
        if cheater and cheater.reward != 0.0:
            highest += f" {cheater.name}"
        seconds = f"{oracle.total_s:.2f}" if oracle else "-"
        verdict = f"[{styles[report.verdict]}]{report.verdict}[/]{' (unchanged)' if report.reused else ''}"
        table.add_row(report.task_id, verdict, *scores, highest, seconds, report.needs.in_words)
    console = _console()
    console.print(table)
    for report in reports:
        for problem in report.problems:
            console.print(f"{report.task_id}: {problem}", markup=False, highlight=False, soft_wrap=True)
    counts = Counter(str(report.verdict) for report in reports)
    again = sum(report.reused for report in reports)
    words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in styles if counts[verdict])
    print(f"{len(reports)} tasks: {words}; {again} unchanged and not run")


def _score(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:g}"


# ---- shared ----------------------------------------------------------------------------------------------------------


def find_pool(text: str) -> Path:
    """A folder or manifest by its path, else a bundled pool by its name. Raises TaskError with what there is."""
    from rl360.config.locate import bundled_tasks

    path = Path(text).expanduser()
    if path.exists():
        return path.absolute()
    try:
        return bundled_tasks(text)
    except ConfigError as error:
        known = str(error).partition("there are: ")[2]
        raise TaskError(f"{text}: no such folder or manifest, and no bundled pool; bundled are: {known}") from error


def _config(pool: Path, overrides: Sequence[str]) -> RootConfig:
    """The settings that trials run with: those of `rl360 run` with the same overrides. No model is looked for."""
    from rl360.config.check import load
    from rl360.config.compose import Request, compose

    quoted = str(pool).replace("\\", "\\\\").replace("'", "\\'")
    composed = compose(Request((*overrides, f"tasks.path='{quoted}'")))
    loaded = load(composed.values, composed.choices)
    if problems := [*composed.problems, *loaded.problems]:
        raise ConfigError(dict.fromkeys(problems))
    assert loaded.config is not None
    return loaded.config


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(paths, overrides). What exists is a path, whatever it looks like."""
    overrides = [a for a in arguments if _OVERRIDE.match(a) and not Path(a).exists()]
    return [a for a in arguments if a not in overrides], overrides


def _parser(name: str, command: Callable[..., int]) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"rl360 tasks {name}", description=command.__doc__)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; expected at least 1")
    return value


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_TABLE_COLUMNS)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, TextColumn("{task.description}"), console=console, disable=not console.is_terminal)


@contextmanager
def _kept_or_temporary(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.absolute()
        return
    with TemporaryDirectory(prefix="rl360-tasks-", ignore_cleanup_errors=True) as name:
        yield Path(name)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "list": list_tasks,
    "validate": validate,
}
