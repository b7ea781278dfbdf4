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
    from rich.progress import Progress

    from rl360.config.schemas import RootConfig
    from rl360.tasks.calibration import Journal
    from rl360.tasks.validation import ReportFile, TaskReport
    from rl360.types import Attempt, GroupSpec, Task

EXIT_FINE, EXIT_PROBLEM, EXIT_USAGE = 0, 1, 2
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
    from rl360.tasks import tables
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
    rows = [
        (task.task_id, ", ".join(task.tags), reports.last_verdict(task), needs_of(task.path).in_words) for task in shown
    ]
    tables.show(("task", "tags", "validated", "needs"), rows)
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
    from rl360.tasks import tables
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
    tables.show_reports(reports)
    print(f"report: {report.path}")
    return EXIT_FINE if all(r.verdict == "valid" for r in reports) else EXIT_PROBLEM


def _validate(
    found: Sequence[Task], config: RootConfig, report: ReportFile, jobs: int, force: bool, folder: Path
) -> list[TaskReport]:
    """Reports in the order of the tasks; those of unchanged tasks come from the file."""
    from rl360.tasks import tables, wiring
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

    with wiring.probe_workers(config, folder, jobs, _num_cores()) as workers, tables.progress_bar() as progress:
        asyncio.run(run_all(progress))
    return [reports[task.task_id] for task in found]


def calibrate(arguments: Sequence[str]) -> int:
    """Measure how often the model solves each task: K attempts through the rollout that training uses.

    Takes the overrides of rl360 run: rl360 tasks calibrate tasks=overfit32 model=smollm2_135m --k 16. The same command
    continues where it was stopped. Infrastructure failures count in no rate and are tried again by the next run.
    """
    from rl360.engine.build import build_tasks, training_sampling
    from rl360.tasks import calibration, tables, wiring

    parser = _parser("calibrate", calibrate)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for rl360 run")
    parser.add_argument("-k", "--k", type=_positive, default=16, help="attempts a task (default: 16)")
    parser.add_argument("--folder", type=Path, help="default: <outputs>/calibration/<model>-<pool>")
    parser.add_argument("--force", action="store_true", help="begin again, whatever the folder holds")
    parser.add_argument("--low", type=_share, default=0.2, help="band shown in the table (default: 0.2)")
    parser.add_argument("--high", type=_share, default=0.4, help="band shown in the table (default: 0.4)")
    parsed = parser.parse_intermixed_args(arguments)
    paths, overrides = _split(parsed.overrides)
    if paths:
        raise ConfigError(f"tasks calibrate: {paths[0]} is no key=value; try tasks.path={paths[0]}")
    config = _examined(overrides)
    tasks, _ = build_tasks(config)
    pool = manifest_path(config.tasks.path)
    pool_name = pool.parent.name if pool.name == MANIFEST_NAME else f"{pool.parent.name}-{pool.stem}"
    default = Path(config.paths.outputs) / "calibration" / f"{config.model.name}-{pool_name}"
    folder = (parsed.folder or default).absolute()
    if parsed.force:
        (folder / calibration.JOURNAL_NAME).unlink(missing_ok=True)
    settings = wiring.attempt_settings(config)
    journal = calibration.Journal(folder, settings)
    groups = calibration.open_groups(tasks, journal, parsed.k, training_sampling(config), config.seed)
    try:
        if groups:
            _make_attempts(config, folder, journal, groups, len(tasks) * parsed.k)
    finally:
        journal.close()
        rates = [calibration.rate_of(task, journal.of(task), parsed.k) for task in tasks]
        result = calibration.write_result(folder, rates, tasks_path=str(pool.absolute()), k=parsed.k, settings=settings)
    tables.show_rates(rates, parsed.low, parsed.high)
    print(f"result: {result}")
    return EXIT_FINE if all(rate.attempts for rate in rates) else EXIT_PROBLEM


def _make_attempts(
    config: RootConfig, folder: Path, journal: Journal, groups: Sequence[GroupSpec], num_attempts: int
) -> None:
    from rl360.rollout.queue import RolloutEvents
    from rl360.tasks import calibration, tables, wiring

    left = sum(len(group.attempts) for group in groups)
    with tables.progress_bar() as progress:
        bar = progress.add_task("starting", total=num_attempts, completed=num_attempts - left)

        def finished(attempt: Attempt) -> None:
            journal.add(attempt)
            progress.update(bar, advance=1, description=attempt.spec.task.task_id)

        events = RolloutEvents(lambda spec: None, lambda spec, cause: None, finished, lambda: None)
        with wiring.policy_rollout(config, folder, events) as rollout:
            calibration.run(rollout, groups, config.cluster.no_progress_s, journal)


