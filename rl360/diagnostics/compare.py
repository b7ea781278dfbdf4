"""Several finished runs side by side, from their summary.json files alone.

In: (label, run folder) pairs. Out: lines of a table, best last success rate first, and how to see the runs in
TensorBoard. A run without a summary is shown as such: it is not left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COLUMNS = (
    ("success first", "success_rate_first"),
    ("success last", "success_rate_last"),
    ("reward last", "reward_last"),
    ("reward best", "reward_best"),
    ("iterations", "iterations"),
    ("step s", "step_s_median"),
    ("wall s", "wall_s"),
    ("ended", "exit_reason"),
)


def comparison(runs: Sequence[tuple[str, Path]]) -> list[str]:
    """The table. Numbers are as the runs wrote them, rounded to three digits after the point."""
    rows = [(label, folder, _summary(folder)) for label, folder in runs]
    rows.sort(key=lambda row: -_number(row[2].get("success_rate_last")))
    table = [["point", *(title for title, _ in _COLUMNS)]]
    table += [[label or "(no overrides)", *(_cell(s.get(key)) for _, key in _COLUMNS)] for label, _, s in rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    parent = os.path.commonpath([folder.parent for _, folder in runs])
    return [*lines, "", f"runs are in {parent}", f"compare them with: tensorboard --logdir {parent}"]


def _summary(folder: Path) -> dict[str, Any]:
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"exit_reason": "no summary"}
    return summary if isinstance(summary, dict) else {"exit_reason": "no summary"}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("-inf")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
