"""The Harbor environment: one bubblewrap sandbox per trial.

In: Harbor's constructor arguments and the fields of `SandboxConfig` as keywords. Out: Harbor's environment interface,
and the change to a new sandbox before verification. Left to others: processes (namespace.py, keeper.py), files
(transfer.py, artifacts.py), images (dockerfile.py, layers.py), when the change happens (trial_worker.py).

Where this differs from Harbor's Docker environment: FROM names what the Dockerfile was written for, while the root file
system is `sandbox.base`; the network is there only if the task asks for it in words and `sandbox.network` allows it
(Harbor's own default is a public network); log folders are copied, not mounted, so that the disk limit covers them.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.trial.errors import EnvironmentStartTimeoutError

from rl360.sandboxes import abilities
from rl360.sandboxes.artifact_paths import Artifact, covers
from rl360.sandboxes.local import cgroups, layers, transfer
from rl360.sandboxes.local.artifacts import ArtifactsTooLarge, Carried, Disk, carry, printable
from rl360.sandboxes.local.dockerfile import DockerfileError, Image, parse
from rl360.sandboxes.local.host import Host, close_hosts, open_host
from rl360.sandboxes.local.namespace import DONE_INSIDE, SandboxDied, SandboxProcess
from rl360.sandboxes.local.plan import DEFAULT_PATH, Plan
from rl360.sandboxes.local.syscalls import OF_THE_HOST, raise_hosts
from rl360.sandboxes.local.threads import in_thread
from rl360.sandboxes.local.users import UnknownUser, find_user, home_of
from rl360.sandboxes.shared import (
    ARTIFACT_LOGS,
    DEFAULT_ARTIFACTS_MIB,
    DEFAULT_WORKDIR,
    TESTS,
    VERIFIER_LOGS,
    MemoryLimitExceededError,
    check_artifacts,
    only_root_writes,
    smaller,
    wants_network,
)

__all__ = ["LocalSandbox", "MemoryLimitExceededError", "close_hosts", "open_host"]

_DISK_FULL_BYTES = 64 * 1024  # less than this free: the sandbox has filled its disk
_MAX_REWARD_FILE_BYTES = 64 * 1024  # Harbor reads a reward file whole, into the memory of the trial worker


class LocalSandbox(BaseEnvironment):
    """Keywords beyond Harbor's are the fields of `SandboxConfig` and `cache_dir`, `run_id`.

    The smaller of a task's own limit and the configured one holds; 0 means no limit. `artifacts_mib`: the most that an
    agent may change in what is verified; 0 is seven eighths of the disk limit.
    """

    def __init__(
        self,
        *args: Any,
        cache_dir: str | Path = "~/.cache/rl360/sandboxes",
        run_id: str = "run",
        network: bool = False,
        memory_mib: int = 1024,
        cpus: float = 1.0,
        pids: int = 256,
        disk_mib: int = 512,
        lifetime_s: float = 900.0,
        start_timeout_s: float = 60.0,
        base: str = "auto",
        unprivileged: bool = False,
        artifacts_mib: int = 0,
        **kwargs: Any,
    ):
        self._cache_dir = Path(cache_dir).expanduser()
        self._run_id = run_id
        self._network_allowed = network
        self._memory_mib, self._cpus, self._pids, self._disk_mib = memory_mib, cpus, pids, disk_mib
        self._lifetime_s, self._start_timeout_s = lifetime_s, start_timeout_s
        self._base, self._unprivileged = base, unprivileged
        self._artifacts_mib = artifacts_mib
        self._image = Image()
        self._host: Host | None = None
        self._plan: Plan | None = None
        self._sandbox: SandboxProcess | None = None
        self._ending: list[SandboxProcess] = []  # of which the keeper has not said how they ended
        self._tests_in_image = False
        self._accounts: tuple[bytes, ...] = ()  # as the sandbox was started with
        # What the policy did to its sandbox, after stop too: memory | disk | lifetime | artifacts: a limit that it ran
        # into; sandbox: something inside ended it.
        self.exhausted = ""
        self.interrupted = ""  # what ended it, or a process in it, from outside: no verdict counts
        self.carried: Carried | None = None  # what came along into the verifier's sandbox
        super().__init__(*args, **kwargs)
        if self._host_mounts:
            raise ValueError("the local sandbox has no mounts: copy files with COPY or upload them")

    @staticmethod
    def type() -> str:
        return "rl360-local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    @classmethod
    def preflight(cls) -> None:
        problems = abilities.probe().problems
        if problems:
            raise SystemExit("\n".join(problems))

    def _validate_definition(self) -> None:
        if not (self.environment_dir / "Dockerfile").exists() and not self.task_env_config.docker_image:
            raise FileNotFoundError(f"{self.environment_dir}: no Dockerfile, and the task names no docker_image")
        if (self.environment_dir / "docker-compose.yaml").exists():
            raise ValueError(f"{self.environment_dir}: docker-compose.yaml is not supported by the local sandbox")

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Raises SandboxBuildFailedError or EnvironmentStartTimeoutError."""
        network = wants_network(
            self.environment_name, self.task_env_config, self._network_policy.network_mode, self._network_allowed
        )
        host = await asyncio.to_thread(open_host, self._cache_dir, self._base, self._unprivileged, self._run_id)
        self._host, keeper = host, host.fresh_keeper()
        dockerfile = self.environment_dir / "Dockerfile"
        try:
            self._image = parse(dockerfile) if dockerfile.exists() else Image()
        except (DockerfileError, OSError) as error:
            raise SandboxBuildFailedError(str(error)) from error
        path = f"{DEFAULT_PATH}:{host.base.extra_path}" if host.base.extra_path else DEFAULT_PATH
        plan = Plan(
            trees=layers.base_trees(host.base),
            mode=host.mode,
            userns=host.userns,
            hierarchy=host.hierarchy,
            limits=cgroups.Limits(
                memory_mib=smaller(self._memory_mib, self._effective_memory_mb),
                cpus=smaller(self._cpus, self._effective_cpus),
                pids=self._pids,
            ),
            disk_mib=smaller(self._disk_mib, self._effective_storage_mb),
            lifetime_s=self._lifetime_s,
            network=network,
            env={"PATH": path, **self._image.env, **self._startup_env()},
            workdir=self.task_env_config.workdir or self._image.workdir,
            read_only_binds=host.base.read_only_binds,
            masks=host.base.masks,
        )
        try:
            building = plan if self._network_allowed else replace(plan, network=False)
            trees = await layers.ensure(
                keeper, building, host.base, self._image, self.environment_dir, host.cache_dir / "layers", force_build
            )
        except (layers.BuildError, SandboxDied) as error:
            raise SandboxBuildFailedError(str(error)) from error
        self._plan = replace(plan, trees=trees)
        self._sandbox = await self._boot(self._plan)
        self._tests_in_image = transfer.kind(self._sandbox.root_fd, TESTS) != "missing"
        await self._upload_environment_dir_after_start()

    async def _boot(self, plan: Plan) -> SandboxProcess:
        """Raises SandboxBuildFailedError or EnvironmentStartTimeoutError."""
        assert self._host is not None
        sandbox = SandboxProcess(self._host.fresh_keeper(), plan)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await sandbox.start()
            for folder in self._mount_targets(writable_only=True):
                transfer.make_folder(sandbox.root_fd, folder, 0o777)
            transfer.make_folder(sandbox.root_fd, plan.workdir)
            self._accounts = _accounts(sandbox)
        except TimeoutError as error:
            await sandbox.stop()
            raise EnvironmentStartTimeoutError(f"sandbox did not start in {self._start_timeout_s} s") from error
        except (OSError, SandboxDied) as error:
            await sandbox.stop()
            raise SandboxBuildFailedError(f"sandbox did not start: {error}") from error
        return sandbox

    async def stop(self, delete: bool) -> None:
        """End the sandbox. Nothing of it is kept, whatever `delete` says: its disk is gone with its mount namespace."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self._note_exhausted(sandbox)
            self._ending.append(sandbox)
        while self._ending:  # also those of an earlier call that was cancelled: how they ended decides
            ended = self._ending[0]
            await ended.stop()
            self.exhausted = self.exhausted or ended.exhausted
            self.interrupted = self.interrupted or ended.interrupted
            if ended in self._ending:  # another call may have waited for the same
                self._ending.remove(ended)

    def _note_exhausted(self, sandbox: SandboxProcess) -> None:
        if _is_full(sandbox):
            self.exhausted = self.exhausted or "disk"

    # -- verification -------------------------------------------------------------------------------------------

    async def start_afresh(self, declared: Sequence[Artifact], verifier_user: str | int | None) -> None:
        """Before verification: end the agent's sandbox and go on in a new one, with the artifacts only.

        The artifacts are the working directory, /logs/artifacts and what the task declares. Raises RuntimeError when
        they are larger than the limit (then `exhausted` says so), or what a start raises.
        """
        old, self._sandbox = self._running(), None
        assert self._plan is not None
        try:
            disk = await old.halt()
            artifacts = self._artifacts(declared)
            home = self._plan.env.get("HOME", "/root")
            quiet = {"PYTHONNOUSERSITE": "1"} if covers(artifacts, home) else {}
            self._sandbox = await self._boot(replace(self._plan, env={**self._plan.env, **quiet}))
            await self._upload_environment_dir_after_start()
            await self.run_healthcheck()
            self.carried = await self._carry(disk, self._sandbox.disk(), artifacts)
            self._make_reward_folder(self._sandbox, verifier_user)
        except ArtifactsTooLarge as error:
            self.exhausted = "artifacts"
            raise RuntimeError(str(error)) from error
        except OSError as error:
            full = self._sandbox is not None and _is_full(self._sandbox)
            self.exhausted = "artifacts" if full else self.exhausted
            raise RuntimeError(printable(f"the artifacts could not be copied: {error}")) from error
        except SandboxDied as error:
            raise RuntimeError(str(error)) from error
        finally:
            await old.stop()
            self.interrupted = self.interrupted or old.interrupted
        if self.carried.num_refused:
            self.logger.warning("%d artifacts refused: %s", self.carried.num_refused, "; ".join(self.carried.refused))

    async def _carry(self, old: Disk, new: Disk, artifacts: Sequence[Artifact]) -> Carried:
        most = self._most_artifact_bytes()
        fds = {("old", name): fd for name, fd in old.trees.items()}
        fds |= {("new", name): fd for name, fd in new.trees.items()}

        def run(own: dict[tuple[str, str], int]) -> Carried:
            mine = {which: Disk({n: fd for (w, n), fd in own.items() if w == which}) for which in ("old", "new")}
            return carry(mine["old"], mine["new"], artifacts, most)

        return await in_thread(fds, run)

    def _artifacts(self, declared: Sequence[Artifact]) -> list[Artifact]:
        """Raises SandboxBuildFailedError for paths that cannot be carried."""
        workdir = posixpath.normpath(self._absolute(""))
        workdir = DEFAULT_WORKDIR if workdir == "/" else workdir
        artifacts = [Artifact(workdir, required=True), Artifact(ARTIFACT_LOGS)]
        artifacts += [replace(a, path=self._absolute(a.path)) for a in declared]
        check_artifacts(self.environment_name, artifacts)
        return artifacts

    def _most_artifact_bytes(self) -> int:
        assert self._plan is not None
        mib = self._artifacts_mib or self._plan.disk_mib * 7 // 8 or DEFAULT_ARTIFACTS_MIB
        return mib * 2**20

    async def settle_for_verifier(self, verifier_user: str | int | None) -> None:
        """For tasks that ask for the shared state: no process of the agent is left, the verifier's folders are new.

        `/tests` goes unless the image brought it, so that planted hooks go with it. Altered programs stay.
        """
        sandbox = self._running()
        try:
            await sandbox.kill_all()
            await _in_root(sandbox, lambda root: transfer.remove(root, VERIFIER_LOGS))
            self._make_reward_folder(sandbox, verifier_user)
            if not self._tests_in_image:
                await _in_root(sandbox, lambda root: transfer.remove(root, TESTS))
        except (OSError, RecursionError) as error:  # TimeoutError too: the control shell was stopped
            if not isinstance(error, OSError) or isinstance(error, TimeoutError) or error.errno in DONE_INSIDE:
                self.exhausted = self.exhausted or "sandbox"
            raise RuntimeError(printable(f"the sandbox could not be cleaned for the tests: {error}")) from error

    def _make_reward_folder(self, sandbox: SandboxProcess, verifier_user: str | int | None) -> None:
        """Writable for the verifier's user only: a test that runs the answer as another user is not graded by it."""
        mode = 0o755 if only_root_writes(verifier_user, self._image.user) else 0o777
        transfer.make_folder(sandbox.root_fd, VERIFIER_LOGS, mode)

    def _running(self) -> SandboxProcess:
        if self._sandbox is None:
            raise RuntimeError("the sandbox is not running")
        return self._sandbox

    # -- commands -----------------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Raises RuntimeError on a time-out, an unknown user or a dead sandbox; MemoryLimitExceededError."""
        sandbox = self._running()
        merged = dict(self._merge_env(env) or {})
        wanted = self._resolve_user(user)
        wanted = self._image.user if wanted is None else wanted
        try:
            who = None
            if wanted not in (None, "root", 0, "0"):
                who = find_user(sandbox.root_fd, wanted)
                merged.setdefault("HOME", home_of(sandbox.root_fd, who) or "/")
            done = await sandbox.run(command, cwd=cwd, env=merged, user=who, timeout_s=timeout_sec)
        except TimeoutError:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None
        except UnknownUser as error:
            if _accounts(sandbox) != self._accounts:  # the row is gone, or no number any more
                self.exhausted = self.exhausted or "sandbox"
            raise RuntimeError(printable(str(error))) from error
        except (SandboxDied, OSError, ValueError) as error:
            await self.stop(delete=True) if isinstance(error, SandboxDied) else None
            if isinstance(error, OSError) and error.errno in OF_THE_HOST:  # an agent may go on as if it had failed
                self.interrupted = self.interrupted or f"this machine could not run a command: {error.strerror}"
            if self.exhausted == "memory":
                raise MemoryLimitExceededError(f"{error} (memory limit {self._memory_mib} MiB)") from error
            raise RuntimeError(f"{error}{f' ({self.exhausted} limit)' if self.exhausted else ''}") from error
        callback = self._output_callback()
        if callback is not None:
            if done.stdout:
                await callback(done.stdout, "stdout")
            if done.stderr:
                await callback(done.stderr, "stderr")
        return ExecResult(stdout=done.stdout or None, stderr=done.stderr or None, return_code=done.return_code)

    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        return transfer.kind(self._running().root_fd, path) == "dir"

    async def is_file(self, path: str, user: str | int | None = None) -> bool:
        return transfer.kind(self._running().root_fd, path) == "file"

    # -- files --------------------------------------------------------------------------------------------------

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        with self._as_runtime_error():
            transfer.upload_file(self._running().root_fd, Path(source_path), self._absolute(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        with self._as_runtime_error():
            source, target = Path(source_dir), self._absolute(target_dir)
            await _in_root(self._running(), lambda root: transfer.upload_folder(root, source, target))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        with self._as_runtime_error():
            source, target = self._absolute(source_path), Path(target_path)
            await _in_root(self._running(), lambda root: transfer.download_file(root, source, target))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        with self._as_runtime_error():
            source, target = self._absolute(source_dir), Path(target_dir)
            skipped = await _in_root(self._running(), lambda root: transfer.download_folder(root, source, target))
            if str(source_dir) == VERIFIER_LOGS:
                skipped += _drop_large_rewards(Path(target_dir))
        if skipped:
            self.logger.warning(
                "download of %s left out %d entries, e.g. %s", source_dir, len(skipped), printable(skipped[0])
            )

    def _absolute(self, path: str | Path) -> str:
        workdir = self.task_env_config.workdir or self._image.workdir
        return posixpath.join(workdir, str(path))

    @contextlib.contextmanager
    def _as_runtime_error(self) -> Any:
        try:
            yield
        except OSError as error:
            if self._sandbox is not None:
                self._note_exhausted(self._sandbox)
            raise RuntimeError(printable(f"file transfer failed: {error}")) from error


async def _in_root[T](sandbox: SandboxProcess, call: Callable[[int], T]) -> T:
    """`call` in a thread, with a descriptor of the sandbox's root that lives as long."""
    return await in_thread({"": sandbox.root_fd}, lambda own: call(own[""]))


def _accounts(sandbox: SandboxProcess) -> tuple[bytes, ...]:
    found = []
    for path in ("/etc/passwd", "/etc/group"):
        try:
            found.append(transfer.read_small(sandbox.root_fd, path))
        except OSError as error:
            raise_hosts(error)
    return tuple(found)


def _is_full(sandbox: SandboxProcess) -> bool:
    free = sandbox.free_disk_bytes()
    return free is not None and free < _DISK_FULL_BYTES


def _drop_large_rewards(folder: Path) -> list[str]:
    dropped = []
    for name in ("reward.txt", "reward.json"):
        path = folder / name
        if path.is_file() and path.stat().st_size > _MAX_REWARD_FILE_BYTES:
            path.unlink()
            dropped.append(f"{VERIFIER_LOGS}/{name}")
    return dropped
