"""Files into and out of a sandbox, through a descriptor of its root folder.

In: the root's descriptor and paths as the sandbox names them. Out: copies. Left to others: when (environment.py).

Every path is looked up by the kernel as if the sandbox's root were `/` (openat2 with RESOLVE_IN_ROOT): a link to
/etc/shadow means the sandbox's own. Only regular files are read; pipes, sockets and devices are skipped. Links are
never made on the host: a link to a file is downloaded as that file, a link to a folder is left out. What a download may
bring is bounded, because a sandbox can make sparse files of any size. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path

from rl360.sandboxes.local.syscalls import open_in_root, raise_hosts

MAX_DOWNLOAD_BYTES = 2**30
_MAX_ENTRIES = 20_000
_MAX_DEPTH = 30  # each level holds a descriptor
_CHUNK = 2**20
_READ = os.O_RDONLY | os.O_NONBLOCK  # O_NONBLOCK: opening a pipe must not wait for its writer
_FOLDER = os.O_RDONLY | os.O_DIRECTORY


@dataclass
class Skipped:
    """What a download left out."""

    paths: list[str] = field(default_factory=list)
    bytes_left: int = MAX_DOWNLOAD_BYTES
    entries_left: int = _MAX_ENTRIES


def kind(root_fd: int, path: str) -> str:
    """file | dir | other | missing, links followed."""
    try:
        fd = open_in_root(root_fd, path, os.O_PATH)
    except OSError as error:
        raise_hosts(error)
        return "missing"
    try:
        mode = os.fstat(fd).st_mode
    finally:
        os.close(fd)
    return "dir" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def make_folder(root_fd: int, path: str, mode: int | None = None) -> None:
    """mkdir -p; `mode` is set on the last folder also when it exists."""
    os.close(_open_folder(root_fd, path, mode))


def _open_folder(root_fd: int, path: str, mode: int | None = None) -> int:
    """Open a folder, making it and its parents where they are missing."""
    try:
        fd = open_in_root(root_fd, path, _FOLDER)
    except FileNotFoundError:
        parent, name = posixpath.split(posixpath.normpath(path))
        if not name:
            raise
        parent_fd = _open_folder(root_fd, parent)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=parent_fd)
        finally:
            os.close(parent_fd)
        fd = open_in_root(root_fd, path, _FOLDER)
    if mode is not None:
        os.fchmod(fd, mode)
    return fd


def read_small(root_fd: int, path: str, limit: int = 2**20) -> bytes:
    """The beginning of a regular file. Raises OSError."""
    with open(_open_regular(root_fd, path), "rb", closefd=True) as file:
        return file.read(limit)


def _open_regular(root_fd: int, path: str) -> int:
    fd = open_in_root(root_fd, path, _READ)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def upload_file(root_fd: int, source: Path, target: str, owner: tuple[int, int] | None = None) -> None:
    """Copy a host file to `target`, with its mode. A target that is a folder gets the file under its own name."""
    if target.endswith("/") or kind(root_fd, target) == "dir":
        target = posixpath.join(target, source.name)
    os.close(_open_folder(root_fd, posixpath.dirname(target) or "/"))
    _upload(root_fd, source, target, owner)


def _upload(root_fd: int, source: Path, target: str, owner: tuple[int, int] | None) -> None:
    with open(source, "rb") as reader:
        mode = stat.S_IMODE(os.fstat(reader.fileno()).st_mode)
        fd = open_in_root(root_fd, target, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, mode & 0o777)
        with open(fd, "wb", closefd=True) as writer:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "exists and is not a regular file", target)
            os.ftruncate(fd, 0)
            shutil.copyfileobj(reader, writer, _CHUNK)
            os.fchmod(fd, mode)
            if owner is not None:
                os.fchown(fd, *owner)


def upload_folder(root_fd: int, source: Path, target: str, owner: tuple[int, int] | None = None) -> None:
    """Copy the contents of a host folder into `target`. Links are copied as links; they mean the sandbox's files."""
    for folder, folders, files in os.walk(source):
        relative = os.path.relpath(folder, source)
        inside = target if relative == "." else posixpath.join(target, relative)
        fd = _open_folder(root_fd, inside)
        try:
            if relative != ".":
                os.fchmod(fd, stat.S_IMODE(os.stat(folder).st_mode))
            if owner is not None:
                os.fchown(fd, *owner)
            for name in [*files, *(f for f in folders if os.path.islink(os.path.join(folder, f)))]:
                path = Path(folder, name)
                if path.is_symlink():
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fd)
                    os.symlink(os.readlink(path), name, dir_fd=fd)
                elif path.is_file():
                    _upload(root_fd, path, posixpath.join(inside, name), owner)
        finally:
            os.close(fd)


