"""The system calls that a sandbox may not make, as a seccomp program for bubblewrap.

In: the machine's architecture. Out: BPF bytes. Left to others: who loads them (keeper.py, bubblewrap). Standard library
only. A denied call answers EPERM, so programs see a refusal and not a crash; clone3 answers ENOSYS because its flags
cannot be read by a filter, and every libc then falls back to clone.

Denied: what makes namespaces, mounts or kernel objects that a capability check alone does not stop for a process that
may make a user namespace, and what reads or sets kernel state. Dropped capabilities stay the first line; this is the
second. Sockets are of four families only: others reach more of the kernel, and AF_VSOCK reaches the host of a virtual
machine, which no network namespace stops.
"""

from __future__ import annotations

import platform
import struct
from functools import cache

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_DENIED = {
    "x86_64": {
        "mount": 165, "umount2": 166, "pivot_root": 155, "unshare": 272, "setns": 308, "keyctl": 250, "add_key": 248,
        "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "kexec_load": 246,
        "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176, "swapon": 167,
        "swapoff": 168, "reboot": 169, "open_by_handle_at": 304, "open_tree": 428, "move_mount": 429, "fsopen": 430,
        "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "io_uring_setup": 425,
        "open_tree_attr": 467, "syslog": 103, "quotactl": 179, "quotactl_fd": 443, "acct": 163, "settimeofday": 164,
        "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159, "iopl": 172, "ioperm": 173, "fanotify_init": 300,
        "vhangup": 153, "lookup_dcookie": 212,
    },
    "aarch64": {
        "mount": 40, "umount2": 39, "pivot_root": 41, "unshare": 97, "setns": 268, "keyctl": 219, "add_key": 217,
        "request_key": 218, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "kexec_load": 104,
        "kexec_file_load": 294, "init_module": 105, "finit_module": 273, "delete_module": 106, "swapon": 224,
        "swapoff": 225, "reboot": 142, "open_by_handle_at": 265, "open_tree": 428, "move_mount": 429, "fsopen": 430,
        "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "io_uring_setup": 425,
        "open_tree_attr": 467, "syslog": 116, "quotactl": 60, "quotactl_fd": 443, "acct": 89, "settimeofday": 170,
        "clock_settime": 112, "clock_adjtime": 266, "adjtimex": 171, "fanotify_init": 262, "vhangup": 58,
        "lookup_dcookie": 18,
    },
}  # fmt: skip
_SOCKETS = {"x86_64": (41, 53), "aarch64": (198, 199)}  # socket, socketpair
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435  # the same number everywhere
_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_GE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_X32_BIT = 0x40000000  # the x32 ABI would number the same calls differently


def supported() -> bool:
    return platform.machine() in _AUDIT_ARCH


@cache
def program() -> bytes:
    """struct sock_filter[]: 8 bytes each. Only called where `supported`."""
    machine = platform.machine()
    rows = [
        (_LOAD, 0, 0, 4),  # seccomp_data.arch
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),  # another ABI (32-bit) has other numbers
        (_LOAD, 0, 0, 0),  # seccomp_data.nr
    ]
    if machine == "x86_64":
        rows += [(_JUMP_GE, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for number in sorted(_DENIED[machine].values()):
        rows += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    rows += [(_JUMP_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for number in _SOCKETS[machine]:
        rows += [(_JUMP_EQUAL, 0, 3 + len(_FAMILIES), number), (_LOAD, 0, 0, 16)]
        rows += [(_JUMP_EQUAL, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
        rows += [(_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    rows += [
        (_JUMP_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, 16),  # low half of the first argument: the flags
        (_JUMP_SET, 0, 1, _NAMESPACES),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *row) for row in rows)
