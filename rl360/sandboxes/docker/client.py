"""The docker command, run without a terminal and without leaving it behind.

In: arguments. Out: exit status and output, or a file on this host. Left to others: what the arguments mean.

The client program is used and not the daemon's socket, so that contexts, DOCKER_HOST over ssh and TLS work as they do
for the user. Output is bounded: a command in a container may print for ever. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# Of each stream of one command. What comes after is read and dropped, so that the command ends as it would have.
MAX_OUTPUT_BYTES = 16 * 2**20
_CHUNK = 2**18
CALL_TIMEOUT_S = 60.0  # of a docker command that only asks or starts something
# How a daemon's message ends, as the system words it, when its machine is at its end and not a path in a container.
_AT_ITS_END = (
    "too many open files", "too many open files in system", "cannot allocate memory", "no space left on device",
    "resource temporarily unavailable", "input/output error", "unexpected eof", "connection reset by peer",
    "broken pipe", "context deadline exceeded", "context canceled",
)  # fmt: skip
_NO_DAEMON = ("cannot connect to the docker daemon", "error during connect")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    return_code: int
    stdout: str
    stderr: str

    @property
    def message(self) -> str:
        """The last line of what it said, for error messages."""
        lines = [line for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit status {self.return_code}"


class DockerError(RuntimeError):
    """The docker command failed; the message ends with what it said."""


class DaemonError(DockerError):
    """A read failed of what is the daemon's, such as its descriptors: it says nothing of what a container holds."""


class TooLarge(RuntimeError):
    """A container sent more than it may."""


async def docker(
    *arguments: str,
    stdin: Path | None = None,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Done:
    """Run `docker ARGUMENTS`; `env` in place of this process's environment.

    Raises TimeoutError and FileNotFoundError (no such program), never on a bad status.
    """
    with contextlib.ExitStack() as stack:
        feed = stack.enter_context(stdin.open("rb")) if stdin is not None else subprocess.DEVNULL
        async with asyncio.timeout(timeout_s), _running(*arguments, stdin=feed, env=env) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            out, err = await asyncio.gather(_read(process.stdout), _read(process.stderr))
            code = await process.wait()
    return Done(code, out.decode(errors="replace"), err.decode(errors="replace"))


async def checked(*arguments: str, stdin: Path | None = None, timeout_s: float | None = None) -> str:
    """As `docker`, but returns stdout. Raises DockerError too."""
    done = await docker(*arguments, stdin=stdin, timeout_s=timeout_s)
    if done.return_code != 0:
        raise DockerError(f"docker {arguments[0]}: {done.message}")
    return done.stdout


async def save(target: Path, limit_bytes: int, *arguments: str, timeout_s: float | None = None) -> None:
    """Run `docker ARGUMENTS` with its output in a file. Raises DockerError, DaemonError, TooLarge and TimeoutError."""
    with target.open("wb") as file:
        async with asyncio.timeout(timeout_s), _running(*arguments) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            errors = asyncio.create_task(_read(process.stderr))
            size = 0
            while chunk := await process.stdout.read(_CHUNK):
                size += len(chunk)
                if size > limit_bytes:
                    errors.cancel()
                    raise TooLarge(f"more than {limit_bytes // 2**20} MiB")
                file.write(chunk)
            said = (await errors).decode(errors="replace")
            if await process.wait() != 0:
                message = Done(1, "", said).message
                kind = DaemonError if _is_daemons(message) else DockerError
                raise kind(f"docker {arguments[0]}: {message}")


def _is_daemons(message: str) -> bool:
    """By its end: a name in the middle of it can be an agent's."""
    plain = message.lower()
    return plain.endswith(_AT_ITS_END) or plain.startswith(_NO_DAEMON)


@contextlib.asynccontextmanager
async def _running(
    *arguments: str, stdin: IO[bytes] | int = subprocess.DEVNULL, env: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        "docker",
        *arguments,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _read(stream: asyncio.StreamReader) -> bytes:
    kept = bytearray()
    while chunk := await stream.read(_CHUNK):
        kept += chunk[: MAX_OUTPUT_BYTES - len(kept)]
    return bytes(kept)
