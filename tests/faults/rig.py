"""A run without a trainer: real queue, trial workers, sandboxes and proxy, in front of an engine without a model.

In: tasks and what goes wrong. Out: groups, the causes of the requeues before them, and the run folder as a run leaves
it, so that the ledger and its recount can be compared after every fault.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from rl360.config.schemas import AgentConfig, SandboxConfig
from rl360.diagnostics.recount import recount
from rl360.engine.record import RunRecord, outcome_of
from rl360.engine.workers import LocalWorkerGroup
from rl360.gateway.direct import DirectGateway
from rl360.rewards.verifier import VerifierReward
from rl360.rollout.queue import QueueRollout, RolloutEvents
from rl360.rollout.specs import group_spec
from rl360.sandboxes.local import cgroups
from rl360.types import Attempt, AttemptSpec, OutcomeKind, Purpose, Sampling, Task
from tests.gateway.kit import tokenizer_of, write_folder
from tests.gateway.stub_engine import StubModel, serve

BUDGET_S = 2.0  # the agent's own time
TIMER_S = 4.5  # Harbor's wall clock for it: the rest is for engine waits
REQUEST_TIMEOUT_S = 2.0
VERIFIER_TIMEOUT_S = 3.0
TRIAL_TIMEOUT_S = 10.0
CLIENT_TIMEOUT_S = 11.0
CALL_TIMEOUT_S = 1.5  # opening or closing a session
MAX_TRIES = 2
SMALL_DISK_MIB = 8
NUM_WORKERS = 2
PASSES = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"


def wait_for(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """The condition's first true value. Fails the test when it never comes."""
    until = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < until, f"waited {timeout_s} s for {condition}"
        time.sleep(0.02)
    return value


class Engine:
    """The stub engine in a thread; can be taken away and brought back at the same port."""

    def __init__(self) -> None:
        self.model = StubModel(tokenizer_of(), 3)
        self.url = ""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="stub-engine", daemon=True).start()
        self._stack: AsyncExitStack | None = None

    def start(self) -> None:
        port = int(self.url.rpartition(":")[2] or 0)
        self._in_loop(self._start(port))

    def stop(self) -> None:
        if self._stack is not None:
            self._in_loop(self._stack.aclose())
        self._stack = None

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _start(self, port: int) -> None:
        self._stack = AsyncExitStack()
        self.url = await self._stack.enter_async_context(serve(self.model, port))

    def _in_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)


@dataclass(frozen=True)
class Limits:
    """How long an attempt's parts may take, in seconds."""

    budget_s: float = BUDGET_S
    timer_s: float = TIMER_S
    verifier_s: float = VERIFIER_TIMEOUT_S
    trial_s: float = TRIAL_TIMEOUT_S
    client_s: float = CLIENT_TIMEOUT_S


PATIENT = Limits(timer_s=40.0, verifier_s=30.0, trial_s=60.0, client_s=15.0)
"""For what must end by the fault that a test brings, or not at all: on a machine that stands still for seconds no timer
may ring before it. The budget is as small as ever, since it ends nothing."""


