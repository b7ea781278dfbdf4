"""Whose doing an end is, where the keeper is asked to end what is ending already."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rl360.sandboxes.local import keeper, syscalls
from rl360.sandboxes.local.keeper import _EXITING, _SIGNALLED, _ends, _kill, _Sandbox

# Its first thread is gone and another one lives: it is ending, and its parent cannot wait for it yet.
AT_IT = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("up", flush=True)
ctypes.CDLL(None).syscall(60 if sys.argv[1] == "x86_64" else 93, 0)  # exit, of this thread alone
"""


def until(condition):
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def ending():
    process = subprocess.Popen([sys.executable, "-c", AT_IT, os.uname().machine], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    until(lambda: _ends(process.pid, _EXITING))
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_what_is_ending_already_was_not_ended_by_the_keeper(ending):
    """Its files are closed, which the worker has seen and asks for its end; it was killed from outside all the same."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    sandbox = _Sandbox(ending.pid, [], None, None, read_end)
    _kill(sandbox)
    assert (sandbox.asked, sandbox.signalled, sandbox.killed_first) == (False, False, False)
    assert ending.poll() is None
    os.close(read_end)
    os.close(write_end)


# As bubblewrap and its first process are: the one waits for the end of a pipe, the other dies with it.
DIES_WITH_ITS_PARENT = """
import ctypes, json, os, signal, sys
child = os.fork()
if child == 0:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.write(1, (json.dumps({"child-pid": os.getpid()}) + "\\n").encode())
    signal.pause()
sys.stdin.read()
os._exit(0)
"""


def test_what_dies_because_bubblewrap_ends_was_not_killed_from_outside(monkeypatch):
    """The worker asks for the end and closes its pipes: bubblewrap may end by itself between any two looks of ours."""
    syscalls.become_subreaper()
    info, write_end = os.pipe2(os.O_NONBLOCK)
    outer = subprocess.Popen([sys.executable, "-c", DIES_WITH_ITS_PARENT], stdin=subprocess.PIPE, stdout=write_end)
    os.close(write_end)
    sandbox = _Sandbox(outer.pid, [], None, None, info)
    until(lambda: keeper._first_inside(sandbox))

    def then_it_ends(pid: int, how: int) -> bool:
        seen = _ends(pid, how)
        outer.stdin.close()
        until(lambda: _ends(outer.pid, _EXITING) and _ends(sandbox.first, _EXITING | _SIGNALLED))
        return seen

    monkeypatch.setattr(keeper, "_ends", then_it_ends)
    _kill(sandbox)
    assert (sandbox.asked, sandbox.signalled, sandbox.killed_first) == (False, False, False)
    assert outer.wait() == 0
    os.waitpid(sandbox.first, 0)
    os.close(info)


@pytest.mark.parametrize(("number", "signalled"), [(signal.SIGKILL, True), (None, False)])
def test_how_a_process_ends(number, signalled):
    process = subprocess.Popen(["sleep", "60" if number else "0.05"])
    assert not _ends(process.pid, _EXITING) or number is None
    if number:
        process.send_signal(number)
    until(lambda: _ends(process.pid, _EXITING))  # a zombie
    assert _ends(process.pid, _EXITING | _SIGNALLED) is signalled
    process.wait()
    assert not _ends(process.pid, _EXITING)
    assert not _ends(0, _EXITING)
