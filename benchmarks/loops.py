"""Runs of the same samples beside each other, and whether one of them was predicted by another.

    python benchmarks/loops.py --out PREFIX [--predict FIT OTHER] RUN RUN ...

In: run folders. Out: PREFIX.md and PREFIX.json, a row a run: samples a second, seconds, staleness, success; with
--predict what `rl360 simulate FIT --against OTHER` says, and exit code 1 where that is not within 15 % of the measured
iteration, or where what it says of FIT itself is not: then two errors have only cancelled. The first iterations of a
run (max_staleness + 1 of them) compile kernels and fill the pipeline: rates are over the others, as in the simulation.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

WITHIN = 0.15  # of the measured iteration: the project's bar
SAMPLES = ("rollout/samples_trained", "rollout/samples_filtered")
PREDICTED = re.compile(r"([\d.]+) s measured, ([\d.]+) s predicted")
ITSELF = re.compile(r"the run itself: ([\d.]+) s an iteration measured, ([\d.]+) s simulated")


def numbers(run: Path) -> dict[str, Any]:
    """One run's row. Raises OSError without metrics.jsonl or resolved.yaml."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/step_s" in row]
    config = yaml.safe_load((run / "resolved.yaml").read_text())
    rollout = config["rollout"]
    steady = rows[rollout["max_staleness"] + 1 :] or rows
    step_s = sum(row["time/step_s"] for row in steady)

    def over(name: str, of: Sequence[Mapping[str, float]], how: Any = statistics.fmean) -> float | None:
        values = [row[name] for row in of if row.get(name) is not None]
        return how(values) if values else None

    return {
        "run": run.name,
        "max_staleness": rollout["max_staleness"],
        "colocated": rollout["sglang"]["colocated"],
        "iterations": len(rows),
        "samples": sum(row.get(name, 0) for row in rows for name in SAMPLES),
        "masked": over("rollout/samples_masked", rows, sum),
        "samples_per_s": sum(row.get(name, 0) for row in steady for name in SAMPLES) / step_s,
        "tokens_per_s": sum(row.get("perf/tokens_per_s", 0) * row["time/step_s"] for row in steady) / step_s,
        "wall_s": sum(row["time/step_s"] for row in rows),
        "step_s": step_s / len(steady),
        "wait_s": over("time/wait_s", steady),
        "train_s": over("time/train_s", steady),
        "publish_s": over("time/publish_s", steady),
        "stall_s": over("time/sync_stall_s", steady),
        "transfer_s": over("time/sync_transfer_s", steady),
        "staleness_max": over("rollout/staleness_max", rows, max),
        "staleness_mean": over("rollout/staleness_mean", steady),
        "mixed_versions": over("rollout/mixed_versions_share", steady),
        "importance_masked": over("mismatch/masked_share", steady),
        "kl": over("mismatch/kl", steady),
        "forks": over("rollout/forks", rows, sum),
        "success_first": over("reward/success_rate", rows[:2]),
        "success_last": over("reward/success_rate", rows[-2:]),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, a column a run."""

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = ["| | " + " | ".join(str(row["run"]) for row in rows) + " |", "|---" * (len(rows) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cell(row[name]) for row in rows) + " |" for name in rows[0] if name != "run"]
    return "\n".join(lines) + "\n"


def prediction(fit: Path, other: Path) -> tuple[list[str], list[float | None]]:
    """What `rl360 simulate` says; simulated / measured - 1 of `fit` itself and of `other`; None: it does not say."""
    from rl360.diagnostics.simulate_cli import main as simulate

    lines: list[str] = []
    simulate([str(fit), "--against", str(other)], lambda line: lines.append(str(line)))
    found = [pattern.search("\n".join(lines)) for pattern in (ITSELF, PREDICTED)]
    return lines, [None if one is None else float(one[2]) / float(one[1]) - 1 for one in found]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="prefix of the files to write")
    parser.add_argument("--predict", type=Path, nargs=2, metavar=("FIT", "OTHER"))
    parsed = parser.parse_args(arguments)
    rows = [numbers(run) for run in parsed.runs if (run / "metrics.jsonl").is_file()]
    text = table(rows) if rows else "no run has an iteration\n"
    errors: list[float | None] = [None, None]
    if parsed.predict and all((run / "metrics.jsonl").is_file() for run in parsed.predict):
        lines, errors = prediction(*parsed.predict)
        text += "\n" + "".join(f"    {line}\n" for line in lines)
    print(text, end="")
    parsed.out.with_suffix(".md").write_text(text)
    found = {"runs": rows, "own_error": errors[0], "prediction_error": errors[1]}
    parsed.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    held = all(error is not None and abs(error) <= WITHIN for error in errors)
    return 0 if rows and (parsed.predict is None or held) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
