"""`rl360 simulate [RUN]`: throughput and staleness of a loop for several values of max_staleness, as a table.

In: a run folder whose attempts are dealt again, or medians and 90 % points of log-normal times; the machines' numbers.
Out: a table, and with a run its own measured step beside the simulated one. Left to others: the simulation
(simulate.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl360.diagnostics.simulate import LARGEST, AttemptWork, Setup, Simulated, Work, simulate
from rl360.errors import ConfigError, RL360Error
from rl360.seeding import seed_from

P90_DEVIATIONS = 1.2815515655446004  # 90 % of a normal distribution are below this many standard deviations
WIDEST = 1000.0  # a 90 % point by the median: the longest of a million draws is then 2e11 medians long

HELP = {
    "iterations": "iterations to simulate",
    "tasks_per_iteration": "groups of an iteration",
    "group_size": "attempts of a group",
    "concurrency": "attempts open at once",
    "engines": "rollout engines; attempts go to the one with the fewest",
    "request_tokens_per_s": "sampling rate of a request that has an engine to itself",
    "engine_tokens_per_s": "rate of an engine with very many requests together; left out: each is as fast as alone",
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


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a run folder says: its attempts by group, its measured rows and its config."""

    groups: tuple[tuple[AttemptWork, ...], ...]
    request_tokens_per_s: float  # median over attempts, under that run's load
    rows: tuple[dict[str, float], ...]
    config: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """Raises RL360Error when the folder has no finished iteration."""
        from omegaconf import OmegaConf

        from rl360.engine.journal import Trajectories

        by_group: dict[str, list[AttemptWork]] = {}
        rates: list[float] = []
        for row in Trajectories(folder).rows():
            if row["spec"]["purpose"] != "train" or not row.get("valid"):
                continue
            work, sampling_s = _recorded_work(row)
            by_group.setdefault(row["spec"]["group_id"], []).append(work)
            if sampling_s > 0 and work.tokens:
                rates.append(work.tokens / sampling_s)
        lines = _json_lines(folder / "metrics.jsonl")
        rows = tuple(row for row in lines if "time/step_s" in row)
        if not rates or not rows:
            raise RL360Error(f"simulate {folder}: no finished iteration; expected a run folder with trajectories")
        config: Any = OmegaConf.to_container(OmegaConf.load(folder / "resolved.yaml"))
        groups = tuple(tuple(by_group[name]) for name in sorted(by_group))
        return cls(groups, statistics.median(rates), rows, config)

    def setup(self) -> Setup:
        """The loop's numbers and the medians of its times. Publishing is a stall as far as the run says, else whole."""
        publish_s = self._median("time/publish_s")
        rollout = self.config["rollout"]
        servers = rollout.get("sglang") or {}
        started = int(servers.get("num_servers", 1)) if rollout["engine"] == "sglang" else 1
        return Setup(
            iterations=len(self.rows),
            tasks_per_iteration=self.config["tasks_per_iteration"],
            group_size=self.config["group_size"],
            max_staleness=rollout["max_staleness"],
            concurrency=rollout["concurrency"],
            engines=len(rollout.get("engine_urls") or ()) or started,
            request_tokens_per_s=self.request_tokens_per_s,
            train_s=self._median("time/train_s"),
            publish_s=publish_s,
            stall_s=min(publish_s, self._median("time/sync_stall_s") or publish_s),
            colocated=rollout["engine"] == "embedded" or bool(servers.get("colocated")),
        )

    @property
    def step_s(self) -> float:
        rows = self.rows[self.config["rollout"]["max_staleness"] + 1 :] or self.rows
        return statistics.fmean(row["time/step_s"] for row in rows)

    def work(self, seed: int) -> Work:
        """Its groups, drawn again with replacement: members of a group stay together, since a task makes them alike."""

        def drawn(iteration: int, slot: int, member: int) -> AttemptWork:
            group = self.groups[seed_from(seed, iteration, slot) % len(self.groups)]
            return group[member % len(group)]

        return drawn

    def _median(self, name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in self.rows)


def _recorded_work(row: dict[str, Any]) -> tuple[AttemptWork, float]:
    times = row["timings"]
    known_s = times["sandbox_s"] + times["agent_s"] + times["verify_s"]
    tokens = sum(stop - start for segment in row["segments"] for start, stop in segment["sampled"])
    work = AttemptWork(
        tokens=float(tokens),
        turns=max(len(row["turns"]), 1),
        before_s=times["sandbox_s"] + max(times["total_s"] - known_s, 0.0),  # what nobody names is around the trial
        tools_s=max(times["agent_s"] - times["engine_wait_s"], 0.0),
        after_s=times["verify_s"],
    )
    return work, times["engine_wait_s"]


def _json_lines(path: Path) -> list[dict[str, float]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise RL360Error(f"simulate {path.parent}: {path.name} cannot be read ({error.strerror})") from error


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
    work = _work(parsed, run)
    setups = [replace(setup, max_staleness=s) for s in (stalenesses or [setup.max_staleness])]
    if problems := [problem for one in setups for problem in one.problems()]:
        raise ConfigError([f"simulate: {problem}" for problem in dict.fromkeys(problems)])
    results = [_simulated(one, work) for one in setups]
    for line in table(results):
        write(line)
    if run is not None:
        own = simulate(run.setup(), run.work(parsed.seed))
        error = 100.0 * (own.step_s / run.step_s - 1.0)
        write(
            f"the run itself: {run.step_s:.2f} s an iteration measured, {own.step_s:.2f} s simulated ({error:+.0f} %)"
        )
    if parsed.against is not None:
        other = RecordedRun.read(parsed.against)
        # The other run's loop, but this one's attempts, rates and steps: nothing of what is predicted is looked at.
        loop = {name: getattr(other.setup(), name) for name in _LOOP}
        predicted = simulate(replace(setup, **loop), work)
        error = 100.0 * (predicted.step_s / other.step_s - 1.0)
        write(f"{parsed.against}: {other.step_s:.2f} s measured, {predicted.step_s:.2f} s predicted ({error:+.0f} %)")
    return 0


_LOOP = ("iterations", "tasks_per_iteration", "group_size", "max_staleness", "concurrency", "engines", "colocated")
_DEFAULTS: dict[str, Any] = {
    "iterations": 50,
    "tasks_per_iteration": 32,
    "group_size": 8,
    "max_staleness": 0,
    "concurrency": 64,
}


def _work(parsed: argparse.Namespace, run: RecordedRun | None) -> Work:
    times = {name: value for name in TIMES if (value := getattr(parsed, name)) is not None}
    if run is None:
        turns = 1 if parsed.turns is None else parsed.turns
        if turns < 1:
            raise ConfigError(f"simulate: --turns {turns}; expected at least 1")
        return log_normal({name: _median_and_p90(name, value) for name, value in times.items()}, turns, parsed.seed)
    if given := [*times, *(["turns"] if parsed.turns is not None else [])]:
        raise ConfigError(f"simulate: --{given[0].replace('_', '-')} with a run, whose attempts are dealt again")
    return run.work(parsed.seed)


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
