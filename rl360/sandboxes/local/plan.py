"""What a sandbox is made of, and the keeper's start request that says so.

In: a `Plan`. Out: bubblewrap's options, the control shell and the mount plan as plain data. Left to others: sending it
(namespace.py), carrying it out (keeper.py). Standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rl360.sandboxes.local import cgroups, seccomp
from rl360.sandboxes.local.keeper import CONTROL_DIR, INFO_FD

# What root inside may still do. Docker's list without MKNOD, NET_RAW and AUDIT_WRITE.
CAPABILITIES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID",
    "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_SETFCAP",
)  # fmt: skip
# bubblewrap covers some of these only where it thinks them writable, and is wrong about /proc/sys for uid 0. Root
# inside is uid 0 outside in privileged mode, so an open /proc/sys would set the host's kernel.
_PROC_READ_ONLY = ("sys", "fs", "irq", "bus", "sysrq-trigger", "mtrr")
_PROC_HIDDEN_FILES = ("kcore", "keys", "key-users", "timer_list", "sched_debug", "latency_stats", "kmsg", "interrupts")
_PROC_HIDDEN_FOLDERS = ("acpi", "asound", "scsi", "driver")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SECCOMP_FD, _ARGS_FD = 1000, 1001  # above any descriptor that the keeper has open when it forks: one per sandbox

# `set -m` gives each command a process group; inside the first subshell too, so that `kill 0` spares the one that
# reports. SIGINT and SIGQUIT stay at their defaults, which a plain `&` would set to ignored.
_LOOP = f"""
exec 3>&1 1>/dev/null
set -m
echo ready >&3
while IFS=' ' read -r op n; do
  case $op in
  x) {{ set -m
       {{ . /{CONTROL_DIR}/$n.sh; }} </dev/null >/{CONTROL_DIR}/$n.out 2>/{CONTROL_DIR}/$n.err 3>&- &
       p=$!; echo "p $n $p" >&3; wait $p; echo "x $n $?" >&3; }} & ;;
  k) kill -9 -- -$n 2>/dev/null ;;
  K) kill -9 -1 2>/dev/null; echo "K 0 0" >&3 ;;
  esac
done
"""


@dataclass(frozen=True)
class User:
    """Whom a command runs as. `groups` are the supplementary ones."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything that decides what a sandbox is made of."""

    trees: tuple[tuple[str, tuple[str, ...]], ...]  # folder in the root ("" is the root), its lower folders, top first
    mode: str  # overlay | copy
    userns: bool
    hierarchy: cgroups.Hierarchy
    limits: cgroups.Limits
    disk_mib: int  # 0: no limit, on disk
    lifetime_s: float  # 0: no limit
    network: bool
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    read_only_binds: tuple[tuple[str, str], ...] = ()  # host path, folder in the root
    masks: tuple[str, ...] = ()  # folders and files in the root that show empty
    uppers: tuple[tuple[str, str], ...] | None = None  # (upper, work) of each tree on disk, when building a layer


def _bwrap_options(plan: Plan, root: str) -> list[str]:
    argv = ["--bind", root, "/", "--proc", "/proc", "--dev", "/dev", "--perms", "1777"]
    if plan.limits.memory_mib and _sizes_tmpfs():
        argv += ["--size", str(plan.limits.memory_mib * 2**19)]  # half of the memory, the kernel's own default
    argv += ["--tmpfs", "/dev/shm", "--remount-ro", "/dev"]  # /dev itself is a tmpfs without a limit
    for name in _PROC_READ_ONLY:
        argv += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for name in _PROC_HIDDEN_FILES:
        if os.path.exists(f"/proc/{name}"):
            argv += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for name in _PROC_HIDDEN_FOLDERS:
        if os.path.isdir(f"/proc/{name}"):
            argv += ["--tmpfs", f"/proc/{name}", "--remount-ro", f"/proc/{name}"]
    argv += ["--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    argv += ["--unshare-cgroup-try", "--hostname", "sandbox"]
    if not plan.network:
        argv += ["--unshare-net"]
    else:
        argv += ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf", "--ro-bind-try", "/etc/hosts", "/etc/hosts"]
    argv += ["--cap-drop", "ALL"]
    for capability in CAPABILITIES:
        argv += ["--cap-add", capability]
    if seccomp.supported():
        argv += ["--seccomp", str(_SECCOMP_FD)]
    argv += ["--clearenv"]
    for key, value in {"PATH": DEFAULT_PATH, "HOME": "/root", "TERM": "xterm", **plan.env}.items():
        argv += ["--setenv", key, value]
    return argv


@cache
def _sizes_tmpfs() -> bool:
    """Bubblewrap 0.7 and newer. Before, control groups alone bound what /dev/shm takes."""
    done = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, timeout=10, check=False)
    return "--size" in done.stdout + done.stderr


def spec_of(plan: Plan, owner_dir: Path, mount_point: str, name: str) -> dict[str, Any]:
    """The keeper's start request."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise FileNotFoundError("bwrap is not on the PATH; install bubblewrap (apt-get install bubblewrap)")
    if plan.disk_mib:
        scratch: dict[str, Any] = {"size_mib": plan.disk_mib}
    else:
        folder = owner_dir / name.rpartition(".")[2]
        folder.mkdir()
        scratch = {"path": str(folder)}
    rlimits: dict[str, int] = {}
    missing = plan.hierarchy.missing(plan.limits)
    if "memory" in missing:
        rlimits["RLIMIT_DATA"] = plan.limits.memory_mib * 2**20
    if "pids" in missing:
        rlimits["RLIMIT_NPROC"] = plan.limits.pids
    # Options go through a descriptor, so that the environment does not show in the host's process list.
    options = "\0".join(_bwrap_options(plan, f"{mount_point}/root"))
    files = [(_ARGS_FD, f"{options}\0".encode().hex())]
    if seccomp.supported():
        files.append((_SECCOMP_FD, seccomp.program().hex()))
    return {
        "mount_point": mount_point,
        "scratch": scratch,
        "trees": plan.trees,
        "mode": plan.mode,
        "overlay_options": ",userxattr" if plan.userns else "",
        "uppers": plan.uppers,
        "userns": plan.userns,
        "hierarchy": {"version": plan.hierarchy.version, "parents": plan.hierarchy.parents},
        "limits": vars(plan.limits),
        "lifetime_s": plan.lifetime_s,
        "rlimits": rlimits,
        "read_only_binds": plan.read_only_binds,
        "masks": plan.masks,
        "files": files,
        "argv": [
            bwrap, "--args", str(_ARGS_FD), "--info-fd", str(INFO_FD),
            "--", "/bin/bash", "--norc", "--noprofile", "-c", _LOOP,
        ],
    }  # fmt: skip
