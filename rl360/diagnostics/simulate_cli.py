"""`rl360 simulate [RUN]`: throughput and staleness of a loop for several values of max_staleness, as a table.

In: a run folder whose attempts are dealt again, or medians and 90 % points of log-normal times; the machines' numbers.
Out: a table, and with a run its own measured step beside the simulated one. Left to others: the simulation
(simulate.py).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl360.diagnostics.recorded import EngineRates, RecordedRun
from rl360.diagnostics.simulate import LARGEST, AttemptWork, Setup, Simulated, Work, simulate
from rl360.errors import ConfigError
from rl360.seeding import seed_from

P90_DEVIATIONS = 1.2815515655446004  # 90 % of a normal distribution are below this many standard deviations
DRAWS = 8  # of a prediction: an iteration waits for its longest attempt, and few iterations say little of those
WIDEST = 1000.0  # a 90 % point by the median: the longest of a million draws is then 2e11 medians long

HELP = {
    "iterations": "iterations to simulate",
    "tasks_per_iteration": "groups of an iteration",
    "group_size": "attempts of a group",
    "concurrency": "attempts open at once",
    "engines": "rollout engines; attempts go to the one with the fewest",
    "request_tokens_per_s": "sampling rate of a request that has an engine to itself",
    "engine_tokens_per_s": "rate of an engine with very many requests together; left out: each is as fast as alone",
    "request_s": "seconds of a model call besides its tokens: its prompt, and the way there and back",
    "train_s": "seconds of a step, whatever its size",
    "train_tokens_per_s": "sampled tokens a second that a step trains on, on top of --train-s; left out: no such part",
    "publish_s": "from the end of a step until every engine has the new weights",
    "stall_s": "the end of publish_s, in which no engine samples",
}
TIMES = {
    "tokens": "sampled tokens of an attempt",
    "before_s": "seconds until its first model call",
    "tools_s": "seconds of its tools, all turns together",
    "after_s": "seconds after its last model call",
}


def log_normal(times: dict[str, tuple[float, float]], turns: int, seed: int) -> Work:
    """Each of AttemptWork's numbers by itself, from (median, 90 % point)."""

    def drawn(iteration: int, slot: int, member: int) -> AttemptWork:
        generator = np.random.default_rng(seed_from(seed, iteration, slot, member))
        found = {}
        for name, (median, p90) in times.items():
            deviations = float(generator.standard_normal())
            spread = math.log(p90 / median) / P90_DEVIATIONS if median > 0 else 0.0
            found[name] = median * math.exp(spread * deviations)
        return AttemptWork(turns=turns, **found)

    return drawn


def main(arguments: Sequence[str], write: Callable[[str], object] = print) -> int:
    """Entry point of `rl360 simulate`. Raises ConfigError with everything that is wrong."""
    parsed = _parser().parse_args(list(arguments))
    run = RecordedRun.read(parsed.run) if parsed.run else None
    given = {f.name: getattr(parsed, f.name) for f in fields(Setup) if getattr(parsed, f.name) is not None}
    stalenesses = given.pop("max_staleness", None)
    if run is None:
        missing = [f"--{n.replace('_', '-')}" for n in ("request_tokens_per_s", "tokens") if not getattr(parsed, n)]
        if missing:
            raise ConfigError(
                f"simulate: {' and '.join(missing)} missing; expected those, or a run folder to learn from"
            )
    base = run.setup() if run else Setup(**{**_DEFAULTS, **given})
    setup = replace(base, **given)
    work = _work(parsed, run, parsed.seed)
    setups = [replace(setup, max_staleness=s) for s in (stalenesses or [setup.max_staleness])]
    if problems := [problem for one in setups for problem in one.problems()]:
        raise ConfigError([f"simulate: {problem}" for problem in dict.fromkeys(problems)])
    results = [_simulated(one, work) for one in setups]
    for line in table(results):
        write(line)
    if run is not None:
        write(_fit(run.rates))
        own_s = run.simulated_step_s()
        error = 100.0 * (own_s / run.step_s - 1.0)
        write(f"the run itself: {run.step_s:.2f} s an iteration measured, {own_s:.2f} s simulated ({error:+.0f} %)")
    if parsed.against is not None:
        other = RecordedRun.read(parsed.against)
        # The other run's loop, but this one's attempts, rates and steps: nothing of what is predicted is looked at.
        loop = {name: getattr(other.setup(), name) for name in _LOOP}
        drawn = [_work(parsed, run, seed) for seed in range(parsed.seed, parsed.seed + (DRAWS if run else 1))]
        each_s = sorted(simulate(replace(setup, **loop), work).step_s for work in drawn)
        predicted_s = statistics.fmean(each_s)
        error = 100.0 * (predicted_s / other.step_s - 1.0)
        write(
            f"{parsed.against}: {other.step_s:.2f} s measured, {predicted_s:.2f} s predicted ({error:+.0f} %), "
            f"{each_s[0]:.2f} to {each_s[-1]:.2f} over {len(each_s)} draws of the attempts"
        )
    return 0


