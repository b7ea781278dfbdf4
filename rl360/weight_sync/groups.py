"""Process groups over processes that share no default group: one trainer rank and the ranks of engines.

In: an address, a size and a rank. Out: a group that `torch.distributed.broadcast` takes. The same steps as SGLang's
`init_custom_process_group` (sglang/srt/utils/common.py), because both sides must agree on the keys of the store.
"""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from typing import Any

# SGLang turns this off for itself, and two ranks of one NCCL group must agree on it, or they cannot open each other's
# memory. NCCL reads it once in a process, so it must be set before the first group of any kind.
NCCL_AS_IN_SGLANG = {"NCCL_CUMEM_ENABLE": "0"}


def agree_with_engines() -> None:
    """Before the first NCCL group of a process that will send weights. What somebody has set, engines inherit."""
    for name, value in NCCL_AS_IN_SGLANG.items():
        os.environ.setdefault(name, value)


def loaded_nccl() -> tuple[int, int, int]:
    """Version of the library that torch has loaded, which may be another than it was built with
    (`torch.cuda.nccl.version()`). Raises OSError where there is none."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def join_group(address: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float) -> Any:
    """Meet the others of the group `name`; rank 0 holds the store. Names are used once in a process.

    Raises what torch raises when the others do not come within `timeout_s`.
    """
    from torch.distributed import distributed_c10d as c10d

    agree_with_engines()
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(c10d.rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def leave_group(group: Any, broken: bool = False) -> None:
    """Let go of a group. `broken`: some rank is gone, so what is under way is cut off rather than waited for."""
    import torch.distributed as dist

    if broken:
        group.abort()
    dist.destroy_process_group(group)
