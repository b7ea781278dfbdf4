"""`rl360 tasks validate | calibrate`: the commands that run trials.

In: arguments. Out: an exit code, a table on stdout, progress on stderr. Left to others: what is found out
(validation.py, calibration.py) and what it runs on (wiring.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl360.errors import ConfigError
from rl360.tasks.arguments import (
    EXIT_FINE,
    EXIT_PROBLEM,
    config_of,
    examined_config,
    find_pool,
    kept_or_temporary,
    num_cores,
    parser_of,
    positive,
    share,
    split,
)
from rl360.tasks.manifest import MANIFEST_NAME, load_tasks, manifest_path

if TYPE_CHECKING:
    from rich.progress import Progress

    from rl360.config.schemas import RootConfig
    from rl360.tasks.calibration import Journal
    from rl360.tasks.validation import ReportFile, TaskReport
    from rl360.types import Attempt, GroupSpec, Task


def validate(arguments: Sequence[str]) -> int:
    """Run the oracle, a no-op and the cheaters on every task that changed since its last report.

    The report, validation.json, lies beside the manifest. Exit code 0: every task is valid.
    """
    from rl360.tasks import tables
    from rl360.tasks.validation import REPORT_NAME, ReportFile

    parser = parser_of("validate", validate)
    parser.add_argument(
        "arguments", nargs="+", metavar="PATH | key=value", help="a pool; overrides such as sandbox=docker"
    )
    parser.add_argument("-j", "--jobs", type=positive, default=num_cores(), help="trials at once (default: cores)")
    parser.add_argument("--force", action="store_true", help="run unchanged tasks too")
    parser.add_argument("--task", action="append", default=[], help="only this task; may be repeated")
    parser.add_argument("--report", type=Path, help=f"report file (default: {REPORT_NAME} beside the manifest)")
    parser.add_argument("--logs", type=Path, help="keep the logs of failed trials in this folder")
    parsed = parser.parse_intermixed_args(arguments)
    paths, overrides = split(parsed.arguments)
    if len(paths) != 1:
        raise ConfigError(f"tasks validate: one PATH expected, got {len(paths)}: {' '.join(paths) or 'none'}")
    pool = find_pool(paths[0])
    config = config_of(pool, overrides)
    found = load_tasks(pool, parsed.task)
    report = ReportFile(parsed.report or manifest_path(pool).parent / REPORT_NAME)
    try:
        report.add([])
    except OSError as error:
        raise ConfigError(
            f"{report.path}: cannot be written ({error.strerror}); name another file with --report"
        ) from error
    with kept_or_temporary(parsed.logs) as folder:
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

    with wiring.probe_workers(config, folder, jobs, num_cores()) as workers, tables.progress_bar() as progress:
        asyncio.run(run_all(progress))
    return [reports[task.task_id] for task in found]


def calibrate(arguments: Sequence[str]) -> int:
    """Measure how often the model solves each task: K attempts through the rollout that training uses.

    Takes the overrides of rl360 run: rl360 tasks calibrate tasks=overfit32 model=smollm2_135m --k 16. The same command
    continues where it was stopped. Infrastructure failures count in no rate and are tried again by the next run.
    """
    from rl360.engine.build import build_tasks, training_sampling
    from rl360.tasks import calibration, tables, wiring

    parser = parser_of("calibrate", calibrate)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for rl360 run")
    parser.add_argument("-k", "--k", type=positive, default=16, help="attempts a task (default: 16)")
    parser.add_argument("--folder", type=Path, help="default: <outputs>/calibration/<model>-<pool>")
    parser.add_argument("--force", action="store_true", help="begin again, whatever the folder holds")
    parser.add_argument("--low", type=share, default=0.2, help="band shown in the table (default: 0.2)")
    parser.add_argument("--high", type=share, default=0.4, help="band shown in the table (default: 0.4)")
    parsed = parser.parse_intermixed_args(arguments)
    paths, overrides = split(parsed.overrides)
    if paths:
        raise ConfigError(f"tasks calibrate: {paths[0]} is no key=value; try tasks.path={paths[0]}")
    config = examined_config(overrides)
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
