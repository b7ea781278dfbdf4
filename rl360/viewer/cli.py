"""`rl360 view RUN`: serves a run's pages on this machine until it is stopped.

In: arguments. Out: an exit code. Raises RL360Error for what is wrong with them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rl360.errors import RL360Error

RUN_FILES = ("resolved.yaml", "trajectories", "ledger.jsonl", "metrics.jsonl")
_LAST_PORT = 2**16 - 1


def view(arguments: Sequence[str]) -> int:
    """`rl360 view RUN`: look at a run's iterations, groups, attempts and tokens in a browser."""
    parser = argparse.ArgumentParser(prog="rl360 view", description=view.__doc__)
    parser.add_argument("run", type=Path, help="a run folder, finished or running")
    parser.add_argument("--port", type=_port, default=0, help="0: a free one (default)")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, reached from this machine only")
    parsed = parser.parse_args(arguments)
    if not parsed.run.is_dir():
        raise RL360Error(f"view {parsed.run}: no such folder")
    if not any((parsed.run / name).exists() for name in RUN_FILES):
        raise RL360Error(f"view {parsed.run}: not a run folder; expected one of {', '.join(RUN_FILES)} in it")
    from rl360.viewer.server import is_loopback, serve

    if not is_loopback(parsed.host):
        print(f"warning: whoever reaches {parsed.host} can read this run; there is no password", file=sys.stderr)
    try:
        serve(parsed.run, parsed.host, parsed.port, lambda address: print(f"{address}  (stop: Ctrl-C)", flush=True))
    except OSError as error:
        raise RL360Error(f"view: cannot listen on {parsed.host} port {parsed.port} ({error.strerror})") from error
    return 0


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= _LAST_PORT):
        raise argparse.ArgumentTypeError(f"{text}; expected a number from 0 to {_LAST_PORT}")
    return int(text)
