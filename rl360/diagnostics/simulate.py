"""The training loop on a virtual clock: how fast, how stale, and who waits for whom, before any GPU is asked for.

In: how much work attempts are, how fast engines and trainer are, the loop's numbers. Out: each iteration's times and
staleness. Admission is that of the run itself (rl360.rollout.admission). Left to others: where the numbers come from
(simulate_cli.py), and everything that a run does besides waiting.

An attempt is: wait for a slot, start a sandbox, then turns of sampling and tools, then the verifier. An engine decodes
one token of each of its n open requests in `a + b n` seconds: a for reading the weights, b for each request's own part
(J. Pope et al. 2022, "Efficiently scaling transformer inference", arXiv:2211.05102, section 2). Before its tokens a
request takes `request_s`: its prompt, and the way there and back. Equal arguments give equal results to the last bit.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from rl360.rollout.admission import admitted_before

# Seconds and tokens beyond this, and rates below its inverse, mean nothing, and sums of them would not stay numbers.
LARGEST = 1e12

_AMOUNT = f"expected 0 or more, and at most {LARGEST:g}"
_RATE = f"expected above 0, at least {1.0 / LARGEST:g}"


def _is_amount(value: float) -> bool:
    return 0.0 <= value <= LARGEST


@dataclass(frozen=True, slots=True)
class AttemptWork:
    """What one attempt takes, apart from how fast the engines are."""

    tokens: float  # sampled, all turns together
    turns: int = 1
    before_s: float = 0.0  # until the first model call: the sandbox's start
    tools_s: float = 0.0  # between model calls, all turns together
    after_s: float = 0.0  # after the last model call: the verifier

    def problems(self) -> list[str]:
        """Everything that makes no sense, one line each."""
        found = [] if self.turns >= 1 else [f"turns: {self.turns}; expected at least 1"]
        amounts = ("tokens", "before_s", "tools_s", "after_s")
        return found + [f"{k}: {getattr(self, k)}; {_AMOUNT}" for k in amounts if not _is_amount(getattr(self, k))]


Work = Callable[[int, int, int], AttemptWork]
"""(iteration, slot of the group, member) -> its work. A function of its arguments: it may be asked in any order."""

Sampled = Callable[[tuple[int, int, int], float, float], None]
"""Told of every request that ends: its (iteration, slot, member), its seconds on the engine without pauses, and how
many the engine had open meanwhile, on average over its tokens, itself among them."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The loop's numbers and the machines."""

    iterations: int
    tasks_per_iteration: int
    group_size: int
    max_staleness: int  # versions that rollouts may run ahead
    concurrency: int  # attempts open at once
    engines: int = 1
    request_tokens_per_s: float = 100.0  # of a request that has an engine to itself
    engine_tokens_per_s: float = math.inf  # of an engine with very many requests; inf: each is as fast as alone
    request_s: float = 0.0  # of a model call, besides its tokens
    train_s: float = 0.0  # of a step, whatever its size
    train_tokens_per_s: float = math.inf  # sampled tokens that a step trains on, on top of train_s
    publish_s: float = 0.0  # from the step's end until every engine has the new weights
    stall_s: float = 0.0  # the end of publish_s, in which no engine samples
    colocated: bool = False  # engines sample nothing while the trainer steps and publishes

    def problems(self) -> list[str]:
        """Everything that makes no sense, one line each."""
        least_one = ("iterations", "tasks_per_iteration", "group_size", "concurrency", "engines")
        found = [f"{k}: {getattr(self, k)}; expected at least 1" for k in least_one if getattr(self, k) < 1]
        amounts = ("max_staleness", "request_s", "train_s", "publish_s", "stall_s")
        found += [f"{k}: {getattr(self, k)}; {_AMOUNT}" for k in amounts if not _is_amount(getattr(self, k))]
        rates = ("request_tokens_per_s", "engine_tokens_per_s", "train_tokens_per_s")
        found += [f"{k}: {getattr(self, k)}; {_RATE}" for k in rates if not getattr(self, k) >= 1.0 / LARGEST]
        if not self.request_tokens_per_s <= LARGEST:
            found.append(f"request_tokens_per_s: {self.request_tokens_per_s:g}; expected at most {LARGEST:g}")
        if self.engine_tokens_per_s < self.request_tokens_per_s:
            found.append(
                f"engine_tokens_per_s: {self.engine_tokens_per_s:g} for a full engine is less than "
                f"request_tokens_per_s {self.request_tokens_per_s:g} for one request; expected at least as much"
            )
        if self.stall_s > self.publish_s:
            found.append(f"stall_s: {self.stall_s:g} is a part of publish_s {self.publish_s:g}; expected at most that")
        return found


