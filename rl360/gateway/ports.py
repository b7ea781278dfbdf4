"""A port that a server of ours can take, and take again when it is started again.

In: a host. Out: a free port outside the range that the kernel hands to outgoing connections: within it, the port of a
server that is down for a moment can be gone to one of them. Left to others: ports that a plan or a user fixed.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

FIRST_PORT, LAST_PORT = 10_000, 65_535
TRIES = 200
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """Raises OSError when none of 200 random ones is free."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different ones. Raises OSError when 200 random ones more than that are not enough."""
    low, high = _ephemeral_range()
    ports = [port for port in range(FIRST_PORT, LAST_PORT + 1) if not low <= port <= high]
    error = OSError("no port")
    found: list[int] = []
    for port in random.sample(ports, min(TRIES + count, len(ports))):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as problem:
                error = problem
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise error


def port_problem(host: str, port: int) -> str | None:
    """Why a server of ours cannot listen there, as a sentence; None: it can."""
    error = bind_error(host, port)
    return f"port {port} on {host} cannot be used: {error}" if error else None


def bind_error(host: str, port: int) -> str | None:
    """Why nothing of this machine can listen there; None: something can. A listener that just ended is no hindrance."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return 32_768, 60_999  # Linux's own default
    return (low, high) if high - low < LAST_PORT - FIRST_PORT else (LAST_PORT + 1, LAST_PORT + 1)
