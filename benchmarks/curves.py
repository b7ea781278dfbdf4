"""Whether two ways of training give the same learning curve within seed noise; a table and a picture of both.

python benchmarks/curves.py --arm NAME RUN RUN RUN --arm NAME RUN RUN RUN --out PREFIX

In: run folders (their metrics.jsonl), one a seed, of two arms. Out: PREFIX.md, PREFIX.json, PREFIX.png; exit code
0 when the verdict is "same", else 1. Left to others: whether both arms were asked to do the same (same_setup.py).

The statistic, fixed before the runs that it judges. The curve of a run becomes one number, the mean of
`reward/success_rate` over the first T iterations that all runs have (the area under its curve: it falls when learning
is slower, stops earlier or begins later, and averages the noise of single iterations away). With three seeds an arm,
d is the difference of the arms' means, s the pooled standard deviation over seeds, e = s sqrt(1/n + 1/m), and t are
quantiles of Student's distribution with n + m - 2 degrees of freedom. Two questions, and both must be answered well:

1. Is d explained by seeds? |d| <= t(0.975) e: the two-sided 5 % test finds no difference.
2. Would a difference that matters have been seen? |d| + t(0.95) e <= MARGIN: the 90 % interval of d lies within the
   margin (two one-sided tests at 5 %; Schuirmann 1987).

The first alone would call everything the same if seeds were noisy enough; the second alone would forgive a small but
real difference. "same": both. "different": the first fails. "undecided": the first holds and the second does not: more
seeds or iterations are needed. MARGIN is 0.08 of success: on this pool the committed run rises by about 0.035 an
iteration, so over 16 iterations learning 30 % slower costs 0.035 x 8 x 0.3 = 0.08. A learning rate changed by four
costs about three times that.

Shown beside it, and not part of the verdict, since the points of a curve hang together: the exact permutation p of |d|
over the splits of the runs (its least value with 3 + 3 is 0.1), the share of iterations whose difference exceeds
t(0.975) e of that iteration (about 5 % when nothing differs), the first iteration at which the mean of three passes
0.6, and the success of the first iteration, when both arms still have the same weights: a difference there is of
rollouts and not of training.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

SUCCESS = "reward/success_rate"
MARGIN = 0.08
MILESTONE, MILESTONE_WINDOW = 0.6, 3
LEAST_ITERATIONS = 8  # fewer say little about learning: undecided
VERDICTS = {
    "same": "the same within seed noise",
    "different": "different by more than seed noise",
    "undecided": "undecided: too few seeds or iterations for this noise",
}
# Student's t at 0.95 and 0.975 by degrees of freedom.
STUDENT = {
    2: (2.920, 4.303), 3: (2.353, 3.182), 4: (2.132, 2.776), 5: (2.015, 2.571), 6: (1.943, 2.447), 7: (1.895, 2.365),
    8: (1.860, 2.306), 9: (1.833, 2.262), 10: (1.812, 2.228),
}  # fmt: skip

# What is shown of each arm: the metric, and how iterations and seeds become one number.
SHOWN = (
    ("mismatch/kl", "mean"),
    ("mismatch/kl", "max"),
    ("mismatch/logprob_diff_mean", "mean"),
    ("mismatch/ratio_max", "max"),
    ("rollout/staleness_max", "max"),
    ("rollout/staleness_mean", "mean"),
    ("rollout/mixed_versions_share", "mean"),
    ("rollout/forks", "sum"),
    ("rollout/samples_trained", "sum"),
    ("rollout/samples_filtered", "sum"),
    ("rollout/samples_masked", "sum"),
    ("rollout/samples_requeued", "sum"),
    ("rollout/response_tokens_mean", "mean"),
    ("train/grad_norm", "mean"),
    ("train/entropy", "mean"),
    ("time/step_s", "median"),
    ("time/wait_s", "median"),
    ("time/train_s", "median"),
    ("time/publish_s", "median"),
    ("time/sync_stall_s", "median"),
    ("time/sync_transfer_s", "median"),
    ("time/generate_s", "median"),
    ("time/sandbox_s", "median"),
    ("time/verify_s", "median"),
)
AGGREGATES = {"mean": statistics.fmean, "median": statistics.median, "max": max, "sum": math.fsum}

Row = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`difference` is the first arm's mean area minus the second's; the module's docstring says what each is."""

    verdict: str
    iterations: int
    areas: tuple[tuple[float, ...], tuple[float, ...]]
    difference: float
    seed_std: float
    explained_below: float
    interval: tuple[float, float]
    margin: float
    permutation_p: float
    share_of_iterations_apart: float
    first_iteration: tuple[float, float]


