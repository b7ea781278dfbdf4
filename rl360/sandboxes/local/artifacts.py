"""Carries what an agent made from its ended sandbox into a new one, and nothing else.

In: the disks of two sandboxes made from the same layers, and the paths that may come along. Out: the new disk with
those paths as the agent left them, and a list of what was refused. Left to others: ending the first sandbox, so that
nothing changes during the walk, and starting the second (environment.py).

Both trees are walked together without following a link. A file that the agent did not touch is left alone: in both
overlays it is the same file of the same layer, and a changed one has a change time that nobody inside can set. What
the agent deleted is deleted. Content, permissions, owner and modification time come along. These do not: links that
leave the artifact, sockets, pipes and devices, setuid and setgid bits, file capabilities and other extended
attributes. Hard links become files of their own. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import posixpath
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

from rl360.sandboxes.artifact_paths import Artifact, is_below, problems_of
from rl360.sandboxes.local.syscalls import open_beneath, raise_hosts
from rl360.sandboxes.local.transfer import copy_data

MAX_ENTRIES = 200_000  # files and folders looked at; a large repository has some ten thousand
MAX_MADE = 20_000  # files, folders and links made anew: each takes a fraction of a millisecond
MAX_DEPTH = 30  # folders in folders; each level holds two descriptors
_MAX_PATH_BYTES = 3000  # below the artifact; the kernel takes 4096 in one lookup
_MAX_LINKS = 40  # followed in one lookup, as the kernel does
_MAX_REFUSED = 20  # of which the names are kept
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ArtifactsTooLarge(RuntimeError):
    """The agent left more than the limit; says which limit."""


@dataclass(frozen=True)
class Disk:
    """A sandbox's file system: one descriptor per mounted tree, by its folder ("" is the root)."""

    trees: dict[str, int]

    def open(self, path: str, flags: int) -> int:
        """Open an absolute path of which no component is a link. Raises OSError."""
        relative = posixpath.normpath(path).lstrip("/")
        names = [n for n in self.trees if n and (relative == n or relative.startswith(f"{n}/"))]
        name = max(names, key=len, default="")
        return open_beneath(self.trees[name], relative[len(name) :].lstrip("/"), flags)


@dataclass
class Carried:
    """What happened, and what may still come."""

    bytes_left: int
    entries_left: int
    made_left: int = MAX_MADE
    files: int = 0
    removed: int = 0
    num_refused: int = 0
    refused: list[str] = field(default_factory=list)  # the first ones, each with the reason
    links: list[tuple[str, str]] = field(default_factory=list)  # made in this artifact: path below it, target

    def refuse(self, path: str, why: str) -> None:
        self.num_refused += 1
        if self.num_refused <= _MAX_REFUSED:
            self.refused.append(f"{printable(path)}: {why}")

    def make(self) -> None:
        """Count one entry that is made."""
        self.made_left -= 1
        if self.made_left < 0:
            raise ArtifactsTooLarge(f"the artifacts hold more than {MAX_MADE} new or changed files and folders")


