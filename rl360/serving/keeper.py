"""`python -m rl360.serving.keeper GRACE_S [KEY_FILE] -- COMMAND...`: runs one server, and ends it with all it started.

In: a pipe on standard input that the driver holds open. Out: the server's own output, its exit code. The server ends
when the pipe closes (the driver asked, or died, however it died), on SIGTERM, or by itself; its process group gets
SIGTERM, GRACE_S seconds, then SIGKILL, and so does whatever left the group: the keeper is the reaper of its orphans.
If the keeper is killed, the kernel kills the server, and the server's ranks see their parent go.

With a key file the output passes through the keeper, which takes the key out of it (SGLang logs all its settings), and
the file does not outlive the server.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rl360.serving.secrets import Redactor, read_key_file, remove_key_file

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
REAP_S = 5.0  # for SIGKILL to take effect; longer is an uninterruptible sleep
POLL_S = 0.05
DRAIN_S = 2.0  # for what is left in the pipe when every writer is gone
PIECE_BYTES = 2**16


def main(arguments: Sequence[str]) -> int:
    dashes = list(arguments).index("--")
    grace_s, *files = arguments[:dashes]
    key_file = Path(files[0]) if files else None
    try:
        return _keep(arguments[dashes + 1 :], float(grace_s), read_key_file(key_file) if key_file else None)
    finally:
        if key_file:
            remove_key_file(key_file)


def _keep(command: Sequence[str], grace_s: float, key: str | None) -> int:
    """Until it has ended; its exit code."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(wake_write, b"x"))

    def die_with_keeper() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if key else None,
        stderr=subprocess.STDOUT if key else None,
        start_new_session=True,
        preexec_fn=die_with_keeper,
        close_fds=True,
    )
    pump = None
    if key:
        assert server.stdout is not None
        pump = threading.Thread(target=_pump, args=(server.stdout.fileno(), Redactor(key)), name="output", daemon=True)
        pump.start()
    poll = select.poll()
    for descriptor in (sys.stdin.fileno(), wake_read):
        poll.register(descriptor, select.POLLIN)
    try:
        poll.register(os.pidfd_open(server.pid), select.POLLIN)
        wait_ms = None
    except OSError:  # no pidfd here: look now and then
        wait_ms = int(POLL_S * 1000)
    while server.poll() is None:
        ready = {descriptor for descriptor, _ in poll.poll(wait_ms)}
        if ready & {sys.stdin.fileno(), wake_read}:
            _end(server, grace_s)
            break
    _kill_rest(server.pid)
    code = server.wait()
    if pump is not None:
        pump.join(DRAIN_S)
    return code if code >= 0 else 128 - code


def _pump(source: int, redactor: Redactor) -> None:
    """What comes from `source`, without the key, to this process's output. A log that cannot be written stops nobody:
    a server whose pipe is full would stand still."""
    while piece := os.read(source, PIECE_BYTES):
        _write(redactor.feed(piece))
    _write(redactor.rest())


def _write(data: bytes) -> None:
    with suppress(OSError):
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]


def _end(server: subprocess.Popen[bytes], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(grace_s / 3)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, signal.SIGTERM)
    while time.monotonic() < deadline and (server.poll() is None or _others(server.pid)):
        time.sleep(POLL_S)


def _kill_rest(group: int) -> None:
    """SIGKILL to the group and to every child that is left, orphans among them."""
    deadline = time.monotonic() + REAP_S
    while time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        children = _children()
        if not children:
            return
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if not _others(group) and children == [group]:
            return
        time.sleep(0.01)


def _others(server: int) -> list[int]:
    """Children beside the server, its orphans; those that have ended are waited for and not among them."""
    left = []
    for child in _children():
        if child != server:
            with suppress(ChildProcessError):
                if os.waitpid(child, os.WNOHANG) == (0, 0):
                    left.append(child)
    return left


def _children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