def select(arguments: Sequence[str]) -> int:
    """Write the tasks of a band of pass rates as a new pool, spread over their tags.

    The pool links to the task folders; selection.json says what was chosen and why the others were not.
    """
    from rl360.tasks import selection

    parser = _parser("select", select)
    parser.add_argument("calibration", type=Path, help="folder or calibration.json of rl360 tasks calibrate")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new pool")
    parser.add_argument("--low", type=_share, default=selection.REFERENCE_BAND[0], help="default: 0.2, the reference's")
    parser.add_argument("--high", type=_share, default=selection.REFERENCE_BAND[1], help="default: 0.4")
    parser.add_argument("--count", type=_positive, help="how many tasks (default: all of the band)")
    parser.add_argument("--min-attempts", type=_positive, default=1, help="attempts with a verdict (default: 1)")
    parser.add_argument("--max-failures", type=int, default=0, help="infrastructure failures of a task (default: 0)")
    parser.add_argument("--copy", action="store_true", help="copy the task folders, do not link to them")
    parsed = parser.parse_args(arguments)
    rule = selection.Rule(parsed.low, parsed.high, parsed.count, parsed.max_failures, parsed.min_attempts)
    source, rates, content = selection.read_calibration(parsed.calibration)
    choice = selection.choose(rates, rule)
    wanted = parsed.count or 1
    if len(choice.chosen) < wanted:
        reasons = Counter(reason.partition(" ")[0] for reason in choice.left_out.values())
        known = sorted(rate.rate for rate in rates if rate.rate is not None)
        spread = f"rates go from {known[0]:.2f} to {known[-1]:.2f}" if known else f"no task has a rate ({reasons})"
        raise ConfigError(
            f"select: {len(choice.chosen)} of {len(rates)} tasks from {rule.low:g} to {rule.high:g}, {wanted} wanted; "
            f"{spread}; try another --low and --high, or a smaller --count"
        )
    target = parsed.out.expanduser().absolute()
    selection.write_selection(target, Path(source), choice, rule, content, parsed.copy)
    tags = ", ".join(f"{count} {tag}" for tag, count in selection.counts_by_tag(choice.chosen).items())
    print(f"{len(choice.chosen)} of {len(rates)} tasks ({tags}) in {target}\ntrain on them with tasks.path={target}")
    return EXIT_FINE


def new(arguments: Sequence[str]) -> int:
    """Make a new task from a template that validates, with its row in the pool's manifest."""
    from rl360.config.locate import bundled_tasks
    from rl360.tasks.template import new_task

    parser = _parser("new", new)
    parser.add_argument("name", help="of the task's folder, such as leap-year")
    parser.add_argument("--pool", type=Path, default=Path("."), help="folder of the pool (default: the current one)")
    parser.add_argument("--tag", action="append", help="may be repeated; the first is the domain (default: coding)")
    parsed = parser.parse_args(arguments)
    pool = parsed.pool.expanduser()
    folder = new_task(parsed.name, pool, parsed.tag or ["coding"], bundled_tasks("template") / "count-words")
    print(
        f"{folder}: a task that validates. Write over:\n"
        "  instruction.md    what the agent is asked\n"
        "  environment/app/  what it finds in /app\n"
        "  tests/checks.py   what is checked, with the helpers of tests/grading.py\n"
        "  solution/solve.sh a right answer\n"
        f"then: rl360 tasks validate {pool} --task {parsed.name}"
    )
    return EXIT_FINE


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


def _examined(overrides: Sequence[str]) -> RootConfig:
    """As `rl360 check`, but for what only training needs: evaluation, batch size, room for the optimizer."""
    from rl360.config.check import examine
    from rl360.config.compose import Request, compose

    given = {override.partition("=")[0] for override in overrides}
    training_only = {"evaluation": "evaluation=none", "tasks_per_iteration": "tasks_per_iteration=1"}
    added = [text for key, text in training_only.items() if key not in given]
    composed = compose(Request((*added, *overrides)))
    examined = examine(composed)
    if problems := [p for p in examined.problems if not p.startswith(("memory:", "disk:"))]:
        raise ConfigError(problems)
    if examined.config is not None:
        return examined.config
    from rl360.config.check import load

    config = load(composed.values, composed.choices).config
    assert config is not None
    return config


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


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}; expected a rate from 0 to 1")
    return value


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


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
    "new": new,
    "validate": validate,
    "calibrate": calibrate,
    "select": select,
}