def judge(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Verdict:
    """Compare two arms: for each seed, the success of its iterations.

    Raises ValueError where an arm has fewer than two runs, or a run no iteration.
    """
    arms = (list(first), list(second))
    if min(len(arm) for arm in arms) < 2 or len(arms[0]) + len(arms[1]) - 2 not in STUDENT:
        raise ValueError(f"{len(first)} and {len(second)} runs; expected two to six in each arm")
    length = min(len(curve) for arm in arms for curve in arm)
    if length == 0:
        raise ValueError("a run has no iteration")
    curves = [[curve[:length] for curve in arm] for arm in arms]
    areas = [[statistics.fmean(curve) for curve in arm] for arm in curves]
    difference, std, error, (t_one_sided, t_two_sided) = _compare(*areas)
    reach = abs(difference) + t_one_sided * error
    if abs(difference) > t_two_sided * error:
        verdict = "different"
    elif reach > MARGIN or length < LEAST_ITERATIONS:
        verdict = "undecided"
    else:
        verdict = "same"
    apart = 0
    for at in range(length):
        d, _, e, _ = _compare(*([curve[at] for curve in arm] for arm in curves))
        apart += abs(d) > t_two_sided * e
    return Verdict(
        verdict=verdict,
        iterations=length,
        areas=(tuple(areas[0]), tuple(areas[1])),
        difference=difference,
        seed_std=std,
        explained_below=t_two_sided * error,
        interval=(difference - t_one_sided * error, difference + t_one_sided * error),
        margin=MARGIN,
        permutation_p=permutation_p(*areas),
        share_of_iterations_apart=apart / length,
        first_iteration=(_mean_at(curves[0], 0), _mean_at(curves[1], 0)),
    )


def _compare(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float, tuple[float, float]]:
    """Difference of means, pooled standard deviation, standard error, t at 0.95 and 0.975."""
    n, m = len(first), len(second)
    squares = (n - 1) * statistics.variance(first) + (m - 1) * statistics.variance(second)
    std = math.sqrt(squares / (n + m - 2))
    difference = statistics.fmean(first) - statistics.fmean(second)
    return difference, std, std * math.sqrt(1 / n + 1 / m), STUDENT[n + m - 2]


def permutation_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Share of the ways to split these values into two arms whose means are at least as far apart."""
    values = [*first, *second]
    total, size = math.fsum(values), len(first)

    def gap(chosen: Iterable[int]) -> float:
        part = math.fsum(values[i] for i in chosen)
        return abs(part / size - (total - part) / (len(values) - size))

    observed = gap(range(size))
    gaps = [gap(chosen) for chosen in combinations(range(len(values)), size)]
    return sum(one >= observed - 1e-12 for one in gaps) / len(gaps)


def reaches(curve: Sequence[float]) -> int | None:
    """The first iteration at whose end the mean of the last three is at least MILESTONE; None: it never is."""
    for end in range(MILESTONE_WINDOW, len(curve) + 1):
        if statistics.fmean(curve[end - MILESTONE_WINDOW : end]) >= MILESTONE:
            return end
    return None


def _mean_at(curves: Sequence[Sequence[float]], at: int) -> float:
    return statistics.fmean(curve[at] for curve in curves)


def read_rows(run: Path) -> list[Row]:
    """The rows of a run's metrics.jsonl, none where it has not begun; a line that was cut off is left out."""
    if not (run / "metrics.jsonl").is_file():
        return []
    rows = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [row for row in rows if row.get(SUCCESS) is not None]


def shown(runs: Sequence[Sequence[Row]], name: str, aggregate: str) -> float | None:
    """One number for an arm; None where no row has the metric."""
    values = [float(value) for rows in runs for row in rows if (value := row.get(name)) is not None]
    return AGGREGATES[aggregate](values) if values else None


def table(names: Sequence[str], arms: Sequence[Sequence[Sequence[Row]]], found: Verdict | None) -> str:
    """Markdown: the verdict and what it rests on, where there is one, then what else was measured."""

    def several(values: Iterable[float | int | None]) -> str:
        return ", ".join("never" if v is None else str(v) if isinstance(v, int) else f"{v:.3f}" for v in values)

    success = [[_success(rows) for rows in arm] for arm in arms]
    lines = [f"| | {names[0]} | {names[1]} |", "|---|---|---|"]

    def row(title: str, cells: Sequence[str]) -> None:
        lines.append(f"| {title} | {' | '.join(cells)} |")

    if found is not None:
        row("mean success of each seed", [several(areas) for areas in found.areas])
        row("success in the first iteration", [f"{value:.3f}" for value in found.first_iteration])
    row("iterations", [several(map(len, arm)) for arm in arms])
    row(f"iterations until the mean of three is {MILESTONE}", [several(map(reaches, arm)) for arm in success])
    row("success, last three iterations", [several(statistics.fmean(c[-3:]) for c in arm) for arm in success])
    for name, aggregate in SHOWN:
        values = [shown(arm, name, aggregate) for arm in arms]
        if any(value is not None for value in values):
            row(f"`{name}`, {aggregate}", ["" if value is None else f"{value:.4g}" for value in values])
    if found is None:
        return "\n".join(lines) + "\n"
    low, high = found.interval
    head = f"Verdict over {found.iterations} iterations: **{VERDICTS[found.verdict]}**."
    why = (
        f"Difference of the mean success {found.difference:+.4f}; seeds explain {found.explained_below:.4f} (5 % test, "
        f"pooled standard deviation {found.seed_std:.4f}); 90 % interval {low:+.4f} to {high:+.4f}, margin "
        f"{found.margin}. Permutation p {found.permutation_p:.2f}; {found.share_of_iterations_apart:.0%} of single "
        "iterations apart at 5 %."
    )
    return "\n".join([head, "", *lines, "", why]) + "\n"


def _success(rows: Sequence[Row]) -> list[float]:
    return [float(row[SUCCESS] or 0) for row in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arm", nargs="+", action="append", metavar="NAME RUN", help="a name, then its run folders")
    parser.add_argument("--out", type=Path, required=True, help="prefix of the files to write")
    parsed = parser.parse_args(arguments)
    if len(parsed.arm or []) != 2:
        parser.error("expected --arm twice")
    names = [words[0] for words in parsed.arm]
    runs = [[Path(word) for word in words[1:]] for words in parsed.arm]
    arms = [[rows for run in arm if (rows := read_rows(run))] for arm in runs]
    success = [[_success(rows) for rows in arm] for arm in arms]
    try:
        found = judge(*success)
    except ValueError as error:
        print(f"no verdict: {error}")
        found = None
    text = table(names, arms, found)
    print(text, end="")
    parsed.out.with_suffix(".md").write_text(text)
    record = {"arms": names, "success": success, **(asdict(found) if found else {})}
    parsed.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    from benchmarks.chart import draw

    if all(success):
        draw(parsed.out.with_suffix(".png"), dict(zip(names, success, strict=True)), "success")
    return 0 if found is not None and found.verdict == "same" else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