class Rig:
    def __init__(
        self,
        folder: Path,
        cache_dir: Path,
        limits: Limits = Limits(),
        *,
        sandbox: Mapping[str, Any] = MappingProxyType({}),
        max_tries: int = MAX_TRIES,
    ) -> None:
        """`sandbox`: fields of SandboxConfig that differ from its defaults."""
        self.run_dir, self.cache_dir = folder / "run", cache_dir
        self.trials_dir = self.run_dir / "trials"
        self.trials_dir.mkdir(parents=True)
        self._run_id = f"faults{os.getpid()}"  # others may run on this machine
        self._stack = ExitStack()
        # Trial folders on a small disk of their own: it can be filled without filling the machine's.
        self.has_small_disk = _mount_tmpfs(self.trials_dir)
        if self.has_small_disk:
            self._stack.callback(subprocess.run, ["umount", "--lazy", str(self.trials_dir)], check=True)
        (self.run_dir / "resolved.yaml").write_text("algorithm: {filter: none}\n")
        self.record = RunRecord(self.run_dir)
        self.engine = Engine()
        self.engine.start()
        self.requeued: dict[str, list[str]] = {}  # attempt_id -> causes
        self.gateway = DirectGateway(
            engine_urls=[self.engine.url],
            tokenizer_dir=write_folder(folder / "model"),
            worker_group_factory=self._workers,
            log_dir=self.run_dir / "logs",
            request_timeout_s=REQUEST_TIMEOUT_S,
            call_timeout_s=CALL_TIMEOUT_S,
        )
        self.workers = self._workers(
            "rl360.rollout.trial_worker:TrialWorker",
            NUM_WORKERS,
            {
                "agent": {
                    **asdict(AgentConfig()),
                    "import_path": "tests.faults.agent:CueAgent",
                    "timeout_s": limits.timer_s,
                },
                "sandbox": {**asdict(SandboxConfig()), "verifier_timeout_s": limits.verifier_s, **sandbox},
                "cache_dir": cache_dir,
                "trials_dir": self.trials_dir,
                "trial_timeout_s": limits.trial_s,
                "model_name": "stub",
                "max_concurrent": 4,
                "start_interval_s": 0.0,
                "run_id": self._run_id,
            },
            "trial",
        )
        self.queue = QueueRollout(
            gateway=self.gateway,
            workers=self.workers,
            rewards={"verifier": VerifierReward("verifier")},
            events=RolloutEvents(self.record.started, self._requeued, self.record.finished, lambda: None),
            concurrency=8,
            max_tries=max_tries,
            agent_timeout_s=limits.budget_s,
            client_timeout_s=limits.client_s,
        )
        self._slots = iter(range(10**6))
        self._stack.callback(self.record.close)
        self._stack.callback(self.engine.close)
        self._stack.callback(self.queue.close)
        try:
            self.queue.start()
        except BaseException:
            self.close()
            raise
        self._mounts = self._own_mounts()

    def close(self) -> None:
        self._stack.close()

    # -- running -----------------------------------------------------------------------------------------------------

    def task(
        self,
        name: str,
        cue: Mapping[str, Any],
        test_sh: str = PASSES,
        dockerfile: str = "FROM x\n",
        environment_mode: str = "",
    ) -> Task:
        """`environment_mode`: of the verifier; separate has the working folder as its artifact."""
        mode = f'environment_mode = "{environment_mode}"\n' if environment_mode else ""
        artifacts = 'artifacts = ["/app"]\n' if environment_mode == "separate" else ""
        folder = self.run_dir.parent / "tasks" / name
        files = {
            "instruction.md": json.dumps(cue),
            "task.toml": (
                f'version = "1.0"\n{artifacts}[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 60.0\n{mode}'
            ),
            "environment/Dockerfile": f"{dockerfile}WORKDIR /app\n",
            "tests/test.sh": test_sh,
        }
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        return Task(name, folder, ("faults",), "")

    def submit(self, task: Task, size: int = 1) -> None:
        sampling = Sampling(max_new_tokens=64, max_context_tokens=100_000, max_turns=20)
        spec = group_spec(
            seed=3, iteration=0, slot=next(self._slots), task=task, group_size=size, sampling=sampling,
            purpose=Purpose.TRAIN,
        )  # fmt: skip
        self.queue.submit(self.record.next_tries(spec))

    def next(self, timeout_s: float = 60.0) -> tuple[Attempt, ...]:
        """The next group, decided on as the loop does: masked without a reward, else trained."""
        group = self.queue.next(0, timeout_s)
        outcomes = [
            outcome_of(a.spec, OutcomeKind.TRAINED, None)
            if a.valid
            else outcome_of(a.spec, OutcomeKind.MASKED, a.cause)
            for a in group.attempts
        ]
        self.record.outcomes([group], outcomes)
        return group.attempts

    def run(self, task: Task, size: int = 1) -> tuple[Attempt, ...]:
        self.submit(task, size)
        return self.next()

    def causes(self, attempt: Attempt) -> list[str]:
        """Why its earlier tries were requeued."""
        return self.requeued.get(attempt.spec.attempt_id, [])

    # -- what runs ---------------------------------------------------------------------------------------------------

    def worker_pids(self) -> list[int]:
        return [self.workers.pid(rank) for rank in range(NUM_WORKERS)]

    def proxy_pid(self) -> int:
        return self.gateway._group.pid(0)  # type: ignore[attr-defined]

    def keepers(self) -> Iterator[psutil.Process]:
        for pid in self.worker_pids():
            yield from (child for child in _children(pid) if "local.keeper" in _command(child))

    def sandboxes(self) -> Iterator[psutil.Process]:
        """Bubblewrap processes that the keepers started; below each is one sandbox."""
        for keeper in self.keepers():
            yield from (child for child in _children(keeper.pid) if _name(child) == "bwrap")

    def sandbox_with(self, command: str) -> psutil.Process | None:
        """The sandbox in which a process with this command line runs."""
        for sandbox in self.sandboxes():
            try:
                if any(command in " ".join(child.cmdline()) for child in sandbox.children(recursive=True)):
                    return sandbox
            except psutil.NoSuchProcess:
                continue
        return None

    def leaks(self) -> list[str]:
        """Everything of finished attempts that is still there."""
        found = [f"process {sandbox.pid} ({_name(sandbox)})" for sandbox in self.sandboxes()]
        for parent in set(cgroups.find().parents.values()):
            found += [f"control group {group}" for group in Path(parent).glob(f"{cgroups.PREFIX}{self._run_id}-*")]
        live = {str(pid) for pid in self.worker_pids()}
        owners = (self.cache_dir / "owners").glob(f"{self._run_id}-*")
        found += [f"owner folder {folder}" for folder in owners if folder.name.split("-")[2] not in live]
        found += [f"mount {line}" for line in self._own_mounts() if line not in self._mounts]
        with urllib.request.urlopen(f"{self.gateway._url}/health", timeout=5) as response:
            if sessions := json.loads(response.read())["sessions"]:
                found.append(f"{sessions} open sessions")
        return found

    def _own_mounts(self) -> list[str]:
        """Mounts on this host below the folders of the run and of its sandboxes."""
        own = (f" {self.run_dir}", f" {self.cache_dir}")
        return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if any(o in line for o in own)]

    def books(self) -> list[str]:
        """What is wrong with the ledger, or between it and its recount."""
        return [*self.record.audit(ended=True), *recount(self.run_dir).problems]

    # -- wiring ------------------------------------------------------------------------------------------------------

    def _requeued(self, spec: AttemptSpec, cause: str) -> None:
        self.requeued.setdefault(spec.attempt_id, []).append(cause)
        self.record.requeued(spec, cause)

    def _workers(self, target: str, size: int, kwargs: Mapping[str, Any], name: str) -> LocalWorkerGroup:
        env = {"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_NUM_THREADS": "1"}
        return LocalWorkerGroup(target, size, kwargs, name=name, log_dir=self.run_dir / "logs", env=env)


def _mount_tmpfs(folder: Path) -> bool:
    if os.getuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MIB}m", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