def printable(name: str) -> str:
    """A file's name as text that can be written anywhere: bytes that are no UTF-8 show as \\xff."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def resolve(disk: Disk, path: str) -> str:
    """The path without links, as the image has them: `/data` may be a link to `/srv/data`. What is missing stays."""
    rest = [part for part in posixpath.normpath(path).split("/") if part]
    at, links = "/", 0
    while rest:
        name = rest.pop(0)
        if name == "..":
            at = posixpath.dirname(at)
            continue
        here = posixpath.join(at, name)
        try:
            fd = disk.open(here, os.O_PATH | os.O_NOFOLLOW)
        except OSError as error:
            raise_hosts(error)
            return posixpath.join(here, *rest)
        try:
            if not stat.S_ISLNK(os.fstat(fd).st_mode):
                at = here
                continue
            target = os.readlink("", dir_fd=fd)
        finally:
            os.close(fd)
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, "too many links", path)
        at = "/" if target.startswith("/") else at
        rest = [part for part in target.split("/") if part not in ("", ".")] + rest
    return at


def carry(old: Disk, new: Disk, artifacts: Sequence[Artifact], max_bytes: int) -> Carried:
    """Make each artifact in `new` what it is in `old`, which no process may use any more.

    Raises ArtifactsTooLarge, or OSError when the new disk refuses (it is full).
    """
    carried = Carried(max_bytes, MAX_ENTRIES, MAX_MADE)
    done: list[str] = []
    for artifact in sorted(artifacts, key=lambda a: len(a.path)):
        path = resolve(new, artifact.path)
        if any(is_below(path, d) for d in done):
            continue
        problem = problems_of([path])
        if problem:
            raise OSError(errno.EINVAL, problem[0])
        _carry_one(old, new, Artifact(path, artifact.exclude, artifact.required), carried)
        done += [] if artifact.exclude else [path]
    return carried


def _carry_one(old: Disk, new: Disk, artifact: Artifact, carried: Carried) -> None:
    path = artifact.path
    parent_fd = _make_folders(new, posixpath.dirname(path))
    name = posixpath.basename(path)
    try:
        source, why = _open_source(old, path)
        if source is not None and artifact.required and not stat.S_ISDIR(os.fstat(source).st_mode):
            why = "not a folder any more"
            os.close(source)
            source = None
        if why:
            carried.refuse(path, why)
        if source is None:
            if _lstat(name, parent_fd) is not None:
                _remove(name, parent_fd, carried)
            if artifact.required:
                os.mkdir(name, 0o755, dir_fd=parent_fd)
            return
        try:
            if stat.S_ISDIR(os.fstat(source).st_mode):
                walk = _Walk(artifact, carried)
                walk.folder(source, _same_folder(name, parent_fd, carried), "", 0)
                walk.check_links(name, parent_fd)
            else:
                _file(source, name, parent_fd, carried)
        finally:
            os.close(source)
    finally:
        os.close(parent_fd)


def _open_source(old: Disk, path: str) -> tuple[int | None, str]:
    """A descriptor of a folder or a regular file, or why there is none (empty: it is missing)."""
    try:
        fd = old.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        raise_hosts(error)
        what = {errno.ELOOP: "a link", errno.ENXIO: "a socket", errno.ENOTDIR: "its parent is no folder any more"}
        return None, what.get(error.errno or 0, error.strerror or str(error))
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
        return fd, ""
    os.close(fd)
    return None, "not a file or a folder"


class _Walk:
    """One artifact that is a folder."""

    def __init__(self, artifact: Artifact, carried: Carried):
        self._artifact, self._carried = artifact, carried
        carried.links = []

    def folder(self, old_fd: int, new_fd: int, below: str, depth: int) -> None:
        """Make an open folder what another is. Closes `new_fd`."""
        try:
            if depth > MAX_DEPTH:
                raise ArtifactsTooLarge(f"{self._artifact.path}: folders nested deeper than {MAX_DEPTH}")
            if len(os.fsencode(below)) > _MAX_PATH_BYTES:
                raise ArtifactsTooLarge(f"{self._artifact.path}: paths longer than {_MAX_PATH_BYTES} bytes")
            kept = set()
            with os.scandir(old_fd) as entries:  # holds a descriptor: closed before going deeper
                for entry in entries:
                    self._carried.entries_left -= 1
                    if self._carried.entries_left < 0:
                        raise ArtifactsTooLarge(f"the artifacts hold more than {MAX_ENTRIES} files")
                    kept.add(entry.name)
            for name in kept:
                path = posixpath.join(below, name)
                if not self._excluded(path):
                    self._entry(name, old_fd, new_fd, path, depth)
            for name in os.listdir(new_fd):
                if name not in kept and not self._excluded(posixpath.join(below, name)):
                    _remove(name, new_fd, self._carried)
            if depth:  # the artifact's own folder keeps what the image gave it, so that the tests can enter it
                _attributes(new_fd, os.fstat(old_fd))
        finally:
            os.close(new_fd)

    def _excluded(self, path: str) -> bool:
        name = posixpath.basename(path)
        return any(fnmatch.fnmatchcase(path, p) or fnmatch.fnmatchcase(name, p) for p in self._artifact.exclude)

    def _entry(self, name: str, old_fd: int, new_fd: int, path: str, depth: int) -> None:
        info, there = _lstat(name, old_fd), _lstat(name, new_fd)
        if info is None:
            return
        if not stat.S_ISDIR(info.st_mode) and there is not None and _stamp(info) == _stamp(there):
            return
        shown = posixpath.join(self._artifact.path, path)
        try:
            if stat.S_ISDIR(info.st_mode):
                fd = os.open(name, _FOLDER | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=old_fd)
                try:
                    self.folder(fd, _same_folder(name, new_fd, self._carried), path, depth + 1)
                finally:
                    os.close(fd)
                return
            if stat.S_ISREG(info.st_mode):
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=old_fd)
                try:
                    _file(fd, name, new_fd, self._carried)
                finally:
                    os.close(fd)
                return
        except PermissionError:  # without root: a file that its owner made unreadable
            self._drop(shown, "not readable", name, new_fd)
            return
        if not stat.S_ISLNK(info.st_mode):
            self._drop(shown, "not a file, a folder or a link", name, new_fd)
            return
        target = self._inside(os.readlink(name, dir_fd=old_fd), posixpath.dirname(path))
        if target is None:
            self._drop(shown, "a link that leaves the artifact", name, new_fd)
            return
        if there is not None:
            _remove(name, new_fd, self._carried)
        self._carried.make()
        os.symlink(target, name, dir_fd=new_fd)
        self._carried.links.append((path, target))

    def _drop(self, shown: str, why: str, name: str, new_fd: int) -> None:
        """Refuse it, and do not leave in its place what the image had there."""
        self._carried.refuse(shown, why)
        if _lstat(name, new_fd) is not None:
            _remove(name, new_fd, self._carried)

    def _inside(self, target: str, folder: str) -> str | None:
        """The target as a relative path; None when an absolute one is not below the artifact."""
        if not target.startswith("/"):
            return target
        root = self._artifact.path
        if ".." in target.split("/") or not is_below(posixpath.normpath(target), root):
            return None
        return posixpath.relpath(posixpath.relpath(target, root), folder or ".")

    def check_links(self, name: str, parent_fd: int) -> None:
        """Let the kernel follow every new link: one that leaves the artifact at any step goes. Dangling ones stay."""
        carried = self._carried
        if not carried.links:
            return
        root = os.open(name, _FOLDER | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
        try:
            leaving = [path for path, _ in carried.links if not _stays(root, path)]
            for path in leaving:
                carried.refuse(posixpath.join(self._artifact.path, path), "a link that leaves the artifact")
                fd = open_beneath(root, posixpath.dirname(path), _FOLDER)
                try:
                    os.unlink(posixpath.basename(path), dir_fd=fd)
                finally:
                    os.close(fd)
        finally:
            os.close(root)


def _stays(root: int, path: str) -> bool:
    try:
        os.close(open_beneath(root, path, os.O_PATH, follow=True))
    except OSError as error:
        raise_hosts(error)
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return True


def _stamp(info: os.stat_result) -> tuple[int, ...]:
    """Equal for the same file of a lower layer. A file that was written to has a later change time."""
    return (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_uid, info.st_gid)


def _lstat(name: str, folder_fd: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _make_folders(disk: Disk, path: str) -> int:
    """A descriptor of a folder of the new disk, made with its parents where missing. The path has no links."""
    try:
        return disk.open(path, _FOLDER)
    except FileNotFoundError:
        parent_fd = _make_folders(disk, posixpath.dirname(path))
        try:
            os.mkdir(posixpath.basename(path), 0o755, dir_fd=parent_fd)
        finally:
            os.close(parent_fd)
        return disk.open(path, _FOLDER)


def _same_folder(name: str, parent_fd: int, carried: Carried) -> int:
    """Open a folder of the new disk, in the place of whatever stands there."""
    there = _lstat(name, parent_fd)
    if there is not None and not stat.S_ISDIR(there.st_mode):
        _remove(name, parent_fd, carried)
        there = None
    if there is None:
        carried.make()
        os.mkdir(name, 0o755, dir_fd=parent_fd)
    return os.open(name, _FOLDER | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)


def _file(source: int, name: str, new_fd: int, carried: Carried) -> None:
    info = os.fstat(source)
    if not stat.S_ISREG(info.st_mode):
        return
    if _lstat(name, new_fd) is not None:
        _remove(name, new_fd, carried)
    carried.make()
    fd = os.open(name, _CREATE, 0o600, dir_fd=new_fd)
    try:
        carried.bytes_left -= copy_data(source, fd, carried.bytes_left + 1)
        if carried.bytes_left < 0:
            raise ArtifactsTooLarge("the artifacts hold more bytes than the limit")
        _attributes(fd, info)
    finally:
        os.close(fd)
    carried.files += 1


def _attributes(fd: int, info: os.stat_result) -> None:
    with contextlib.suppress(PermissionError):  # without root there is one user, who owns everything
        os.fchown(fd, info.st_uid, info.st_gid)
    os.fchmod(fd, stat.S_IMODE(info.st_mode) & 0o1777)
    os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))


def _remove(name: str, folder_fd: int, carried: Carried) -> None:
    """Remove an entry of the new disk: it holds only what the image brought, or what was carried."""
    info = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    if stat.S_ISDIR(info.st_mode):
        shutil.rmtree(name, dir_fd=folder_fd)
    else:
        os.unlink(name, dir_fd=folder_fd)
    carried.removed += 1
