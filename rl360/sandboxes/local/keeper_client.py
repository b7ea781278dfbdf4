"""The worker's end of its keeper process.

In: requests to start, kill and remove sandboxes. Out: a future for each sandbox that is set when it is gone. Left to
others: what the keeper does (keeper.py), one sandbox's life (namespace.py).
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

from rl360.sandboxes.local import cgroups, cleanup
from rl360.sandboxes.local.keeper import MAX_MESSAGE

_RETRY_S = 0.02
_LATER = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)  # the keeper has not read what it was sent yet


class Keeper:
    """The worker's end of its keeper process. One per worker and state folder; `close` removes all it owns."""

    def __init__(self, state_dir: Path, run_id: str, hierarchy: cgroups.Hierarchy):
        state_dir.mkdir(parents=True, exist_ok=True)
        self.swept = cleanup.sweep(state_dir)
        self._cgroup_parents = sorted(set(hierarchy.parents.values()))
        self.owner = cleanup.register(state_dir, run_id, self._cgroup_parents)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package_root = str(Path(__file__).resolve().parents[3])
        code = (
            f"import sys; sys.path.insert(0, {package_root!r}); from rl360.sandboxes.local.keeper import main; "
            f"main({theirs.fileno()}, {str(self.owner.folder)!r})"
        )
        with theirs, open(self.owner.folder / "keeper.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._control.setblocking(False)
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._gone: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._count = 0

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def next_name(self) -> str:
        self._count += 1
        return f"{self.owner.name}.{self._count}"

    def request(self, message: dict[str, Any], fds: list[int]) -> None:
        """Tell the keeper, in order. While it is behind (a hundred sandboxes started at once, on few cores) messages
        wait here, with copies of their descriptors. Call it inside the event loop."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"the sandbox's environment and mounts take {len(data)} bytes; at most {MAX_MESSAGE}")
        if self._unsent or not self._sent(data, fds):
            self._unsent.append((data, [os.dup(fd) for fd in fds]))
            if len(self._unsent) == 1:
                self._send_later()

    def _sent(self, data: bytes, fds: list[int]) -> bool:
        try:
            socket.send_fds(self._control, [data], fds)
        except OSError as error:
            if error.errno in _LATER:
                return False
            raise
        return True

    def _send_more(self) -> None:
        try:
            while self._unsent and self._sent(*self._unsent[0]):
                _close_all(self._unsent.popleft()[1])
        except OSError:  # the keeper is gone: whoever waits for a sandbox is told by `_read_events`
            self._drop_unsent()
        if self._unsent:
            self._send_later()

    def _send_later(self) -> None:
        (self._loop or asyncio.get_running_loop()).call_later(_RETRY_S, self._send_more)

    def _drop_unsent(self) -> None:
        while self._unsent:
            _close_all(self._unsent.popleft()[1])

    def watch(self, name: str) -> asyncio.Future[dict[str, Any]]:
        """A future that is set when the keeper has removed the sandbox."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._control)
            self._loop = loop
            loop.add_reader(self._control, self._read_events)
            if self._unsent:
                self._send_later()
        return self._gone.setdefault(name, loop.create_future())

    def _read_events(self) -> None:
        while True:
            try:
                data = self._control.recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                if self._loop is not None:
                    self._loop.remove_reader(self._control)
                    # It was killed. Its sandboxes ended with it, and nobody else removes their control groups.
                    self._loop.run_in_executor(None, cleanup.end, self.owner.folder, self._cgroup_parents)
                for future in self._gone.values():
                    if not future.done():
                        future.set_result(
                            {
                                "status": None,
                                "exhausted": "",
                                "oom_kills": 0,
                                "outer_oom_kills": 0,
                                "signalled": False,
                                "killed_first": False,
                                "left": True,
                            }
                        )
                self._gone.clear()
                return
            event = json.loads(data)
            if event["id"] in self._gone:
                future = self._gone.pop(event["id"])
                if not future.done():
                    future.set_result(event)

    def close(self, timeout_s: float = 10.0) -> None:
        """End every sandbox, remove the owner folder and wait for the keeper. Also after it was killed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        self._drop_unsent()
        self._control.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.owner.folder.exists():  # the keeper was killed
            cleanup.end(self.owner.folder, self._cgroup_parents)
            shutil.rmtree(self.owner.folder, ignore_errors=True)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
