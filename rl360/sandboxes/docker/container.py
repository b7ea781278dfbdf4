"""One running container: commands in it, files into and out of it, what became of it.

In: its id, a scratch folder on this host. Out: how a command ended, files. Left to others: making and removing it, and
what an end means (environment.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rl360.sandboxes.docker import archives
from rl360.sandboxes.docker.client import CALL_TIMEOUT_S, DockerError, Done, checked, docker, save

_KILL_TIMEOUT_S = 10.0
_LONGEST_ARGUMENT = 100_000  # bytes; the kernel's limit of one argument is 128 KiB
_TOKEN = "RL360_EXEC"
# In the sandbox, by the command's own user: end every process that has the command's token in its environment. Twice,
# for what a process started between the look and the kill.
_KILL = (
    'for i in 1 2; do for p in /proc/[0-9]*; do if grep -qs "{token}" "$p/environ"; then '
    'kill -9 "${{p#/proc/}}" 2>/dev/null; fi; done; done'
)


@dataclass(frozen=True)
class State:
    """As the daemon has it. A container that the daemon does not know has ended."""

    running: bool
    out_of_memory: bool = False
    exit_code: int = 1


@dataclass(frozen=True)
class Container:
    """`id`: as `docker ps --no-trunc` prints it."""

    id: str
    scratch: Path

    @staticmethod
    async def of_project(project: str, scratch: Path) -> Container:
        """The main one of a Compose project that was started. Raises DockerError when it has ended."""
        form = '{{.ID}}\t{{.Label "com.docker.compose.service"}}'
        label = f"label=com.docker.compose.project={project}"
        listed = await checked("ps", "--no-trunc", "--filter", label, "--format", form, timeout_s=CALL_TIMEOUT_S)
        found = [row.split("\t")[0] for row in listed.splitlines() if row.endswith("\tmain")]
        if not found:
            raise DockerError("the container ended as soon as it was started; does the image have `sleep`?")
        return Container(found[0], scratch)

    async def image_user_and_workdir(self) -> tuple[str, str]:
        """What its image names; an empty user is root."""
        form = "{{json .Config.User}} {{json .Config.WorkingDir}}"
        config = await checked("inspect", "--format", form, self.id, timeout_s=CALL_TIMEOUT_S)
        user, workdir = (json.loads(part) for part in config.split(maxsplit=1))
        return user, workdir or "/"

    async def state(self) -> State:
        """Raises TimeoutError when the daemon does not answer."""
        form = "{{.State.Running}} {{.State.OOMKilled}} {{.State.ExitCode}}"
        done = await docker("inspect", "--format", form, self.id, timeout_s=CALL_TIMEOUT_S)
        if done.return_code != 0:
            return State(False)
        running, out_of_memory, code = done.stdout.split()
        return State(running == "true", out_of_memory == "true", int(code))

    async def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        timeout_s: float | None = None,
    ) -> Done:
        """Run a bash program. Raises TimeoutError, when its processes inside the container have been ended too."""
        token = secrets.token_hex(8)
        who = () if user is None else ("--user", str(user))
        options = ["--env", f"{_TOKEN}={token}", *who]
        options += [part for key, value in (env or {}).items() for part in ("--env", f"{key}={value}")]
        options += ("--workdir", cwd) if cwd else ()
        if len(command.encode()) > _LONGEST_ARGUMENT:
            command = await self._as_script(command, token)
        try:
            return await docker("exec", *options, self.id, "bash", "-c", command, timeout_s=timeout_s)
        except TimeoutError:
            # The client is gone; the command inside the container is not.
            kill = _KILL.format(token=f"{_TOKEN}={token}")
            with contextlib.suppress(TimeoutError):
                await docker("exec", *who, self.id, "sh", "-c", kill, timeout_s=_KILL_TIMEOUT_S)
            raise

    async def as_root(self, command: str) -> None:
        """Run a command that has to succeed. Raises DockerError and TimeoutError."""
        done = await self.run(command, cwd="/", user="root", timeout_s=CALL_TIMEOUT_S)
        if done.return_code != 0:
            raise DockerError(f"{command}: {done.message}")

    async def _as_script(self, command: str, token: str) -> str:
        path = f"/tmp/.rl360-{token}.sh"
        async with self._archive() as archive:
            archives.pack_text(path, command, archive)
            await checked("cp", "-", f"{self.id}:/", stdin=archive)
        return f"bash {path}; code=$?; rm -f {path}; exit $code"

    # -- files: all raise DockerError, TooLarge or OSError ------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _archive(self) -> AsyncIterator[Path]:
        path = self.scratch / f"{secrets.token_hex(8)}.tar"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    async def put(self, source: Path, target: str) -> None:
        """A file as `target`, or a folder's content into `target`, owned by root."""
        async with self._archive() as archive:
            await asyncio.to_thread(archives.pack, source, target, archive)
            await checked("cp", "-", f"{self.id}:/", stdin=archive)

    async def get_file(self, source: str, target: Path) -> None:
        """A regular file; a link means the container's file."""
        async with self._archive() as archive:
            await save(archive, archives.MAX_BYTES, "cp", "--follow-link", f"{self.id}:{source}", "-")
            await asyncio.to_thread(archives.unpack_file, archive, target)

    async def get_folder(self, source: str, target: Path) -> list[str]:
        """A folder's content into `target`. Returns what was left out."""
        async with self._archive() as archive:
            await save(archive, archives.MAX_BYTES, "cp", f"{self.id}:{source}", "-")
            return await asyncio.to_thread(archives.unpack_folder, archive, target)
