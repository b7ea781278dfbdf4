"""The few Linux calls that Python lacks: mount, umount, prctl and openat2, through ctypes.

In: paths, flags and file descriptors. Out: file descriptors or OSError with the call's name. Left to others: what is
mounted where (keeper.py) and which files move (transfer.py). Standard library only: the keeper process imports it.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import socket
import struct

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SYS_OPENAT2 = 437  # the same number on every architecture (added after the tables were unified)
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RESOLVE_IN_ROOT = 0x10
_EAGAIN_TRIES = 8  # openat2 answers EAGAIN when a rename races with a ".." lookup; the man page says to try again

# What a look into a sandbox's file system fails with when this machine is at its end. It says nothing about the files.
OF_THE_HOST = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ENOBUFS))

_libc = ctypes.CDLL(None, use_errno=True)


def raise_hosts(error: OSError) -> None:
    """Raise an error that must not be taken for a missing or unreadable file."""
    if error.errno in OF_THE_HOST:
        raise error


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, fstype: str, flags: int = 0, options: str = "") -> None:
    """mount(2). Raises OSError that names the target."""
    result = _libc.mount(source.encode(), target.encode(), fstype.encode(), ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {fstype or 'bind'} on {target} ({options})" if options else f"mount on {target}")


def bind(source: str, target: str, read_only: bool = False) -> None:
    """Bind `source` with its submounts on `target`; read-only needs a second call, as the kernel wants it."""
    mount(source, target, "", MS_BIND | MS_REC)
    if read_only:
        mount("none", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)


def umount(target: str) -> None:
    """Lazy umount2(2)."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def set_parent_death_signal(number: int) -> None:
    """The kernel sends `number` to this process when the thread that started it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl PDEATHSIG")


def receive(sock: socket.socket, size: int, max_fds: int) -> tuple[bytes, list[int]]:
    """One message with its descriptors, none of which a child process inherits.

    `socket.recv_fds` takes flags and drops them, so its descriptors would be inherited by every sandbox.
    """
    fds = array.array("i")
    space = socket.CMSG_LEN(max_fds * fds.itemsize)
    data, ancillary, _, _ = sock.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def become_subreaper() -> None:
    """Orphans below this process become its children, so it reaps them and their CPU time is counted as its own."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl CHILD_SUBREAPER")


def open_in_root(root_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """Open `path` as a process chrooted into `root_fd` would: absolute links and ".." cannot leave it.

    The kernel does the whole lookup (openat2 with RESOLVE_IN_ROOT, Linux 5.6), so a link that is swapped during the
    lookup cannot leave either. Raises OSError.
    """
    return _openat2(root_fd, path, flags, mode, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)


def open_beneath(folder_fd: int, path: str, flags: int, follow: bool = False) -> int:
    """Open a relative `path` that stays below `folder_fd` at every step and enters no other mount.

    Without `follow` no component may be a link, but the last one is opened itself with O_PATH | O_NOFOLLOW. With it,
    links are followed for as long as they stay below. Raises OSError: EXDEV when it would leave, ELOOP for a link.
    """
    resolve = _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_XDEV
    return _openat2(folder_fd, path or ".", flags, 0, resolve if follow else resolve | _RESOLVE_NO_SYMLINKS)


def _openat2(folder_fd: int, path: str, flags: int, mode: int, resolve: int) -> int:
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, resolve)
    for attempt in range(_EAGAIN_TRIES):
        fd = _libc.syscall(_SYS_OPENAT2, folder_fd, os.fsencode(path), how, len(how))
        if fd >= 0:
            return int(fd)
        number = ctypes.get_errno()
        if number != 11 or attempt == _EAGAIN_TRIES - 1:
            raise OSError(number, os.strerror(number), path)
    raise AssertionError("unreachable")
