"""The Harbor environment: one bubblewrap sandbox per trial.

In: Harbor's constructor arguments and the fields of `SandboxConfig` as keywords. Out: Harbor's environment interface.
Left to others: processes (namespace.py, keeper.py), files (transfer.py), images (dockerfile.py, layers.py).

Where this differs from Harbor's Docker environment: FROM names what the Dockerfile was written for, while the root file
system is `sandbox.base`; the network is there only if the task asks for it in words and `sandbox.network` allows it
(Harbor's own default is a public network); log folders are copied, not mounted, so that the disk limit covers them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.task.config import NetworkMode
from harbor.trial.errors import EnvironmentStartTimeoutError

from rl360.sandboxes import abilities
from rl360.sandboxes.local import cgroups, layers, rootfs, transfer
from rl360.sandboxes.local.dockerfile import DockerfileError, Image, parse
from rl360.sandboxes.local.namespace import Keeper, SandboxDied, SandboxProcess
from rl360.sandboxes.local.plan import DEFAULT_PATH, Plan
from rl360.sandboxes.local.users import UnknownUser, find_user, home_of

_DISK_FULL_BYTES = 64 * 1024  # less than this free: the sandbox has filled its disk
_LOGS, _VERIFIER_LOGS, _TESTS = "/logs", "/logs/verifier", "/tests"


class MemoryLimitExceededError(RuntimeError):
    """The sandbox ran into its memory limit and ended. The name is one of Harbor's error table."""


@dataclass
class Host:
    """What the sandboxes of one process share: a base root file system, control groups, a keeper."""

    base: rootfs.Base
    hierarchy: cgroups.Hierarchy
    mode: str
    userns: bool
    cache_dir: Path
    keeper: Keeper
    run_id: str

    def fresh_keeper(self) -> Keeper:
        """The keeper, started again if it was killed."""
        if not self.keeper.alive:
            self.keeper.close()
            self.keeper = Keeper(self.cache_dir / "owners", self.run_id, self.hierarchy)
        return self.keeper


# Harbor makes environments from an import path and JSON keywords, so what they share in a process is found here.
_hosts: dict[tuple[str, str, bool], Host] = {}
_hosts_lock = threading.Lock()


def open_host(cache_dir: Path, base: str, unprivileged: bool, run_id: str) -> Host:
    """The shared host of this process; made, and leftovers of killed runs removed, on the first call.

    Raises SandboxBuildFailedError that says what is missing and what to do.
    """
    key = (str(cache_dir), base, unprivileged)
    with _hosts_lock:
        if key not in _hosts:
            report = abilities.probe(unprivileged=unprivileged)
            if report.problems:
                raise SandboxBuildFailedError("; ".join(report.problems))
            try:
                root = rootfs.resolve(base, cache_dir)
            except rootfs.BaseError as error:
                raise SandboxBuildFailedError(str(error)) from error
            hierarchy = cgroups.find()
            keeper = Keeper(cache_dir / "owners", run_id, hierarchy)
            _hosts[key] = Host(root, hierarchy, report.root_mode, report.userns, cache_dir, keeper, run_id)
        return _hosts[key]


def close_hosts() -> None:
    """End every sandbox of this process and remove what it owns."""
    with _hosts_lock:
        while _hosts:
            _hosts.popitem()[1].keeper.close()


