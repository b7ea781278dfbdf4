"""One row a seed of benchmarks/h200/seeds.sh: did quickstart learn, and how long did it take?

In: a folder with seed-N/summary.json and seed-N/metrics.jsonl. Out: a Markdown table on standard output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

START_AT_MOST, END_AT_LEAST, TRAINING_AT_MOST_S = 0.4, 0.7, 300.0


def main(folder: Path) -> None:
    print("| seed | success, first two | last two | training s | median step s | evaluation, last | reached |")
    print("|---|---|---|---|---|---|---|")
    reached = 0
    found = sorted(folder.glob("seed-*/summary.json"))
    for path in found:
        summary = json.loads(path.read_text())
        rows = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        training_s = sum(row.get("time/step_s", 0.0) for row in rows)
        evaluations = [row["eval/success_rate"] for row in rows if row.get("eval/success_rate") is not None]
        first, last = summary["success_rate_first"], summary["success_rate_last"]
        good = first <= START_AT_MOST and last >= END_AT_LEAST and training_s < TRAINING_AT_MOST_S
        reached += good
        print(
            f"| {summary['seed']} | {first:.3f} | {last:.3f} | {training_s:.0f} | {summary['step_s_median']:.1f} "
            f"| {evaluations[-1] if evaluations else float('nan'):.3f} | {'yes' if good else 'no'} |"
        )
    print(f"\n{reached} of {len(found)} seeds went from at most {START_AT_MOST} to at least {END_AT_LEAST} in time.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
