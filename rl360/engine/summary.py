"""summary.json: how a run went, in the few numbers that someone compares runs by.

In: the run folder (trajectory indexes, metrics.jsonl when there is one), the ledger's counts and how the run ended.
Out: a dict with the keys of docs/guide/run_folder.md, and the file. Left to others: deciding why the run ended.

Rewards and successes come from the attempts, not from logged scalars, so that they do not depend on which loggers ran
and count a resumed run once.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import rl360
from rl360.config.schemas import RootConfig
from rl360.engine.frames import replace_file
from rl360.engine.journal import Trajectories
from rl360.types import OutcomeKind, Purpose

EXIT_REASONS = ("finished", "failed", "interrupted", "time_limit")
EDGE_ITERATIONS = 2  # whose attempts make success_rate_first and success_rate_last
DECIDED = {kind.value for kind in (OutcomeKind.TRAINED, OutcomeKind.FILTERED, OutcomeKind.MASKED, OutcomeKind.STALE)}
PACKAGES = ("torch", "transformers", "numpy", "harbor", "hydra-core", "tensorboard", "sglang", "ray")


def summarize(
    run_dir: Path,
    *,
    exit_reason: str,
    iterations: int,
    seed: int,
    wall_s: float,
    attempts: Mapping[str, int],
    masked_by_cause: Mapping[str, int],
) -> dict[str, Any]:
    """Build the summary. Numbers of which there are none (no attempt with a reward, say) are null.

    Args:
        iterations: trained ones; later rows, of an iteration that was not finished, are left out.
        wall_s: of all processes of the run together.
        attempts, masked_by_cause: `Ledger.counts()` and `Ledger.masked_by_cause()`.
    """
    if exit_reason not in EXIT_REASONS:
        raise ValueError(f"exit_reason {exit_reason!r}; expected one of {', '.join(EXIT_REASONS)}")
    by_iteration = _training_attempts(Path(run_dir), 0, iterations)
    means = [m for rows in by_iteration if (m := _mean(row["reward"] for row in rows)) is not None]
    return {
        "exit_reason": exit_reason,
        "iterations": iterations,
        "reward_first": means[0] if means else None,
        "reward_last": means[-1] if means else None,
        "reward_best": max(means, default=None),
        "reward_last_3_mean": _mean(means[-3:]),
        "success_rate_first": _success_rate(by_iteration[:EDGE_ITERATIONS]),
        "success_rate_last": _success_rate(by_iteration[-EDGE_ITERATIONS:]),
        "attempts": dict(attempts),
        "masked_by_cause": dict(masked_by_cause),
        "wall_s": round(wall_s, 3),
        "step_s_median": _step_s_median(Path(run_dir), iterations),
        "seed": seed,
        "code_version": code_version(),
        "packages": packages(),
    }


class Counts(Protocol):
    """What the run record tells of the ledger."""

    def counts(self) -> dict[str, int]: ...
    def masked_by_cause(self) -> dict[str, int]: ...


def summarize_run(
    config: RootConfig, run_dir: Path, record: Counts, reason: str, *, wall_s: float, iterations: int | None = None
) -> dict[str, Any]:
    """`summarize` for a run that just ended. iterations None: as many as have decided training attempts; so for a
    resume that failed before it knew where to go on."""
    if iterations is None:
        done = [i for i in Trajectories(run_dir).iterations() if _training_attempts(run_dir, i, i + 1)]
        iterations = max(done, default=-1) + 1
    return summarize(
        run_dir,
        exit_reason=reason,
        iterations=iterations,
        seed=config.seed,
        wall_s=wall_s,
        attempts=record.counts(),
        masked_by_cause=record.masked_by_cause(),
    )


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    path = Path(run_dir) / "summary.json"
    replace_file(path, (json.dumps(summary, indent=2) + "\n").encode())
    return path


def code_version() -> str:
    """The package's version, with the commit when it runs from a checkout; `+changes` marks uncommitted ones."""
    version = metadata.version("rl360") if _installed("rl360") else "unknown"
    root = Path(rl360.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return version
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+changes", "--exclude=*"]
        commit = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version}+{commit}" if commit else version


def packages() -> dict[str, str]:
    """Versions of Python and of what the run depends on most, where installed."""
    found = {name: metadata.version(name) for name in PACKAGES if _installed(name)}
    return {"python": platform.python_version(), **found}


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _training_attempts(run_dir: Path, begin: int, end: int) -> list[list[dict[str, Any]]]:
    """Index lines of decided training tries, one list an iteration in [begin, end) that has any."""
    trajectories = Trajectories(run_dir)
    found = [
        [line for line in trajectories.index(i) if line["purpose"] == Purpose.TRAIN and line["kind"] in DECIDED]
        for i in trajectories.iterations()
        if begin <= i < end
    ]
    return [rows for rows in found if rows]


def _success_rate(by_iteration: Sequence[Sequence[Mapping[str, Any]]]) -> float | None:
    return _mean(row["success"] for rows in by_iteration for row in rows)


def _mean(values: Any) -> float | None:
    numbers = [float(v) for v in values if isinstance(v, bool | int | float)]
    return sum(numbers) / len(numbers) if numbers else None


def _step_s_median(run_dir: Path, iterations: int) -> float | None:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return None
    # A line without an end was cut off by a full disk or a crash.
    rows = (json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
    steps = [r["time/step_s"] for r in rows if r["iteration"] < iterations and r.get("time/step_s") is not None]
    return statistics.median(steps) if steps else None
