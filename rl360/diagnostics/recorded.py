"""What a run folder says of its loop: its attempts, its times, and how its engines slow down under load.

In: trajectories, metrics.jsonl and resolved.yaml of a run. Out: the numbers that rl360.diagnostics.simulate wants. Left
to others: the simulation, and what to ask it (simulate_cli.py).
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl360.diagnostics.simulate import LARGEST, AttemptWork, Setup, Work, simulate
from rl360.errors import RL360Error
from rl360.seeding import seed_from

ROUNDS = 6  # of fitting rates to loads and loads to rates; the last changes them by a hundredth

# Terms of the fit, the likelier explanation first: each token, each token by the load, each call.
_TERMS = ((0,), (1,), (0, 2), (0, 1), (1, 2), (0, 1, 2))


@dataclass(frozen=True, slots=True)
class EngineRates:
    """A request of m tokens beside n - 1 others on its engine takes `call_s + m (token_s + load_s n)` seconds."""

    token_s: float
    load_s: float = 0.0
    call_s: float = 0.0

    @property
    def request_tokens_per_s(self) -> float:
        """Of a request that has an engine to itself, besides `call_s`."""
        return 1.0 / (self.token_s + self.load_s)

    @property
    def engine_tokens_per_s(self) -> float:
        """Of an engine with very many requests."""
        return 1.0 / self.load_s if self.load_s > 1.0 / LARGEST else math.inf

    @classmethod
    def fitted(cls, calls: Any, tokens: Any, loads: Any, seconds: Any) -> EngineRates:
        """Non-negative least squares over attempts, with those of the three terms that pay for themselves (BIC;
        G. Schwarz 1978, "Estimating the dimension of a model").

        Args:
            calls, tokens, loads, seconds: arrays, one number an attempt: its model calls, its sampled tokens, how many
                requests its engine had open meanwhile (over its tokens), and how long it waited for the engine.

        Raises ValueError when no token took any time.
        """
        tokens, seconds = np.asarray(tokens, float), np.asarray(seconds, float)
        columns = np.stack([tokens, tokens * np.asarray(loads, float), np.asarray(calls, float)])
        rounding = 1e-18 * float(np.square(seconds).mean())  # of a fit that is exact
        found: list[tuple[float, list[float]]] = []
        for terms in _TERMS:
            solved = np.linalg.lstsq(columns[list(terms)].T, seconds, rcond=None)[0]
            full = [0.0, 0.0, 0.0]
            for term, value in zip(terms, solved, strict=True):
                full[term] = float(value)
            if min(full) >= 0.0 and full[0] + full[1] > 1.0 / LARGEST:
                variance = float(np.square(columns.T @ full - seconds).mean()) + rounding
                found.append((len(seconds) * math.log(variance) + len(terms) * math.log(len(seconds)), full))
        if not found:
            raise ValueError("no token took any time")
        return cls(*min(found, key=lambda one: one[0])[1])


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    work: AttemptWork
    sampling_s: float  # its wait for the engine
    versions: int  # of the weights, while it was sampled


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a run folder says: its attempts, its measured rows and its config."""

    iterations: tuple[tuple[tuple[RecordedAttempt, ...], ...], ...]  # of groups, of attempts that count
    rows: tuple[dict[str, float], ...]
    config: dict[str, Any]
    rates: EngineRates

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """Raises RL360Error when the folder has no finished iteration."""
        from omegaconf import OmegaConf

        from rl360.engine.journal import Trajectories

        found: dict[int, dict[str, list[RecordedAttempt]]] = defaultdict(lambda: defaultdict(list))
        for row in Trajectories(folder).rows():
            if row["spec"]["purpose"] == "train" and row.get("valid"):
                found[row["spec"]["iteration"]][row["spec"]["group_id"]].append(_recorded(row))
        lines = _json_lines(folder / "metrics.jsonl")
        rows = tuple(row for row in lines if "time/step_s" in row)
        config: Any = OmegaConf.to_container(OmegaConf.load(folder / "resolved.yaml"))
        iterations = tuple(tuple(tuple(found[i][name]) for name in sorted(found[i])) for i in sorted(found))
        nothing = RL360Error(f"simulate {folder}: no finished iteration; expected a run folder with trajectories")
        if not iterations or not rows:
            raise nothing
        run = cls(iterations, rows, config, EngineRates(1.0))
        try:
            return replace(run, rates=run._fitted())
        except ValueError as error:
            raise nothing from error

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
            request_tokens_per_s=self.rates.request_tokens_per_s,
            engine_tokens_per_s=self.rates.engine_tokens_per_s,
            request_s=self.rates.call_s,
            train_s=self._median("time/train_s"),
            publish_s=publish_s,
            stall_s=min(publish_s, self._median("time/sync_stall_s") or publish_s),
            colocated=rollout["engine"] == "embedded" or bool(servers.get("colocated")),
        )

    @property
    def step_s(self) -> float:
        rows = self.rows[self.config["rollout"]["max_staleness"] + 1 :] or self.rows
        return statistics.fmean(row["time/step_s"] for row in rows)

    def simulated_step_s(self) -> float:
        """Seconds of an iteration of this very run: its attempts in their order, its engines by their rates."""
        return simulate(replace(self.setup(), iterations=len(self.iterations)), self._own).step_s

    def work(self, seed: int) -> Work:
        """Its groups, drawn again with replacement: members of a group stay together, since a task makes them alike."""
        groups = [group for groups in self.iterations for group in groups]

        def drawn(iteration: int, slot: int, member: int) -> AttemptWork:
            group = groups[seed_from(seed, iteration, slot) % len(groups)]
            return group[member % len(group)].work

        return drawn

    def _at(self, iteration: int, slot: int, member: int) -> RecordedAttempt | None:
        """None: an attempt of the iteration that does not count, or one of an iteration that was not whole."""
        groups = self.iterations[iteration]
        return groups[slot][member] if slot < len(groups) and member < len(groups[slot]) else None

    def _own(self, *place: int) -> AttemptWork:
        attempt = self._at(*place)
        return attempt.work if attempt is not None else AttemptWork(0.0)

    def _fitted(self) -> EngineRates:
        """From the run played again: first with every wait as long as it was, then with what that says of the engines.

        How many requests are open beside each other follows from the rates, and the rates from that. Where load hardly
        varies (rollouts that run ahead) a rate for each token explains as much, and is what is found.
        """
        loads = self._loads(replace(self.setup(), stall_s=0.0, colocated=False), self._waited)
        for _ in range(ROUNDS):
            again = self._loads(replace(self, rates=self._fitted_to(loads)).setup(), self._own)
            loads = {place: (loads.get(place, load) + load) / 2 for place, load in again.items()}  # else it swings
        return self._fitted_to(loads)

    def _waited(self, *place: int) -> AttemptWork:
        """A token for every second that it waited; what paused the engines is in them."""
        attempt = self._at(*place)
        return replace(attempt.work, tokens=attempt.sampling_s) if attempt is not None else AttemptWork(0.0)

    def _loads(self, setup: Setup, work: Work) -> dict[tuple[int, int, int], float]:
        """Of every attempt that sampled: requests open on its engine, on average over its own."""
        loads: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        setup = replace(setup, iterations=len(self.iterations))
        simulate(setup, work, lambda place, _, load: loads[place].append(load))
        return {place: statistics.fmean(load) for place, load in loads.items()}

    def _fitted_to(self, loads: dict[tuple[int, int, int], float]) -> EngineRates:
        warm = self.config["rollout"]["max_staleness"] + 1
        steady = {place: load for place, load in loads.items() if place[0] >= warm}  # kernels compile before
        stall_s, rows = self.setup().stall_s, []
        for place, load in (steady or loads).items():
            attempt = self._at(*place)
            if attempt is not None and attempt.work.tokens:
                sampled_s = max(attempt.sampling_s - stall_s * (attempt.versions - 1), 0.0)
                rows.append((attempt.work.turns, attempt.work.tokens, load, sampled_s))
        if not rows:
            raise ValueError("no attempt waited for an engine")
        return EngineRates.fitted(*zip(*rows, strict=True))

    def _median(self, name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in self.rows)


def _recorded(row: dict[str, Any]) -> RecordedAttempt:
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
    versions = {span[0] for segment in row["segments"] for span in segment["version_spans"]}
    return RecordedAttempt(work, times["engine_wait_s"], max(len(versions), 1))


def _json_lines(path: Path) -> list[dict[str, float]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise RL360Error(f"simulate {path.parent}: {path.name} cannot be read ({error.strerror})") from error