class LocalSandbox(BaseEnvironment):
    """Keywords beyond Harbor's are the fields of `SandboxConfig` and `cache_dir`, `run_id`.

    The smaller of a task's own limit and the configured one holds; 0 means no limit.
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
        **kwargs: Any,
    ):
        self._cache_dir = Path(cache_dir).expanduser()
        self._run_id = run_id
        self._network_allowed = network
        self._memory_mib, self._cpus, self._pids, self._disk_mib = memory_mib, cpus, pids, disk_mib
        self._lifetime_s, self._start_timeout_s = lifetime_s, start_timeout_s
        self._base, self._unprivileged = base, unprivileged
        self._image = Image()
        self._sandbox: SandboxProcess | None = None
        self._tests_in_image = False
        self.exhausted = ""  # after stop too: memory | disk | lifetime, the limit that the sandbox ran into
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
        network = self._wants_network()
        host = await asyncio.to_thread(open_host, self._cache_dir, self._base, self._unprivileged, self._run_id)
        keeper = host.fresh_keeper()
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
                memory_mib=_smaller(self._memory_mib, self._effective_memory_mb),
                cpus=_smaller(self._cpus, self._effective_cpus),
                pids=self._pids,
            ),
            disk_mib=_smaller(self._disk_mib, self._effective_storage_mb),
            lifetime_s=self._lifetime_s,
            network=network,
            env={"PATH": path, **self._image.env, **self._startup_env()},
            workdir=self.task_env_config.workdir or self._image.workdir,
            read_only_binds=host.base.read_only_binds,
            masks=host.base.masks,
        )
        try:
            building = _without_network(plan) if not self._network_allowed else plan
            trees = await layers.ensure(
                keeper, building, host.base, self._image, self.environment_dir, host.cache_dir / "layers", force_build
            )
        except (layers.BuildError, SandboxDied) as error:
            raise SandboxBuildFailedError(str(error)) from error
        self._sandbox = SandboxProcess(keeper, _with_trees(plan, trees))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._sandbox.start()
        except TimeoutError as error:
            raise EnvironmentStartTimeoutError(f"sandbox did not start in {self._start_timeout_s} s") from error
        except (OSError, SandboxDied) as error:
            raise SandboxBuildFailedError(f"sandbox did not start: {error}") from error
        root = self._sandbox.root_fd
        for folder in self._mount_targets(writable_only=True):
            transfer.make_folder(root, folder, 0o777)
        transfer.make_folder(root, plan.workdir)
        self._tests_in_image = transfer.kind(root, _TESTS) != "missing"
        await self._upload_environment_dir_after_start()

    def _wants_network(self) -> bool:
        """Harbor's default is a public network; here a task has to say so."""
        asked = "network_mode" in self.task_env_config.model_fields_set
        if not asked or self._network_policy.network_mode == NetworkMode.NO_NETWORK:
            return False
        if not self._network_allowed:
            raise SandboxBuildFailedError(
                f"{self.environment_name}: the task asks for network_mode={self._network_policy.network_mode.value!r} "
                "and sandbox.network is false; set it to true or leave the task out"
            )
        return True

    async def stop(self, delete: bool) -> None:
        """End the sandbox. Nothing of it is kept, whatever `delete` says: its disk is gone with its mount namespace."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self._note_exhausted(sandbox)
            await sandbox.stop()
            self.exhausted = self.exhausted or sandbox.exhausted

    def _note_exhausted(self, sandbox: SandboxProcess) -> None:
        free = sandbox.free_disk_bytes()
        if free is not None and free < _DISK_FULL_BYTES:
            self.exhausted = self.exhausted or "disk"

    async def settle_for_verifier(self, verifier_user: str | int | None) -> None:
        """Before verification: no process of the agent is left, and the verifier's folders are new and empty.

        `/tests` goes unless the image brought it, so that planted hooks go with it. The reward folder is writable for
        the verifier's user only, so a test script that runs the solution as another user cannot be graded by it.
        """
        sandbox = self._running()
        await sandbox.kill_all()
        root = sandbox.root_fd
        await asyncio.to_thread(transfer.remove, root, _VERIFIER_LOGS)
        as_root = verifier_user in (None, "root", 0, "0") and self._image.user in (None, "root", "0")
        transfer.make_folder(root, _VERIFIER_LOGS, 0o755 if as_root else 0o777)
        if not self._tests_in_image:
            await asyncio.to_thread(transfer.remove, root, _TESTS)

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
            raise RuntimeError(str(error)) from error
        except (SandboxDied, OSError, ValueError) as error:
            await self.stop(delete=True) if isinstance(error, SandboxDied) else None
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
            root = self._running().root_fd
            await asyncio.to_thread(transfer.upload_folder, root, Path(source_dir), self._absolute(target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        with self._as_runtime_error():
            root = self._running().root_fd
            await asyncio.to_thread(transfer.download_file, root, self._absolute(source_path), Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        with self._as_runtime_error():
            root = self._running().root_fd
            skipped = await asyncio.to_thread(
                transfer.download_folder, root, self._absolute(source_dir), Path(target_dir)
            )
        if skipped:
            self.logger.warning("download of %s left out %d entries, e.g. %s", source_dir, len(skipped), skipped[0])

    def _absolute(self, path: str | Path) -> str:
        text = str(path)
        workdir = self.task_env_config.workdir or self._image.workdir
        return text if text.startswith("/") else f"{workdir.rstrip('/')}/{text}"

    @contextlib.contextmanager
    def _as_runtime_error(self) -> Any:
        try:
            yield
        except OSError as error:
            if self._sandbox is not None:
                self._note_exhausted(self._sandbox)
            raise RuntimeError(f"file transfer failed: {error}") from error


def _smaller(configured: float, asked: float | None) -> Any:
    """The smaller of two limits, where 0 and None mean no limit."""
    limits = [value for value in (configured, asked) if value]
    return min(limits) if limits else type(configured)(0)


def _with_trees(plan: Plan, trees: layers.Trees) -> Plan:
    return Plan(**{**vars(plan), "trees": trees})


def _without_network(plan: Plan) -> Plan:
    return Plan(**{**vars(plan), "network": False})