@dataclass(frozen=True, slots=True)
class IterationRow:
    """One iteration. Seconds since the start of the run; staleness in versions, as docs/guide/metrics.md defines it."""

    began_s: float
    wait_s: float
    train_s: float
    publish_s: float
    tokens: float
    staleness_max: int
    staleness_mean: float  # over sampled tokens
    mixed_versions_share: float
    groups_ahead: int
    groups: tuple[tuple[int, int], ...]  # (iteration, slot), in the order in which they were finished

    @property
    def step_s(self) -> float:
        return self.wait_s + self.train_s + self.publish_s


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came out. Means leave out the first `max_staleness` + 1 iterations, which fill the pipeline."""

    setup: Setup
    rows: tuple[IterationRow, ...]
    engine_busy_share: float  # of the engines' time, with at least one request

    @property
    def steady(self) -> tuple[IterationRow, ...]:
        return self.rows[self.setup.max_staleness + 1 :] or self.rows

    @property
    def step_s(self) -> float:
        """Mean seconds of an iteration."""
        return sum(row.step_s for row in self.steady) / len(self.steady)

    @property
    def tokens_per_s(self) -> float:
        return _rate(sum(row.tokens for row in self.steady), sum(row.step_s for row in self.steady))

    @property
    def attempts_per_hour(self) -> float:
        return _rate(3600.0 * self.setup.tasks_per_iteration * self.setup.group_size, self.step_s)

    @property
    def trainer_wait_share(self) -> float:
        return sum(row.wait_s for row in self.steady) / max(sum(row.step_s for row in self.steady), 1e-12)

    @property
    def staleness_max(self) -> int:
        return max(row.staleness_max for row in self.rows)

    @property
    def staleness_mean(self) -> float:
        tokens = sum(row.tokens for row in self.steady)
        return sum(row.staleness_mean * row.tokens for row in self.steady) / max(tokens, 1e-12)


def _rate(count: float, seconds: float) -> float:
    """Infinite where something is done in no time."""
    return count / seconds if seconds > 0.0 else math.inf if count > 0.0 else 0.0


def simulate(setup: Setup, work: Work, sampled: Sampled | None = None) -> Simulated:
    """Run the loop. Raises ValueError with everything that is wrong with `setup`, or with the work of an attempt."""
    if problems := setup.problems():
        raise ValueError("\n".join(problems))
    return _Simulation(setup, work, sampled).run()


@dataclass(slots=True, eq=False)
class _Attempt:
    group: _Group
    place: tuple[int, int, int]
    work: AttemptWork
    engine: _Engine | None = None
    versions: dict[int, float] = field(default_factory=dict)  # tokens sampled under each


@dataclass(slots=True, eq=False)
class _Group:
    key: tuple[int, int]
    attempts: list[_Attempt] = field(default_factory=list)
    num_finished: int = 0


@dataclass(slots=True, eq=False)
class _Request:
    attempt: _Attempt
    tokens: float
    finish: float  # on the engine's count of tokens that each of its requests has got
    counted: float  # up to here its tokens have a version
    began: tuple[float, float]  # the engine's time with requests, and its tokens by their number
    resume: Callable[[], None]


class _Engine:
    """Requests share it evenly, so it keeps one count of tokens a request, and each request the count at its end."""

    def __init__(self, step_s: float, request_s: float) -> None:
        self._step_s = step_s
        self._request_s = request_s
        self._count = 0.0
        self._at = 0.0
        self._order = itertools.count()
        self.requests: list[tuple[float, int, _Request]] = []
        self.num_open = 0  # attempts that were given to it
        self.paused = False
        self.busy_s = 0.0
        self.loads = 0.0  # sum over tokens of a request: how many got theirs beside it
        self.stamp = 0  # of the last change: an end that was announced before it is void

    def advance(self, now: float) -> None:
        if self.requests and not self.paused:
            self._move_to(self._count + (now - self._at) / self._token_s())
            self.busy_s += now - self._at
        self._at = now

    def add(self, attempt: _Attempt, tokens: float, resume: Callable[[], None]) -> None:
        request = _Request(attempt, tokens, self._count + tokens, self._count, (self.busy_s, self.loads), resume)
        heapq.heappush(self.requests, (request.finish, next(self._order), request))

    def next_end(self) -> float | None:
        if not self.requests or self.paused:
            return None
        return self._at + max(0.0, self.requests[0][0] - self._count) * self._token_s()

    def pop(self) -> _Request:
        """The request that ends now; the count is set to its end, so that rounding does not add up."""
        self._move_to(self.requests[0][0])
        return heapq.heappop(self.requests)[2]

    def _move_to(self, count: float) -> None:
        self.loads += (count - self._count) * len(self.requests)
        self._count = count

    def count_tokens(self, version: int) -> None:
        """Put down what open requests have got so far to `version`."""
        for _, _, request in self.requests:
            _sampled(request, self._count, version)

    def _token_s(self) -> float:
        return self._step_s + self._request_s * len(self.requests)


def _sampled(request: _Request, count: float, version: int) -> None:
    if count > request.counted:
        versions = request.attempt.versions
        versions[version] = versions.get(version, 0.0) + count - request.counted
        request.counted = count


Process = Generator[tuple[str, float], None, None]
"""Yields ("sleep", seconds) or ("sample", tokens), and goes on when that is done."""


class _Simulation:
    def __init__(self, setup: Setup, work: Work, sampled: Sampled | None) -> None:
        self._setup = setup
        self._work = work
        self._tell = sampled
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        request_s = 1.0 / setup.engine_tokens_per_s
        step_s = 1.0 / setup.request_tokens_per_s - request_s
        self._engines = [_Engine(step_s, request_s) for _ in range(setup.engines)]
        self._free_slots = setup.concurrency
        self._waiting: deque[_Attempt] = deque()
        self._starting = False
        self._groups: dict[int, list[_Group]] = {}
        self._finished: dict[int, list[_Group]] = {}
        self._version = 0
        self._submitted = 0

    def run(self) -> Simulated:
        rows = [self._iterate(iteration) for iteration in range(self._setup.iterations)]
        for engine in self._engines:
            engine.advance(self._now)
        busy = sum(engine.busy_s for engine in self._engines) / max(self._now * len(self._engines), 1e-12)
        return Simulated(self._setup, tuple(rows), busy)

    def _iterate(self, iteration: int) -> IterationRow:
        setup, began = self._setup, self._now
        self._admit(iteration)
        while len(self._finished.get(iteration, ())) < setup.tasks_per_iteration:
            self._next_event()
        self._pass(0.0)  # what ends in the same instant has ended
        groups = self._finished.pop(iteration)
        attempts = [attempt for group in groups for attempt in group.attempts]
        waited = self._now - began
        tokens = sum(attempt.work.tokens for attempt in attempts)
        ahead = sum(map(len, self._finished.values()))

        train_s = setup.train_s + tokens / setup.train_tokens_per_s
        self._pause(setup.colocated)
        self._pass(train_s + setup.publish_s - setup.stall_s)
        self._pause(True)
        self._pass(setup.stall_s)
        trained_at = self._version
        for engine in self._engines:
            engine.advance(self._now)
            engine.count_tokens(trained_at)
        self._version += 1
        self._pause(False)
        by_version = [(trained_at - v, n) for attempt in attempts for v, n in attempt.versions.items()]
        oldest = max((age for age, _ in by_version), default=0)
        counted = sum(n for _, n in by_version)
        return IterationRow(
            began_s=began,
            wait_s=waited,
            train_s=train_s,
            publish_s=setup.publish_s,
            tokens=tokens,
            staleness_max=oldest,
            staleness_mean=min(sum(age * n for age, n in by_version) / counted, oldest) if counted else 0.0,  # rounding
            mixed_versions_share=sum(len(attempt.versions) > 1 for attempt in attempts) / len(attempts),
            groups_ahead=ahead,
            groups=tuple(group.key for group in groups),
        )

    def _admit(self, iteration: int) -> None:
        setup = self._setup
        while self._submitted < admitted_before(iteration, setup.max_staleness, setup.iterations):
            for slot in range(setup.tasks_per_iteration):
                group = _Group((self._submitted, slot))
                places = [(self._submitted, slot, member) for member in range(setup.group_size)]
                group.attempts = [_Attempt(group, place, self._sensible(*place)) for place in places]
                self._waiting += group.attempts
            self._submitted += 1
        self._start_waiting()

    def _sensible(self, *place: int) -> AttemptWork:
        work = self._work(*place)
        if problems := work.problems():
            raise ValueError("\n".join(problems))
        return work

    def _start_waiting(self) -> None:
        if self._starting:  # by an attempt that took no time: the loop below has its slot next
            return
        self._starting = True
        while self._free_slots and self._waiting:
            self._free_slots -= 1
            attempt = self._waiting.popleft()
            self._go_on(attempt, self._life(attempt))
        self._starting = False

    # ---- an attempt --------------------------------------------------------------------------------------------------

    def _life(self, attempt: _Attempt) -> Process:
        work = attempt.work
        yield "sleep", work.before_s
        attempt.engine = min(self._engines, key=lambda engine: engine.num_open)
        attempt.engine.num_open += 1
        for turn in range(work.turns):
            if turn:
                yield "sleep", work.tools_s / (work.turns - 1)
            yield "sleep", self._setup.request_s
            yield "sample", work.tokens / work.turns
        attempt.engine.num_open -= 1
        yield "sleep", work.after_s + (work.tools_s if work.turns == 1 else 0.0)
        attempt.group.num_finished += 1
        if attempt.group.num_finished == len(attempt.group.attempts):
            self._finished.setdefault(attempt.group.key[0], []).append(attempt.group)
        self._free_slots += 1
        self._start_waiting()

    def _go_on(self, attempt: _Attempt, process: Process) -> None:
        for kind, amount in process:
            if amount <= 0.0:
                continue
            if kind == "sleep":
                self._at(self._now + amount, lambda: self._go_on(attempt, process))
            else:
                assert attempt.engine is not None
                attempt.engine.advance(self._now)
                attempt.engine.add(attempt, amount, lambda: self._go_on(attempt, process))
                self._announce_end(attempt.engine)
            return

    # ---- engines and clock -------------------------------------------------------------------------------------------

    def _announce_end(self, engine: _Engine) -> None:
        engine.stamp += 1
        stamp = engine.stamp
        if (end := engine.next_end()) is not None:
            self._at(end, lambda: self._end_request(engine, stamp))

    def _end_request(self, engine: _Engine, stamp: int) -> None:
        if stamp != engine.stamp:
            return
        engine.advance(self._now)
        request = engine.pop()
        _sampled(request, request.finish, self._version)
        if self._tell is not None:
            busy_s, loads = engine.busy_s - request.began[0], engine.loads - request.began[1]
            self._tell(request.attempt.place, busy_s, loads / request.tokens)
        self._announce_end(engine)
        request.resume()

    def _pause(self, paused: bool) -> None:
        for engine in self._engines:
            if engine.paused != paused:
                engine.advance(self._now)
                engine.paused = paused
                self._announce_end(engine)

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def _next_event(self) -> None:
        assert self._events, "nothing is going on and an iteration is not complete"
        self._now, _, what = heapq.heappop(self._events)
        what()

    def _pass(self, seconds: float) -> None:
        """The loop is busy; what happens meanwhile happens, up to the last instant."""
        end = self._now + seconds
        while self._events and self._events[0][0] <= end:
            self._next_event()
        self._now = end
