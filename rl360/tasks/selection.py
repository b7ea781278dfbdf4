"""Choose tasks by their pass rate and write them as a pool of their own.

In: calibration.json and the pool that it was made on. Out: a folder with links to the task folders,
harbor_records.jsonl with the rows as they were, and selection.json: what was chosen, by which rule, and why the others
were not. The reference recipe takes rates from 20 to 40 % over 16 attempts, without infrastructure failures.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl360.errors import TaskError
from rl360.tasks.calibration import RESULT_NAME, TaskRate
from rl360.tasks.manifest import MANIFEST_NAME, content_hash, manifest_path, read_manifest

SELECTION_NAME = "selection.json"
REFERENCE_BAND = (0.2, 0.4)


@dataclass(frozen=True, slots=True)
class Rule:
    """Which tasks may be chosen, and how many."""

    low: float = REFERENCE_BAND[0]  # pass rate, both ends included
    high: float = REFERENCE_BAND[1]
    count: int | None = None  # null: every task that may
    max_failures: int = 0  # infrastructure failures of a task
    min_attempts: int = 1  # attempts with a verdict


@dataclass(frozen=True, slots=True)
class Choice:
    chosen: tuple[TaskRate, ...]
    left_out: Mapping[str, str]  # task id -> why


def read_calibration(path: Path) -> tuple[str, list[TaskRate], Mapping[str, Any]]:
    """(path of the pool, rates, the whole file) of calibration.json or of its folder. Raises TaskError."""
    path = path / RESULT_NAME if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rates = [TaskRate(**{**row, "tags": tuple(row["tags"])}) for row in content["tasks"]]
        return str(content["tasks_path"]), rates, content
    except FileNotFoundError:
        raise TaskError(f"{path}: no such file; rl360 tasks calibrate writes it") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskError(f"{path}: not a calibration ({type(error).__name__}: {error})") from error


def choose(rates: Sequence[TaskRate], rule: Rule) -> Choice:
    """Tasks within the band, spread over tags: each next one is of the tag with the fewest so far.

    The first tag counts first, then the others; among equals the one nearest to the middle of the band, then by name.
    """
    left_out: dict[str, str] = {}
    open_rates: list[TaskRate] = []
    for rate in rates:
        if reason := _reason(rate, rule):
            left_out[rate.task_id] = reason
        else:
            open_rates.append(rate)
    middle = (rule.low + rule.high) / 2
    domains: Counter[str] = Counter()
    tags: Counter[str] = Counter()
    chosen: list[TaskRate] = []
    while open_rates and (rule.count is None or len(chosen) < rule.count):
        best = min(
            open_rates,
            key=lambda r: (
                domains[_domain(r)],
                sum(tags[tag] for tag in r.tags[1:]),
                round(abs((r.rate or 0.0) - middle), 9),
                r.task_id,
            ),
        )
        open_rates.remove(best)
        chosen.append(best)
        domains[_domain(best)] += 1
        tags.update(best.tags[1:])
    left_out.update({rate.task_id: "not needed: enough of its tags" for rate in open_rates})
    return Choice(tuple(chosen), left_out)


def write_selection(
    target: Path, source: Path, choice: Choice, rule: Rule, calibration: Mapping[str, Any], copy: bool = False
) -> None:
    """Write the new pool; a folder that exists is replaced only if it is a selection.

    Raises TaskError: a task changed since it was calibrated, or `target` is something else.
    """
    manifest = manifest_path(source)
    rows, problems = read_manifest(manifest)
    lines = manifest.read_text(encoding="utf-8").split("\n")
    texts = {row.instance_id: lines[row.line - 1] for row in rows}
    for rate in choice.chosen:
        folder = manifest.parent / rate.task_id
        if rate.task_id not in texts:
            problems.append(f"{rate.task_id}: not in {manifest} any more")
        elif content_hash(folder) != rate.content_hash:
            problems.append(f"{folder}: changed since it was calibrated; calibrate again")
    if target.exists() and not (target / SELECTION_NAME).is_file():
        problems.append(f"{target}: exists and is no selection; expected another --out")
    if problems:
        raise TaskError(problems)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for rate in choice.chosen:
        folder = (manifest.parent / rate.task_id).resolve()
        if copy:
            shutil.copytree(folder, partial / rate.task_id)
        else:
            (partial / rate.task_id).symlink_to(folder)
    chosen_lines = "".join(texts[rate.task_id] + "\n" for rate in choice.chosen)
    (partial / MANIFEST_NAME).write_text(chosen_lines, encoding="utf-8")
    content = {
        "source": str(manifest),
        "rule": asdict(rule),
        "calibration": {key: calibration.get(key) for key in ("k", "settings")},
        "tasks": [asdict(rate) for rate in choice.chosen],
        "left_out": dict(sorted(choice.left_out.items())),
    }
    (partial / SELECTION_NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(target)


def counts_by_tag(rates: Iterable[TaskRate]) -> dict[str, int]:
    return dict(Counter(_domain(rate) for rate in rates).most_common())


def _reason(rate: TaskRate, rule: Rule) -> str | None:
    if rate.infrastructure_failures > rule.max_failures:
        return f"{rate.infrastructure_failures} infrastructure failures"
    if rate.rate is None or rate.attempts < rule.min_attempts:
        return f"{rate.attempts} attempts with a verdict"
    if not rule.low <= rate.rate <= rule.high:
        return f"pass rate {rate.rate:.3f}"
    return None


def _domain(rate: TaskRate) -> str:
    return rate.tags[0] if rate.tags else "untagged"
