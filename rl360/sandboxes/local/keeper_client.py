"""The worker's end of its keeper process.

In: requests to start, kill and remove sandboxes. Out: a future for each sandbox that is set when it is gone. Left to
others: what the keeper does (keeper.py), one sandbox's life (namespace.py).
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from rl360.sandboxes.local import cgroups, cleanup
from rl360.sandboxes.local.keeper import MAX_MESSAGE


class Keeper:
    """The worker's end of its keeper process. One per worker and state folder; `close` removes all it owns."""

    def __init__(self, state_dir: Path, run_id: str, hierarchy: cgroups.Hierarchy):
        state_dir.mkdir(parents=True, exist_ok=True)
        self.swept = cleanup.sweep(state_dir)
        self.owner = cleanup.register(state_dir, run_id, sorted(set(hierarchy.parents.values())))
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
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"the sandbox's environment and mounts take {len(data)} bytes; at most {MAX_MESSAGE}")
        socket.send_fds(self._control, [data], fds)

    def watch(self, name: str) -> asyncio.Future[dict[str, Any]]:
        """A future that is set when the keeper has removed the sandbox."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._control)
            self._loop = loop
            loop.add_reader(self._control, self._read_events)
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
                for future in self._gone.values():
                    if not future.done():
                        future.set_result(
                            {"status": None, "exhausted": "", "oom_kills": 0, "outer_oom_kills": 0, "left": True}
                        )
                self._gone.clear()
                return
            event = json.loads(data)
            if event["id"] in self._gone:
                future = self._gone.pop(event["id"])
                if not future.done():
                    future.set_result(event)

    def close(self, timeout_s: float = 10.0) -> None:
        """End every sandbox, remove the owner folder and wait for the keeper."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        self._control.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
