"""`rl360 tasks list | new | validate | calibrate | select`: from a folder of tasks to a set worth training on.

In: arguments. Out: an exit code (0 fine, 1 a problem), tables on stdout. Left to others: the commands that run trials
(trial_commands.py), what each of the rest does (manifest.py, selection.py, template.py).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rl360.config.names import suggestion
from rl360.errors import ConfigError
from rl360.tasks.arguments import (
    EXIT_FINE,
    EXIT_USAGE,
    bundled_pools,
    find_pool,
    parser_of,
    positive,
    share,
)
from rl360.tasks.manifest import load_tasks, manifest_path
from rl360.tasks.trial_commands import calibrate, validate

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

    parser = parser_of("list", list_tasks)
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
    for name, manifest in bundled_pools().items():
        print(f"{name:<36} {len(load_tasks(manifest)):>3} tasks")
    print("\nrl360 tasks list NAME shows one; tasks.path takes a folder or a manifest")
    return EXIT_FINE


def select(arguments: Sequence[str]) -> int:
    """Write the tasks of a band of pass rates as a new pool, spread over their tags.

    The pool links to the task folders; selection.json says what was chosen and why the others were not.
    """
    from rl360.tasks import selection

    parser = parser_of("select", select)
    parser.add_argument("calibration", type=Path, help="folder or calibration.json of rl360 tasks calibrate")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new pool")
    parser.add_argument("--low", type=share, default=selection.REFERENCE_BAND[0], help="default: 0.2, the reference's")
    parser.add_argument("--high", type=share, default=selection.REFERENCE_BAND[1], help="default: 0.4")
    parser.add_argument("--count", type=positive, help="how many tasks (default: all of the band)")
    parser.add_argument("--min-attempts", type=positive, default=1, help="attempts with a verdict (default: 1)")
    parser.add_argument("--max-failures", type=int, default=0, help="infrastructure failures of a task (default: 0)")
    parser.add_argument("--copy", action="store_true", help="copy the task folders, do not link to them")
    parser.add_argument("--force", action="store_true", help="replace the selection that --out holds")
    parsed = parser.parse_args(arguments)
    if parsed.low > parsed.high:
        raise ConfigError(f"select: --low {parsed.low:g} is above --high {parsed.high:g}; no rate lies between")
    target = parsed.out.expanduser().absolute()
    if (target / selection.SELECTION_NAME).is_file() and not parsed.force:
        raise ConfigError(f"select: {target} holds a selection; expected another --out, or --force to replace it")
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
    selection.write_selection(target, Path(source), choice, rule, content, parsed.copy)
    tags = ", ".join(f"{count} {tag}" for tag, count in selection.counts_by_tag(choice.chosen).items())
    print(f"{len(choice.chosen)} of {len(rates)} tasks ({tags}) in {target}\ntrain on them with tasks.path={target}")
    return EXIT_FINE


def new(arguments: Sequence[str]) -> int:
    """Make a new task from a template that validates, with its row in the pool's manifest."""
    from rl360.config.locate import bundled_tasks
    from rl360.tasks.template import new_task

    parser = parser_of("new", new)
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


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "list": list_tasks,
    "new": new,
    "validate": validate,
    "calibrate": calibrate,
    "select": select,
}
