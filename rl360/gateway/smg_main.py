"""`python -m rl360.gateway.smg_main <arguments of smg launch>`: SMG, with its key from standard input.

In: one line, the key (empty: none), which so stands in no process list, environment or log. Out: SMG's exit code. It
dies with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    key = sys.stdin.readline().strip()
    if os.getppid() != parent:
        return  # it died before the kernel knew whom to tell
    from smg.cli import main as smg

    smg(["launch", *sys.argv[1:], *([f"--api-key={key}"] if key else [])])


if __name__ == "__main__":
    main()
