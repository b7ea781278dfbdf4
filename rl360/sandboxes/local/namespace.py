"""One running sandbox as its trial worker sees it: start, run commands, end. No host fork per command.

In: a `Plan` (root file system, limits, network) and commands. Out: return codes, output, and a descriptor of the
sandbox's root folder. Left to others: starting processes and mounts (keeper.py), moving files (transfer.py), Harbor's
meaning of all this (environment.py).

A sandbox is one bubblewrap process whose command is a bash that reads lines: `x <n>` runs the script `.rl360/<n>.sh` as
a process group of its own, `k <pgid>` kills one, `K` kills everything but itself. It answers `p <n> <pgid>` and
`x <n> <return code>`. Scripts and output are files on a small tmpfs that only this bash and the worker use.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import secrets
import shlex
import socket
from dataclasses import dataclass
from typing import Any

from rl360.sandboxes.local import cgroups, syscalls
from rl360.sandboxes.local.artifacts import Disk
from rl360.sandboxes.local.keeper import CONTROL_DIR, MAX_MESSAGE
from rl360.sandboxes.local.keeper_client import Keeper
from rl360.sandboxes.local.plan import Plan, User, spec_of

MAX_OUTPUT = 16 * 2**20  # bytes kept of each stream of one command
_MAX_ARGUMENT = 100_000  # bytes; the kernel's limit of one argument is 128 KiB
_FIRST_ANSWER_S = 30.0
_LAST_WORD_S = 15.0  # of the keeper, once a sandbox is to end
_ANSWER_BYTES, _SPARE_BYTES = 64, 4096  # a command is answered in two lines of at most 32 bytes


# Errors of a sandbox's own file system that something inside can bring about: what stands in the way, what is full.
# Others (no descriptors, no memory, no disk that answers) are the host's.
DONE_INSIDE = frozenset(
    (
        errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EACCES, errno.EPERM,
        errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO,
        errno.EBUSY, errno.ETXTBSY, errno.EROFS, errno.EXDEV,
    )
)  # fmt: skip


class SandboxDied(RuntimeError):
    """The sandbox ended while it was in use. `exhausted` names the limit that it ran into, if one is known."""

    def __init__(self, message: str, exhausted: str = ""):
        super().__init__(message)
        self.exhausted = exhausted


@dataclass(frozen=True)
class Completed:
    return_code: int
    stdout: str
    stderr: str


class SandboxProcess:
    """A started sandbox. Use `start`, then `run`, then `stop`, all from one event loop."""

    def __init__(self, keeper: Keeper, plan: Plan):
        self._keeper = keeper
        self.plan = plan
        self.name = keeper.next_name()
        self.exhausted = ""  # what it ran into: memory | disk | lifetime; sandbox: it ended itself; "": nothing known
        self.interrupted = ""  # what ended it, or a process in it, from outside: what came of it means nothing
        self.root_fd = -1
        self._tree_fds: dict[str, int] = {}  # of the other trees, once it was halted
        self._control_fd = -1
        self._stdin = self._stdout = self._stderr = -1
        self._buffer = b""
        self._count = 0
        self._answered = 0  # bytes that came back
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self._groups: dict[str, str] = {}  # command -> process group, as soon as it is known
        self._killed: set[str] = set()  # commands to kill as soon as their group is known
        self._ready: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[dict[str, Any]] | None = None
        self._lost_by_itself = False
        self._oom_kills = 0.0  # of the kernel, by its own limit, when it last answered
        self._asked = self._halted = self._stopped = False

    @property
    def running(self) -> bool:
        return self._stdout >= 0

    async def start(self) -> None:
        """Raises OSError (mounts, control groups) or SandboxDied (bubblewrap or bash failed)."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin_r, self._stdin = os.pipe2(os.O_CLOEXEC)
        self._stdout, stdout_w = os.pipe2(os.O_CLOEXEC)
        self._stderr, stderr_w = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                self._ended = self._keeper.watch(self.name)
                owner = self._keeper.owner
                spec = spec_of(self.plan, owner.folder, str(owner.mount_point), self.name)
                message = {"op": "start", "id": self.name, "spec": spec}
                self._keeper.request(message, [stdin_r, stdout_w, stderr_w, theirs.fileno()])
            finally:
                theirs.close()
                for fd in (stdin_r, stdout_w, stderr_w):
                    os.close(fd)
            ours.setblocking(False)
            await _readable(loop, ours.fileno())
            data, fds = syscalls.receive(ours, MAX_MESSAGE, 1)
            if not fds:
                text = json.loads(data)["error"] if data else "the keeper process ended"
                raise OSError(f"sandbox did not start: {text}")
            self.root_fd = fds[0]
        except BaseException:
            await self.stop()
            raise
        finally:
            ours.close()
        for fd in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(fd, False)
        self._ready = loop.create_future()
        loop.add_reader(self._stdout, self._read)
        try:
            async with asyncio.timeout(_FIRST_ANSWER_S):
                await self._ready
        except BaseException:
            await self.stop()
            raise
        self._control_fd = syscalls.open_in_root(self.root_fd, CONTROL_DIR, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)

    def _read(self) -> None:
        try:
            data = os.read(self._stdout, 65536)
        except BlockingIOError:
            return
        if not data:
            self._lost()
            return
        self._answered += len(data)
        if self._answered > _SPARE_BYTES + _ANSWER_BYTES * self._count:
            self._lost("something inside writes to the control channel")
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._handle(line.decode("ascii", "replace").split(" "))

    def _handle(self, words: list[str]) -> None:
        match words:
            case ["ready"]:
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(None)
            case ["p", name, group]:
                self._groups[name] = group
                if name in self._killed:
                    self._killed.discard(name)
                    self._send(f"k {group}\n")
            case ["x" | "K", name, code]:
                self._groups.pop(name, None)
                self._killed.discard(name)
                future = self._waiting.pop(name, None)
                if future is not None and not future.done():
                    future.set_result(int(code) if code.isdigit() else 255)

    def _lost(self, text: str = "") -> None:
        """Its control pipe closed, because bash or bubblewrap ended, or can no longer be trusted to answer."""
        asyncio.get_running_loop().remove_reader(self._stdout)
        os.close(self._stdout)
        self._stdout = -1
        if text:
            self.exhausted = self.exhausted or "sandbox"
        else:
            self._lost_by_itself = self._ready is not None and self._ready.done()
            with contextlib.suppress(OSError):
                text = os.read(self._stderr, 4000).decode(errors="replace").strip()
        error = SandboxDied(f"the sandbox ended{': ' + text if text else ''}", self.exhausted)
        for future in [self._ready, *self._waiting.values()]:
            if future is not None and not future.done():
                future.set_exception(error)
        self._waiting.clear()

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it ended: the reader says so to everyone who waits
            os.write(self._stdin, line.encode())

    async def run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: User | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        """Run a bash command. Raises TimeoutError after killing its process group, or SandboxDied."""
        if not self.running:
            raise SandboxDied("the sandbox is not running", self.exhausted)
        self._count += 1
        name = secrets.token_hex(8)  # nothing inside can be there before
        try:
            try:
                self._write_script(name, command, cwd, env, user)
            except OSError as error:
                if error.errno not in DONE_INSIDE:
                    raise
                self.exhausted = self.exhausted or "sandbox"
                raise SandboxDied(
                    f"something inside spoiled /{CONTROL_DIR}: {error.strerror}", self.exhausted
                ) from error
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._waiting[name] = future
            self._send(f"x {name}\n")
            try:
                async with asyncio.timeout(timeout_s):
                    code = await future
                self._oom_kills = self._own_oom_kills()
            except (TimeoutError, asyncio.CancelledError):
                self._kill_command(name)
                raise
            return Completed(code, self._take(f"{name}.out"), self._take(f"{name}.err"))
        finally:
            self._waiting.pop(name, None)
            for suffix in ("sh", "cmd", "out", "err"):
                with contextlib.suppress(OSError):
                    os.unlink(f"{name}.{suffix}", dir_fd=self._control_fd)

    def _own_oom_kills(self) -> float:
        """inf: it has ended since it answered, which nobody saw while this worker stood still."""
        parent = self.plan.hierarchy.parents.get("memory")
        if parent is None:
            return 0
        group = os.path.join(parent, cgroups.PREFIX + self.name)
        kills = cgroups.oom_kills([group])[0]
        return kills if os.path.exists(group) else math.inf

    def _kill_command(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is None:
            self._killed.add(name)
        else:
            self._send(f"k {group}\n")

    def _write_script(
        self, name: str, command: str, cwd: str | None, env: dict[str, str] | None, user: User | None
    ) -> None:
        lines = [f"cd {shlex.quote(cwd or self.plan.workdir)} || exit 1"]
        for key, value in (env or {}).items():
            if not key.replace("_", "a").isalnum() or key[0].isdigit():
                raise ValueError(f"{key!r} is not a name of an environment variable")
            lines.append(f"export {key}={shlex.quote(value)}")
        prefix = ""
        if user is not None and user.uid != 0:
            if self.plan.userns:
                raise ValueError(f"user {user.uid}: an unprivileged sandbox has one user, root")
            groups = f"--groups {','.join(map(str, user.groups))}" if user.groups else "--clear-groups"
            prefix = (
                f"setpriv --reuid {user.uid} --regid {user.gid} {groups} "
                "--inh-caps=-all --ambient-caps=-all --bounding-set=-all -- "
            )
        if len(_bytes(command)) < _MAX_ARGUMENT:
            lines.append(f"exec {prefix}/bin/bash -c {shlex.quote(command)}")
        else:
            self._write(f"{name}.cmd", _bytes(command), 0o644)
            lines.append(f"exec 9</{CONTROL_DIR}/{name}.cmd; exec {prefix}/bin/bash /dev/fd/9")
        self._write(f"{name}.sh", _bytes("\n".join(lines) + "\n"), 0o600)

    def _write(self, name: str, data: bytes, mode: int) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=self._control_fd)
        with open(fd, "wb", closefd=True) as file:
            file.write(data)

    def _take(self, name: str) -> str:
        """The beginning of an output file. A file that the sandbox replaced by a link or a pipe reads as empty."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with open(os.open(name, flags, dir_fd=self._control_fd), "rb", closefd=True) as file:
                return file.read(MAX_OUTPUT).decode(errors="replace")
        except OSError as error:
            syscalls.raise_hosts(error)
            return ""

    async def kill_all(self, timeout_s: float = 10.0) -> None:
        """Kill every process inside but the control shell. Commands that were running raise SandboxDied."""
        if not self.running:
            raise SandboxDied("the sandbox is not running", self.exhausted)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        running = [self._waiting.pop(name) for name in list(self._waiting)]
        self._waiting["0"] = future
        self._send("K\n")
        try:
            async with asyncio.timeout(timeout_s):
                await future
        finally:
            self._waiting.pop("0", None)
        for other in running:
            if not other.done():
                other.set_exception(SandboxDied("killed with every other process of the sandbox"))
        self._groups.clear()

    def free_disk_bytes(self) -> int | None:
        """What the sandbox may still write; None when nothing limits it."""
        if not self.plan.disk_mib or self.root_fd < 0:
            return None
        with contextlib.suppress(OSError):
            stat = os.fstatvfs(self.root_fd)
            return stat.f_bavail * stat.f_bsize
        return None

    async def halt(self) -> Disk:
        """End every process inside, from outside, and keep the disk for reading until `stop`.

        Works on a sandbox that ended by itself too. Raises SandboxDied when some process cannot be ended, and where
        something outside ended the sandbox or a process in it before.
        """
        if self.root_fd < 0:
            raise SandboxDied("the sandbox is not running", self.exhausted)
        disk = self.disk()  # before: no mount is reachable by name once the namespace is gone
        event = await self._end(keep=True)
        if event is None or event["left"]:
            raise SandboxDied("the sandbox has processes that cannot be killed", self.exhausted)
        if self.interrupted:
            raise SandboxDied(f"the sandbox was interrupted: {self.interrupted}", self.exhausted)
        return disk

    def disk(self) -> Disk:
        """Its file system, by descriptors that live until `stop`."""
        for name, _ in self.plan.trees:
            if name and name not in self._tree_fds:
                self._tree_fds[name] = syscalls.open_in_root(self.root_fd, name, os.O_PATH | os.O_DIRECTORY)
        return Disk({"": self.root_fd, **self._tree_fds})

    async def stop(self) -> None:
        """End it and wait until its processes and control groups are gone. Again after a wait that was cancelled."""
        if not self._stopped:
            self._stopped = True
            for fd in (self.root_fd, *self._tree_fds.values()):
                if fd >= 0:
                    os.close(fd)
            self.root_fd = -1
            self._tree_fds.clear()
            if self._halted:
                self._request({"op": "remove", "folder": self.name.rpartition(".")[2]})
        await self._end(keep=False)

    def _request(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the keeper is gone, and what it owned with it
            self._keeper.request(message, [])

    async def _end(self, keep: bool) -> dict[str, Any] | None:
        """Kill it and wait for the keeper's word. None: it did not come in time."""
        event = None
        if not self._asked:
            self._asked, self._halted = True, keep
            loop = asyncio.get_running_loop()
            if self._stdout >= 0:
                loop.remove_reader(self._stdout)
            self._request({"op": "kill", "id": self.name, "keep": keep})
            for fd in (self._stdin, self._stdout, self._stderr, self._control_fd):
                if fd >= 0:
                    os.close(fd)
            self._stdin = self._stdout = self._stderr = self._control_fd = -1
        if self._ended is not None and self._ready is not None:
            with contextlib.suppress(TimeoutError):
                event = await asyncio.wait_for(asyncio.shield(self._ended), _LAST_WORD_S)
                self._note(event)
            if event is None:
                self.interrupted = "it ended, and its keeper does not say why"
        error = SandboxDied("the sandbox was stopped", self.exhausted)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
        return event

    def _note(self, event: dict[str, Any]) -> None:
        """Why it ended. An exit code, and not a signal from outside, after `ready` is the doing of something inside."""
        outside = _interruption(event)
        # It outlived what it had run into before its last answer: that is not what ended it.
        limit = event["exhausted"] or ("memory" if event["oom_kills"] > (self._oom_kills if outside else 0) else "")
        outside = "" if limit else outside
        self.exhausted = limit or self.exhausted or ("sandbox" if self._lost_by_itself and not outside else "")
        self.interrupted = "" if self.exhausted else outside


def _interruption(event: dict[str, Any]) -> str:
    """Nothing inside can signal bubblewrap's own process or kill the first one, and no limit was reached."""
    if event["outer_oom_kills"]:
        return "the machine ran out of memory, and the kernel ended a process of it"
    if event["status"] is None:
        return "the process that kept it ended"
    if event["status"] < 0 and not event["signalled"]:
        return f"signal {-event['status']} from outside"
    if event["killed_first"]:
        return "its first process was killed from outside"
    return ""


def _bytes(text: str) -> bytes:
    """Of any text: a model can write half of a surrogate pair, which is no UTF-8. The shell gets it as it is."""
    return text.encode("utf-8", "surrogatepass")


async def _readable(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    event = asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        async with asyncio.timeout(_FIRST_ANSWER_S):
            await event.wait()
    finally:
        loop.remove_reader(fd)
