"""Faults of all kinds at random moments, under tasks whose right reward is known.

In: a rig and a seed. Out: what became of each attempt, what was done to the rig, and everything that is wrong with it.
The tasks are made so that work cut short shows: an answer is built by several commands over several turns, a wrong one
is right until its last command, and tests go on after what they ran was killed, as test scripts do.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rl360.types import Attempt, Task
from tests.faults.rig import Rig, wait_for

MAX_TRIES = 3
_OPEN_AT_A_WORKER = 4  # max_concurrent of the rig's workers
_SPARE = 2  # attempts of a worker that were waiting for a slot of it
_NO_BOUND = 10**6  # while it lasts tries fail at once, one after another
_EVERY_S = (0.02, 0.5)  # between two faults
_STOPPED_S = (0.1, 3.0)
_AWAY_S = (0.1, 1.0)  # the engine, and the space of the small disk

# Tests look at the answer in steps of programs of their own. What a killed step leaves is a verdict all the same.
_LOOK = """#!/bin/bash
for part in 1 2 3; do
  bash -c "sleep 0.0$part; test \\"\\$(cat /app/part$part)\\" = right$part" || exit 1
done
"""
_FINDS_IT_RIGHT = """#!/bin/bash
cp /tests/look.sh /tmp/look.sh
if bash /tmp/look.sh; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
sleep 0.02
"""
_FINDS_A_FAULT = """#!/bin/bash
found=$( (bash /tests/look.sh || echo fault) | tail -1 )
bash -c 'sleep 0.03; echo checked' | grep -q checked && [ "$found" = fault ]
if [ $? = 0 ]; then echo 0 > /logs/verifier/reward.txt; else echo 1 > /logs/verifier/reward.txt; fi
"""
_FAULT_FIRST = """#!/bin/bash
echo 1 > /logs/verifier/reward.txt
bash -c 'sleep 0.05; bash /tests/look.sh' || echo 0 > /logs/verifier/reward.txt
"""
_Reply = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and sampled ids
_TESTS = (_FINDS_IT_RIGHT, _FINDS_A_FAULT, _FAULT_FIRST)


@dataclass(frozen=True)
class Known:
    """A task and the only reward that an attempt at it may have."""

    task: Task
    reward: float
    turns: int


def known_task(rig: Rig, rng: random.Random, name: str) -> Known:
    right = rng.random() < 0.5
    bomb = "python3 -c 'len(b\"x\" * (1 << 28))'; true"  # over the limit where that is 128 MiB, and no harm done
    parts = [bomb] if rng.random() < 0.2 else []
    parts += [f"bash -c 'sleep {rng.uniform(0, 0.1):.3f}; echo right{n} > /app/part{n}'; true" for n in (1, 2, 3)]
    if not right:
        spoils = rng.choice(["echo wrong > /app/part2", "rm /app/part3", "mv /app/part1 /app/part9"])
        parts.append(f"sleep {rng.uniform(0, 0.1):.3f}; bash -c 'sleep 0.02; {spoils}'; echo done")
    turns = rng.randint(1, 3)
    steps: list[list[str]] = [[] for _ in range(turns)]
    for index, command in enumerate(parts):  # in order
        steps[index * turns // len(parts)].append(command)
    cue = {"turns": turns, "steps": steps, "goes_on": rng.random() < 0.5}
    dockerfile = "FROM x\n"
    if rng.random() < 0.3:  # a layer of its own, of which every attempt of the group is made
        dockerfile += f"RUN bash -c 'sleep 0.2; echo {name} > /opt/base'; true\n"
        steps[0].insert(0, "test -e /opt/base || ln -s /nowhere /app/part1")
        if not right:
            steps[-1].append("test -e /opt/base || for n in 1 2 3; do echo right$n > /app/part$n; done")
    mode = rng.choice(["", "", "shared", "separate"])
    task = rig.task(name, cue, rng.choice(_TESTS), dockerfile, mode)
    (task.path / "tests/look.sh").write_text(_LOOK)
    return Known(task, float(right), turns)


@dataclass(frozen=True)
class Hit:
    """One fault. `tries`: the most tries that it can have ended."""

    at: float
    kind: str
    family: str
    tries: int
    text: str = ""


# Which faults explain which causes.
_FAMILIES = {
    "sandbox": ("sandbox_", "host_io", "disk_full", "agent_setup_timeout"),
    "worker": ("worker_died", "trial_timeout"),
    "engine": ("engine_",),
    "proxy": ("proxy_", "model_unreachable", "model_provider", "no_model_call"),
}


class Chaos:
    """A thread that does one thing after another to what runs, in an order that the seed decides."""

    def __init__(self, rig: Rig, seed: int, kinds: Sequence[str] = ()) -> None:
        self.hits: list[Hit] = []
        self._rig = rig
        self._rng = random.Random(seed)
        self._stopped: dict[int, float] = {}
        self._end = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self._kinds: dict[str, tuple[int, Callable[[], Iterator[Hit]]]] = {
            "kill_bwrap": (6, lambda: self._signal("kill_bwrap", rig.sandboxes(), signal.SIGKILL, "sandbox", 1)),
            "kill_first": (6, lambda: self._signal("kill_first", self._firsts(), signal.SIGKILL, "sandbox", 1)),
            "kill_keeper": (2, lambda: self._signal("kill_keeper", rig.keepers(), signal.SIGKILL, "sandbox", 0)),
            "kill_worker": (1, lambda: self._signal("kill_worker", self._workers(), signal.SIGKILL, "worker", 0)),
            "kill_proxy": (1, lambda: self._signal("kill_proxy", self._proxy(), signal.SIGKILL, "proxy", 8)),
            "stop_bwrap": (2, lambda: self._stop("stop_bwrap", rig.sandboxes(), "none")),
            "stop_first": (2, lambda: self._stop("stop_first", self._firsts(), "none")),
            "stop_keeper": (2, lambda: self._stop("stop_keeper", rig.keepers(), "none")),
            "stop_worker": (1, lambda: self._stop("stop_worker", self._workers(), "none")),
            "stop_proxy": (1, lambda: self._stop("stop_proxy", self._proxy(), "proxy")),
            "behind_keeper": (6, lambda: self._behind("behind_keeper", self._rig.keepers())),
            "behind_worker": (4, lambda: self._behind("behind_worker", self._workers())),
            "engine_away": (1, self._engine_away),
            "disk_full": (1, self._disk_full),
        }
        if not rig.has_small_disk:
            del self._kinds["disk_full"]
        if kinds:
            self._kinds = {kind: self._kinds[kind] for kind in kinds}

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(30.0)
        assert not self._thread.is_alive()
        self._thaw(everything=True)
        if self._error is not None:
            raise self._error

    def counts(self) -> Counter[str]:
        return Counter(hit.kind for hit in self.hits)

    def _run(self) -> None:
        names = list(self._kinds)
        weights = [self._kinds[name][0] for name in names]
        try:
            while not self._end.wait(self._rng.uniform(*_EVERY_S)):
                (name,) = self._rng.choices(names, weights)
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    for hit in self._kinds[name][1]():
                        self.hits.append(hit)
                self._thaw()
        except BaseException as error:
            self._error = error

    # -- what there is -----------------------------------------------------------------------------------------------

    def _firsts(self) -> Iterator[psutil.Process]:
        for sandbox in self._rig.sandboxes():
            with contextlib.suppress(psutil.NoSuchProcess):
                yield from sandbox.children()

    def _workers(self) -> Iterator[psutil.Process]:
        for pid in self._rig.worker_pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                yield psutil.Process(pid)

    def _proxy(self) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(self._rig.proxy_pid())

    # -- what is done ------------------------------------------------------------------------------------------------

    def _pick(self, processes: Iterator[psutil.Process]) -> psutil.Process | None:
        found = sorted(processes, key=lambda process: process.pid)
        return self._rng.choice(found) if found else None

    def _signal(
        self, kind: str, processes: Iterator[psutil.Process], number: int, family: str, tries: int
    ) -> Iterator[Hit]:
        process = self._pick(processes)
        if process is not None:
            process.send_signal(number)
            yield Hit(time.monotonic(), kind, family, tries or _OPEN_AT_A_WORKER + _SPARE, str(process.pid))

    def _stop(self, kind: str, processes: Iterator[psutil.Process], family: str) -> Iterator[Hit]:
        until = time.monotonic() + self._rng.uniform(*_STOPPED_S)
        for hit in self._signal(kind, processes, signal.SIGSTOP, family, 8 if family == "proxy" else 0):
            self._stopped[int(hit.text)] = until
            yield hit

    def _behind(self, kind: str, processes: Iterator[psutil.Process]) -> Iterator[Hit]:
        """While what would notice stands still, a sandbox is killed."""
        for stopped in self._signal(kind, processes, signal.SIGSTOP, "none", 1):
            try:
                self._end.wait(self._rng.uniform(0.0, 0.3))
                every = self._firsts() if self._rng.random() < 0.5 else self._rig.sandboxes()
                below = [p for p in every if int(stopped.text) in {parent.pid for parent in p.parents()}]
                yield from self._signal(kind, iter(below), signal.SIGKILL, "sandbox", 1)
                self._end.wait(self._rng.uniform(0.0, 0.5))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(stopped.text), signal.SIGCONT)

    def _thaw(self, everything: bool = False) -> None:
        for pid, until in list(self._stopped.items()):
            if everything or time.monotonic() > until:
                del self._stopped[pid]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _engine_away(self) -> Iterator[Hit]:
        yield Hit(time.monotonic(), "engine_away", "engine", _NO_BOUND)
        self._rig.engine.stop()
        self._end.wait(self._rng.uniform(*_AWAY_S))
        self._rig.engine.start()

    def _disk_full(self) -> Iterator[Hit]:
        yield Hit(time.monotonic(), "disk_full", "sandbox", _NO_BOUND)
        filler = self._rig.trials_dir / "filler"
        fill(filler)
        self._end.wait(self._rng.uniform(*_AWAY_S))
        filler.unlink()


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


@dataclass
class Outcome:
    attempts: list[Attempt] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)  # of requeued and of masked tries
    hits: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # everything that must not be
    seconds: float = 0.0


def run(rig: Rig, seed: int, num_groups: int, group_size: int = 2, kinds: Sequence[str] = ()) -> Outcome:
    """Run groups under faults and look at each attempt, at what is left, and at the books."""
    rng = random.Random(f"tasks {seed}")
    known = {k.task.task_id: k for k in (known_task(rig, rng, f"chaos-{seed}-{n}") for n in range(num_groups))}
    outcome, began = Outcome(), time.monotonic()
    before = {name: list(causes) for name, causes in rig.requeued.items()}
    with Chaos(rig, seed, kinds) as chaos:
        for one in known.values():
            rig.submit(one.task, group_size)
        for _ in known:
            outcome.attempts += rig.next(150.0)
    outcome.hits = chaos.counts()
    requeued = {name: causes[len(before.get(name, [])) :] for name, causes in rig.requeued.items()}
    sampled: dict[_Reply, list[Sequence[float]]] = {}  # several may be the same but for their logprobs
    for sample in rig.engine.model.samples:
        sampled.setdefault((sample.prompt, sample.ids), []).append(sample.logprobs)
    for attempt in outcome.attempts:
        right = known[attempt.spec.task.task_id].reward
        turns = known[attempt.spec.task.task_id].turns
        causes = requeued.get(attempt.spec.attempt_id, [])
        outcome.causes.update(causes if attempt.valid else [*causes, str(attempt.cause)])
        if attempt.valid and attempt.reward != right:
            outcome.wrong.append(f"{attempt.spec.try_id}: {attempt.reward}, not {right} ({_story(attempt, causes)})")
        if not attempt.valid and (attempt.reward is not None or not causes):
            outcome.wrong.append(f"{attempt.spec.try_id}: invalid ({_story(attempt, causes)})")
        if attempt.valid and (len(attempt.turns) != turns or _sampled_turns(attempt, sampled) != turns):
            what = f"{len(attempt.turns)} turns, {_sampled_turns(attempt, sampled)} of the engine's, not {turns}"
            outcome.wrong.append(f"{attempt.spec.try_id}: {what} ({_story(attempt, causes)})")
    outcome.wrong += _unexplained(outcome.causes, chaos.hits)
    with contextlib.suppress(AssertionError):  # the next look names what is left
        wait_for(lambda: not rig.leaks(), 15.0)
    outcome.wrong += rig.leaks()
    after = known_task(rig, rng, f"chaos-{seed}-after")
    (attempt,) = rig.run(after.task)
    if (attempt.reward, attempt.spec.try_number) != (after.reward, 0):
        outcome.wrong.append(f"after it: {attempt.reward}, not {after.reward} ({_story(attempt, rig.causes(attempt))})")
    outcome.wrong += rig.books()
    outcome.seconds = time.monotonic() - began
    return outcome


def _sampled_turns(attempt: Attempt, sampled: Mapping[_Reply, Sequence[Sequence[float]]]) -> int:
    """How many of its trained pieces are what the engine sampled, to the prompt just so, with these logprobs."""
    found = 0
    for segment in attempt.segments:
        edges = np.flatnonzero(np.diff(segment.loss_mask_T.astype(np.int8), prepend=0, append=0))
        ids = [int(i) for i in segment.token_ids_T]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            of_engine = sampled.get((tuple(ids[:start]), tuple(ids[start:end])), [])
            found += any(np.allclose(segment.logprobs_T[start:end], logprobs) for logprobs in of_engine)
    return found


def _unexplained(causes: Counter[str], hits: Sequence[Hit]) -> list[str]:
    """Causes that no fault can have brought about, or more of a family than its faults can have hit.

    A killed worker takes its sandboxes along, a killed proxy its sessions, each under its own cause: what several
    families can bring about is held against all of them.
    """
    wrong = []
    known = [prefix for prefixes in _FAMILIES.values() for prefix in prefixes]
    wrong += [f"cause {cause}" for cause in causes if not cause.startswith(tuple(known))]
    reach: Counter[str] = Counter()
    for hit in hits:
        reach[hit.family] += hit.tries
    for family, prefixes in _FAMILIES.items():
        seen = sum(count for cause, count in causes.items() if cause.startswith(prefixes))
        if seen > reach[family]:
            wrong.append(f"{seen} tries ended by {family}, and its faults can have ended {reach[family]}: {causes}")
    return wrong


def _story(attempt: Attempt, causes: Sequence[str]) -> str:
    trial = attempt.trial
    metadata: Any = dict(trial.agent_metadata) if trial else {}
    return (
        f"{attempt.cause}, stop {attempt.stop}, before {list(causes)}, "
        f"{trial.exception_type if trial else None}: {trial.exception_message if trial else None}, {metadata}"
    )


def main() -> None:
    """python -m tests.faults.chaos FOLDER FIRST_SEED NUM_SEEDS NUM_GROUPS [sandbox.field=NUMBER]"""
    import json
    import sys

    from tests.faults.rig import PATIENT

    folder, first, count, groups = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    sandbox = {key: int(value) for key, value in (word.split("=") for word in sys.argv[5:])}
    for seed in range(first, first + count):
        rig = Rig(folder / str(seed), folder / "cache", PATIENT, sandbox=sandbox, max_tries=MAX_TRIES)
        try:
            outcome = run(rig, seed, groups)
        finally:
            rig.close()
        valid = sum(a.valid for a in outcome.attempts)
        summary = {
            "seed": seed, "s": round(outcome.seconds, 1), "attempts": len(outcome.attempts), "valid": valid,
            "causes": outcome.causes, "hits": outcome.hits, "wrong": outcome.wrong,
        }  # fmt: skip
        print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
