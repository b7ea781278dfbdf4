"""How a server is told to end: itself first, then what it leaves, then by force."""

import subprocess
import sys
import time

# Ends its child itself, and says so when the child goes by itself.
PARENT = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print('child', flush=True); time.sleep(60)"])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
while not asked and child.poll() is None:
    time.sleep(0.01)
time.sleep(0.3)
print("the child went by itself" if child.poll() is not None else "in order", flush=True)
child.kill()
"""
# Goes at once and leaves a child that has something to finish.
LEAVES = """
sh -c 'trap "sleep 0.3; echo finished; exit" TERM; echo child; while :; do sleep 0.05; done' &
wait
"""
DEAF = 'trap "" TERM; echo child; sleep 60'


def end(command, grace_s):
    """What it says once it is told to end, its exit code, and the seconds it takes."""
    keeper = subprocess.Popen(
        [sys.executable, "-m", "rl360.serving.keeper", str(grace_s), "--", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "child\n"
    began = time.monotonic()
    said, _ = keeper.communicate(timeout=60)  # closes the pipe
    return said, keeper.returncode, time.monotonic() - began


def test_a_server_ends_its_own_processes():
    """SGLang takes a scheduler that ends beside it for a crash, and looks into that for over 5 s."""
    assert end([sys.executable, "-c", PARENT], 30.0)[:2] == ("in order\n", 0)


def test_what_a_server_leaves_may_finish_too():
    said, _, took_s = end(["sh", "-c", LEAVES], 30.0)
    assert said == "finished\n"
    assert took_s < 25.0  # nothing is waited for that is gone


def test_one_that_is_deaf_is_ended_by_force():
    said, code, took_s = end(["sh", "-c", DEAF], 1.5)
    assert (said, code) == ("", 128 + 9)
    assert took_s >= 1.5
