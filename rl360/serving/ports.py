"""The ports of a run's servers, claimed before anything starts: for minutes nobody listens on them, and runs meet.

In: how many, and where from. Out: `Ports`, which are this process's until they are closed, or it ends, however it ends.
A claim is an abstract Unix socket with the port's number in its name: of the same network namespace as the port, and
without a file that could be left behind. Who else has bound a port (other programs) is found by trying.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rl360.errors import InfrastructureError
from rl360.gateway.ports import free_ports

PORTS_PER_SERVER = 2  # HTTP, and the rendezvous of its tensor-parallel ranks
FREE_TRIES = 20  # for ports of which no other run has thought, too


@dataclass(frozen=True, slots=True)
class Ports:
    pairs: Sequence[tuple[int, int]]  # (HTTP, rendezvous) of each server
    claims: Sequence[socket.socket]

    def close(self) -> None:
        for claim in self.claims:
            claim.close()


def claim_ports(num_servers: int, base_port: int, host: str = "127.0.0.1") -> Ports:
    """Neighbours from `base_port` on, or for 0 free ones that no outgoing connection is given meanwhile.

    Raises `InfrastructureError` `engine_start` naming a port that is taken, or claimed by another run.
    """
    count = PORTS_PER_SERVER * num_servers
    for _ in range(FREE_TRIES):
        try:
            flat = list(range(base_port, base_port + count)) if base_port else free_ports(count, host)
        except OSError as error:
            raise InfrastructureError("engine_start", f"no port can be had on {host}: {error}") from None
        claims: list[socket.socket] = []
        try:
            for port in flat:
                claims.append(_claim(port))
                _try(port, host)
        except OSError as error:
            Ports((), claims).close()
            if base_port:
                problem = f"port {port} of rollout.sglang.base_port {base_port} cannot be used on {host}: {error}"
                raise InfrastructureError("engine_start", problem) from None
            continue
        return Ports(list(zip(flat[::2], flat[1::2], strict=True)), claims)
    raise InfrastructureError("engine_start", f"no {count} free ports found on {host}; give rollout.sglang.base_port")


def _claim(port: int) -> socket.socket:
    claim = socket.socket(socket.AF_UNIX)
    name = f"\0rl360-port-{port}"
    try:
        claim.bind(name)
        claim.listen(1)
    except OSError:
        claim.close()
        raise OSError(f"another run has it{_holder(name)}") from None
    return claim


def _holder(name: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(1.0)
        asking.connect(name)
        pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return f", process {pid}"
    return ""


def _try(port: int, host: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