def download_file(root_fd: int, source: str, target: Path) -> None:
    """Copy a regular file out. Raises OSError, also when it is larger than the bound."""
    with open(_open_regular(root_fd, source), "rb", closefd=True) as reader:
        if os.fstat(reader.fileno()).st_size > MAX_DOWNLOAD_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_DOWNLOAD_BYTES} bytes", source)
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_host(reader.fileno(), target)


def _write_host(source_fd: int, target: Path) -> int:
    """Copy an open file to a new host file. What stood there is replaced, never written through. Returns the size."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)
    mode = stat.S_IMODE(os.fstat(source_fd).st_mode) & 0o777
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode | 0o600)
    try:
        return copy_data(source_fd, fd, MAX_DOWNLOAD_BYTES)
    finally:
        os.close(fd)


def copy_data(source_fd: int, target_fd: int, limit: int) -> int:
    """Copy a file into a new one, holes as holes. Returns the bytes that were not holes; at most `limit` are copied.

    A sandbox of 512 MiB can make a file of 512 GiB that is one hole: it must stay one.
    """
    end, at, copied = os.fstat(source_fd).st_size, 0, 0
    while at < end and copied < limit:
        try:
            at = os.lseek(source_fd, at, os.SEEK_DATA)
            stop = os.lseek(source_fd, at, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break  # the rest is a hole
            stop = end  # holes are not told apart here
        while at < stop and copied < limit:
            chunk = os.pread(source_fd, min(_CHUNK, stop - at, limit - copied), at)
            if not chunk:
                return copied
            _write_all(target_fd, chunk, at)
            at += len(chunk)
            copied += len(chunk)
    if copied < limit:
        os.ftruncate(target_fd, end)
    return copied


def _write_all(fd: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def download_folder(root_fd: int, source: str, target: Path) -> list[str]:
    """Copy the contents of a folder out. Returns what was left out. Raises OSError when it is no folder."""
    skipped = Skipped()
    fd = open_in_root(root_fd, source, _FOLDER)
    try:
        _download(root_fd, fd, posixpath.normpath(source), target, skipped, 0)
    finally:
        os.close(fd)
    return skipped.paths


def _download(root_fd: int, folder_fd: int, inside: str, target: Path, skipped: Skipped, depth: int) -> None:
    if target.is_symlink():
        target.unlink()
    target.mkdir(parents=True, exist_ok=True)
    for name in sorted(os.listdir(folder_fd)):
        path = posixpath.join(inside, name)
        skipped.entries_left -= 1
        if skipped.entries_left < 0 or depth > _MAX_DEPTH:
            skipped.paths.append(path)
            return
        try:
            info = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                fd = os.open(name, _FOLDER | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
                try:
                    _download(root_fd, fd, path, target / name, skipped, depth + 1)
                finally:
                    os.close(fd)
                continue
            if stat.S_ISLNK(info.st_mode):
                fd = _open_regular(root_fd, path)
            elif stat.S_ISREG(info.st_mode):
                fd = os.open(name, _READ | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
            else:
                skipped.paths.append(path)
                continue
        except OSError as error:
            raise_hosts(error)
            skipped.paths.append(path)  # it vanished, or is a link to nothing or to a folder
            continue
        try:
            real = os.fstat(fd)
            if not stat.S_ISREG(real.st_mode) or real.st_size > skipped.bytes_left or (target / name).is_dir():
                skipped.paths.append(path)
                continue
            skipped.bytes_left -= _write_host(fd, target / name)
        finally:
            os.close(fd)


def remove(root_fd: int, path: str) -> None:
    """rm -rf, never through a link."""
    parent, name = posixpath.split(posixpath.normpath(path))
    try:
        parent_fd = open_in_root(root_fd, parent, _FOLDER)
    except OSError as error:
        raise_hosts(error)
        return
    try:
        try:
            info = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(info.st_mode):
            shutil.rmtree(name, dir_fd=parent_fd)
        else:
            os.unlink(name, dir_fd=parent_fd)
    finally:
        os.close(parent_fd)
