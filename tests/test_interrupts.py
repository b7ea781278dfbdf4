"""Signals while native code runs: where their handlers get a stack, and which threads are spared."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rl360.gateway.embedded.engine import EmbeddedEngine
from rl360.models.loading import load_decoder

ROOT = Path(__file__).parent.parent

# oneDNN's kernel for transposed operands, as in a backward pass, has an address of the heap in the stack pointer for
# most of its time: without a stack of its own for the handler this ends within a second, where the processor has AVX2.
PRODUCTS = """
import signal, time, torch
from rl360.interrupts import use_a_signal_stack
from rl360.models.linear import linear
use_a_signal_stack()
torch.set_num_threads(1)
signals = 0
def count(*_):
    global signals
    signals += 1
signal.signal(signal.SIGALRM, count)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
ends = time.process_time() + 4.0
while time.process_time() < ends:
    w = torch.randn(576, 1536, requires_grad=True)
    linear(torch.randn(311, 1536, requires_grad=True), w).sum().backward()
signal.setitimer(signal.ITIMER_REAL, 0.0)
print(signals)
"""

# The size of the alternate stack of the main thread; 0: it has none. stack_t: pointer, flags (2: disabled), size.
STACK = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
stack = Stack()
assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack)) == 0
print("STACK", 0 if stack.flags & 2 else stack.size)
"""


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler=0", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_signals_in_the_middle_of_products_spoil_nothing() -> None:
    assert int(python(PRODUCTS)) > 100


@pytest.mark.parametrize(
    "begins",
    [
        "from rl360.cli import main; main(['--version'])",
        "from rl360.gateway.embedded.serve import main; main(['--model-path', '/nowhere', '--port', '1'])",
        "from rl360.engine.worker_main import main; import os, socket\n"
        "ours, theirs = socket.socketpair(); ours.close(); main([str(theirs.detach()), str(os.getppid()), 'w'])",
    ],
    ids=["command", "server", "worker"],
)
def test_handlers_of_every_process_have_a_stack_of_their_own(begins: str) -> None:
    said = python(f"{begins}\n{STACK}")
    assert int(said.rpartition("STACK")[2]) >= 8192


def deaf(thread_id: int) -> bool:
    """Whether it gets neither SIGTERM nor SIGINT."""
    (line,) = (
        s for s in Path(f"/proc/self/task/{thread_id}/status").read_text().splitlines() if s.startswith("SigBlk")
    )
    blocked = int(line.split()[1], 16)
    return all(blocked >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGINT))


def threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def test_the_engines_threads_leave_signals_to_the_main_one(tiny_llama_dir: Path) -> None:
    before = threads()
    engine = EmbeddedEngine(load_decoder(tiny_llama_dir).requires_grad_(False), None, num_threads=3)
    engine.start()
    try:
        deadline = time.monotonic() + 60.0
        while len(new := threads() - before) < 3:  # it and its pool's other two
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert all(deaf(thread_id) for thread_id in new)
    finally:
        engine.close()
    assert not deaf(threading.main_thread().native_id or 0)


POOL = """
from tests.test_interrupts import deaf, threads
from rl360.models.cpu_threads import use_cpu_threads
before = threads()
use_cpu_threads(3)
print([deaf(one) for one in threads() - before], [deaf(one) for one in before])
"""


def test_the_pool_of_the_main_thread_leaves_signals_to_it() -> None:
    pool, before = python(POOL).strip().removeprefix("[").removesuffix("]").split("] [")
    assert pool.count("True") >= 2  # the pool of OpenMP, and another one of PyTorch's
    assert "False" not in pool
    assert "True" not in before
