"""The Harbor environment: one sandbox of the Daytona service per trial.

In: Harbor's constructor arguments and the fields of `SandboxConfig` as keywords. Out: Harbor's environment interface.
Left to others: the client and its patience (client.py), the number open at once (capacity.py).

Where this differs from Harbor's own: the key is in a variable that the configuration names; the network is there only
if the task asks for it in words and `sandbox.network` allows it; a time-out is raised and ends the command's whole
process group; a finished command is noticed within milliseconds at first and not after a second; the sandbox destroys
itself after its lifetime, which also ends those of a killed run.

Not reached while this was written: the service itself. It is tested against a stand-in that speaks its API.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from daytona import Resources, SessionExecuteRequest
from daytona.common.errors import DaytonaConflictError, DaytonaError, DaytonaNotFoundError, DaytonaValidationError
from harbor.environments.base import ExecResult, SandboxBuildFailedError
from harbor.environments.daytona.environment import DaytonaEnvironment
from harbor.models.task.config import NetworkMode, NetworkPolicy
from harbor.trial.errors import EnvironmentStartTimeoutError

from rl360.sandboxes.daytona import abilities, capacity
from rl360.sandboxes.daytona.client import Account, MissingKey, install, patiently
from rl360.sandboxes.docker.recipe import on_base
from rl360.sandboxes.shared import smaller, wants_network

_LONGEST_ARGUMENT = 100_000  # bytes; the kernel's limit of one argument is 128 KiB
_MIB_PER_GIB = 1024  # the service counts memory and disk in whole GiB
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.05, 1.0  # between two looks at a running command
_NO_ANSWER_S = 30.0  # beyond a command's own time-out: then the service is to blame
_TRANSFER_TIMEOUT_S = 600
_OF_THE_SERVICE = (401, 403, 429)  # a transfer that fails so has not failed because of its file


class DaytonaSandbox(DaytonaEnvironment):
    """Keywords beyond Harbor's are the fields of `SandboxConfig`, `cache_dir`, `run_id`, and

    api_key_env: the variable that holds the key. api_url: null: DAYTONA_API_URL, else the public service. target: the
    region; null: the organization's default. max_sandboxes: open at once, over all workers of this host.
    capacity_wait_s: for one of them to become free. patience_s: how long a request is repeated while the service says
    429 or has no room.

    memory_mib and disk_mib are rounded up to whole GiB, cpus to whole ones; 0 leaves them to the service. `pids` has no
    counterpart. base: auto, or an image that the service can pull, in place of every image that the Dockerfile names.
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
        api_key_env: str = abilities.DEFAULT_KEY_VARIABLE,
        api_url: str | None = None,
        target: str | None = None,
        max_sandboxes: int = 50,
        capacity_wait_s: float = 300.0,
        patience_s: float = 120.0,
        **kwargs: Any,
    ):
        if max_sandboxes < 1:
            raise ValueError(f"sandbox.kwargs.max_sandboxes: {max_sandboxes}; expected at least 1")
        self._network_allowed = network
        self._memory_mib, self._cpus, self._disk_mib = memory_mib, cpus, disk_mib
        self._lifetime_s, self._start_timeout_s = lifetime_s, start_timeout_s
        self._base = "" if base == "auto" else base
        self._account = Account(api_key_env, api_url, target, patience_s)
        name = hashlib.sha256(f"{api_url} {api_key_env}".encode()).hexdigest()[:12]
        self._slots = Path(cache_dir).expanduser() / "daytona" / name
        self._max_sandboxes, self._capacity_wait_s = max_sandboxes, capacity_wait_s
        self._slot: capacity.Slot | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._dies_at = math.inf
        self.exhausted = ""  # after stop too: lifetime, when the sandbox ran into it
        kwargs["labels"] = {"rl360.run": run_id, **(kwargs.get("labels") or {})}
        super().__init__(*args, **kwargs)

    @classmethod
    def preflight(cls) -> None:
        missing = [f"sandbox: {a.name}: {a.detail}; {a.remedy}" for a in abilities.probe() if a.required and not a.ok]
        if missing:
            raise SystemExit("\n".join(missing))

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Raises SandboxBuildFailedError, EnvironmentStartTimeoutError, or the service's own DaytonaError."""
        self._wants_network()  # refused before anything is started
        try:
            install(self._account)
            self._account.key()
        except (MissingKey, ValueError) as error:
            raise SandboxBuildFailedError(str(error)) from error
        try:
            self._slot = await capacity.take(self._slots, self._max_sandboxes, self._capacity_wait_s)
            await super().start(force_build)
        except capacity.NoFreeSlot as error:
            raise EnvironmentStartTimeoutError(f"{error}; raise sandbox.kwargs.max_sandboxes or wait longer") from error

    def _wants_network(self) -> bool:
        mode = self._network_policy.network_mode
        return wants_network(self.environment_name, self.task_env_config, mode, self._network_allowed)

    def _create_network_kwargs(self) -> dict[str, Any]:
        return super()._create_network_kwargs() if self._wants_network() else {"network_block_all": True}

    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        if self._network_allowed or network_policy.network_mode == NetworkMode.NO_NETWORK:
            await super()._apply_network_policy(network_policy)

    def _sandbox_resources(self) -> Resources | None:
        memory = smaller(self._memory_mib, self._effective_memory_mb)
        disk = smaller(self._disk_mib, self._effective_storage_mb)
        cpus = smaller(self._cpus, self._effective_cpus)
        theirs = super()._sandbox_resources()
        return Resources(
            cpu=math.ceil(cpus) or None,
            memory=math.ceil(memory / _MIB_PER_GIB) or None,
            disk=math.ceil(disk / _MIB_PER_GIB) or None,
            gpu=theirs.gpu if theirs else None,
            gpu_type=theirs.gpu_type if theirs else None,
        )

    @property
    def _dockerfile_path(self) -> Path:
        path = super()._dockerfile_path
        if not self._base or not path.exists():
            return path
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="rl360-daytona-")
        rewritten = Path(self._scratch.name) / "Dockerfile"
        rewritten.write_text(on_base(path.read_text(), self._base))
        return rewritten

    async def _create_sandbox(self, params: Any, daytona: Any = None) -> None:
        """Raises SandboxBuildFailedError or the service's own error."""
        assert self._client_manager is not None
        client = daytona or await self._client_manager.get_client()
        params.labels = self._sandbox_labels()
        params.ttl_minutes = max(1, math.ceil(self._lifetime_s / 60))
        patience = self._account.patience_s
        timeout = round(self.task_env_config.build_timeout_sec)
        try:
            making = asyncio.ensure_future(
                patiently("create", patience, lambda: client.create(params=params, timeout=timeout))
            )
            self._sandbox = await asyncio.shield(making)
        except asyncio.CancelledError:
            # The service may have made it already: it is waited for, so that `stop` can delete it.
            with contextlib.suppress(Exception, asyncio.CancelledError):
                self._sandbox = await asyncio.wait_for(making, _NO_ANSWER_S)
            raise
        except DaytonaError as error:
            said = str(error).lower()
            if "build_failed" in said or "failed to build" in said or isinstance(error, DaytonaValidationError):
                raise SandboxBuildFailedError(f"{self.environment_name}: {error}") from error
            raise
        self._dies_at = time.monotonic() + self._lifetime_s

    async def stop(self, delete: bool) -> None:
        """Delete the sandbox, whatever `delete` says. One that cannot be deleted ends with its lifetime."""
        try:
            if self._sandbox is not None:
                await super().stop(delete=True)
        finally:
            if self._slot is not None:
                self._slot.release()
                self._slot = None
            if self._scratch is not None:
                self._scratch.cleanup()
                self._scratch = None

    async def settle_for_verifier(self, verifier_user: str | int | None) -> None:
        """A service's sandbox cannot be cleaned from outside, so a verifier that shares it could be fooled."""
        raise SandboxBuildFailedError(
            f'{self.environment_name}: [verifier] environment_mode = "shared" cannot be trusted at Daytona; leave it '
            'out, say "separate", or use sandbox=local or docker'
        )

    # -- commands -----------------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Raises RuntimeError on a time-out or a sandbox that is gone, else the service's own DaytonaError."""
        if self._sandbox is None:
            raise RuntimeError("the sandbox is not running")
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_sec + _NO_ANSWER_S if timeout_sec else None):
                result = await super().exec(command, cwd=cwd, env=env, timeout_sec=timeout_sec, user=user)
        except TimeoutError:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds; nor did the service end it") from None
        except DaytonaNotFoundError as error:
            raise self._gone(error) from error
        if timeout_sec and result.return_code == 137 and time.monotonic() - began >= timeout_sec:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        callback = self._output_callback()
        if callback is not None:
            if result.stdout:
                await callback(result.stdout, "stdout")
            if result.stderr:
                await callback(result.stderr, "stderr")
        return result

    def _gone(self, error: Exception) -> RuntimeError:
        if time.monotonic() >= self._dies_at:
            self.exhausted = "lifetime"
            return RuntimeError(f"sandbox ended (lifetime limit): {error}")
        return RuntimeError(f"sandbox ended: {error}")

    async def _sandbox_exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        shell: str = "bash -c",
        user: str | int | None = None,
    ) -> ExecResult:
        if self._is_windows or self._sandbox is None:
            return await super()._sandbox_exec(command, cwd, env, timeout_sec, shell, user)
        if len(command.encode()) > _LONGEST_ARGUMENT:
            command = await self._as_script(command)
        line = f"{shell} {shlex.quote(command)}"
        if timeout_sec:
            line = f"timeout -s KILL {timeout_sec} {line}"
        if env:
            line = f"env {' '.join(shlex.quote(f'{key}={value}') for key, value in env.items())} {line}"
        if cwd:
            line = f"cd {shlex.quote(cwd)} && {line}"
        if user not in (None, "root", 0):
            # `su` without a dash keeps the folder. It knows names only.
            name = f'"$(getent passwd {user} | cut -d: -f1)"' if isinstance(user, int) else shlex.quote(str(user))
            line = f"su {name} -s /bin/bash -c {shlex.quote(line)}"
        session = str(uuid4())
        with contextlib.suppress(DaytonaConflictError):  # it exists: an earlier try did get through
            await self._sandbox.process.create_session(session)
        started = await self._sandbox.process.execute_session_command(
            session, SessionExecuteRequest(command=line, run_async=True), timeout=timeout_sec
        )
        if started.cmd_id is None:
            raise RuntimeError("the service started a command and gave it no id")
        return await self._poll_response(session, started.cmd_id)

    async def _as_script(self, command: str) -> str:
        path = f"/tmp/.rl360-{uuid4().hex}.sh"
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
            file.write(command)
            file.flush()
            await self._sdk_upload_file(file.name, path)
        return f"bash {path}; code=$?; rm -f {path}; exit $code"

    async def _poll_response(self, session_id: str, command_id: str) -> ExecResult:
        pause = _FIRST_LOOK_S
        while True:
            state = await self._get_session_command_with_retry(session_id, command_id)
            if state.exit_code is not None:
                break
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_LOOK_S)
        logs = await self._get_session_command_logs_with_retry(session_id, command_id)
        return ExecResult(stdout=logs.stdout or None, stderr=logs.stderr or None, return_code=int(state.exit_code))

    # -- files --------------------------------------------------------------------------------------------------

    async def _sdk_upload_file(self, source_path: Path | str, target_path: str) -> None:
        sandbox = self._sandbox
        if sandbox is None:
            raise RuntimeError("the sandbox is not running")
        await self._transfer("upload", lambda: sandbox.fs.upload_file(str(source_path), target_path))

    async def _sdk_download_file(self, source_path: str, target_path: Path | str) -> None:
        sandbox = self._sandbox
        if sandbox is None:
            raise RuntimeError("the sandbox is not running")
        target = Path(target_path)
        try:
            await self._transfer("download", lambda: sandbox.fs.download_file(source_path, str(target)))
        except BaseException:
            target.unlink(missing_ok=True)  # half of a file is worse than none
            raise

    async def _transfer(self, what: str, call: Any) -> None:
        try:
            async with asyncio.timeout(_TRANSFER_TIMEOUT_S):
                await patiently(what, self._account.patience_s, call)
        except TimeoutError:
            raise RuntimeError(f"file transfer failed: {what} took more than {_TRANSFER_TIMEOUT_S} s") from None
        except DaytonaError as error:
            if error.status_code in _OF_THE_SERVICE or (error.status_code or 0) >= 500:
                raise
            raise RuntimeError(f"file transfer failed: {error}") from error

    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        return await self._is(path, "-d", user)

    async def is_file(self, path: str, user: str | int | None = None) -> bool:
        return await self._is(path, "-f", user)

    async def _is(self, path: str, test: str, user: str | int | None) -> bool:
        """Asked of the sandbox's shell: the service's own answer is an error when there is nothing at the path."""
        return (await self.exec(f"test {test} {shlex.quote(path)}", user=user, timeout_sec=60)).return_code == 0