def _fit(rates: EngineRates) -> str:
    full = rates.engine_tokens_per_s
    together = "as many beside others" if math.isinf(full) else f"{full:.0f} of a full engine"
    return (
        f"its engines, fitted: {rates.request_tokens_per_s:.0f} tokens/s of a request alone, {together}, "
        f"and {1000.0 * rates.call_s:.0f} ms a call"
    )


_LOOP = ("iterations", "tasks_per_iteration", "group_size", "max_staleness", "concurrency", "engines", "colocated")
_DEFAULTS: dict[str, Any] = {
    "iterations": 50,
    "tasks_per_iteration": 32,
    "group_size": 8,
    "max_staleness": 0,
    "concurrency": 64,
}


def _work(parsed: argparse.Namespace, run: RecordedRun | None, seed: int) -> Work:
    times = {name: value for name in TIMES if (value := getattr(parsed, name)) is not None}
    if run is None:
        turns = 1 if parsed.turns is None else parsed.turns
        if turns < 1:
            raise ConfigError(f"simulate: --turns {turns}; expected at least 1")
        return log_normal({name: _median_and_p90(name, value) for name, value in times.items()}, turns, seed)
    if given := [*times, *(["turns"] if parsed.turns is not None else [])]:
        raise ConfigError(f"simulate: --{given[0].replace('_', '-')} with a run, whose attempts are dealt again")
    return run.work(seed)


def _median_and_p90(name: str, value: Sequence[float]) -> tuple[float, float]:
    median, p90 = (value[0], value[0]) if len(value) == 1 else value[:2]
    flag = f"simulate: --{name.replace('_', '-')} {' '.join(f'{number:g}' for number in value)}"
    if len(value) > 2:
        raise ConfigError(f"{flag}: {len(value)} numbers; expected a median, or a median and a 90 % point")
    if not 0.0 <= median <= LARGEST:
        raise ConfigError(f"{flag}: the median is {median:g}; expected 0 or more, and at most {LARGEST:g}")
    if not median <= p90 <= WIDEST * median:
        raise ConfigError(f"{flag}: the 90 % point is {p90:g}; expected 1 to {WIDEST:g} times the median {median:g}")
    return median, p90


def _simulated(setup: Setup, work: Work) -> Simulated:
    """Raises ConfigError where an attempt was drawn that makes no sense."""
    try:
        return simulate(setup, work)
    except ValueError as error:
        raise ConfigError([f"simulate: an attempt's {line}" for line in str(error).splitlines()]) from error


def table(results: Sequence[Simulated]) -> list[str]:
    """One line for each result."""
    head = ("max_staleness", "step_s", "tokens/s", "attempts/h", "trainer waits", "engines busy", "staleness", "max")
    rows = [head]
    for result in results:
        rows.append(
            (
                str(result.setup.max_staleness),
                f"{result.step_s:.2f}",
                f"{result.tokens_per_s:.0f}",
                f"{result.attempts_per_hour:.0f}",
                f"{100 * result.trainer_wait_share:.0f} %",
                f"{100 * result.engine_busy_share:.0f} %",
                f"{result.staleness_mean:.2f}",
                str(result.staleness_max),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rl360 simulate",
        description="The training loop on a virtual clock: how fast, how stale. Nothing is started.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, nargs="?", help="a run folder to take attempts and numbers from")
    parser.add_argument("--max-staleness", type=int, nargs="+", metavar="S", help="one line of the table for each")
    for name, text in HELP.items():
        kind = int if name in ("iterations", "tasks_per_iteration", "group_size", "concurrency", "engines") else float
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    parser.add_argument("--colocated", action="store_true", default=None, help="engines rest while the trainer works")
    for name, text in TIMES.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=float, nargs="+", metavar="X", help=f"{text}: median, or median and 90 %% point")
    parser.add_argument("--turns", type=int, metavar="N", help="model calls of an attempt, without a run; default: 1")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--against", type=Path, help="another run, to be predicted from this one's numbers")
    return parser
