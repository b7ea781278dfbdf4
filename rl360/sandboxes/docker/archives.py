"""Files into and out of containers as tar archives, which the daemon packs and unpacks.

In: host folders, or an archive that a container's content filled. Out: an archive, or host files. Left to others:
moving archives (environment.py).

The daemon reads and writes the container's file system itself, so no program inside the container, which an agent may
have replaced, takes part. On the host only regular files and folders are made: a link to a file of the same download
becomes that file, other links, pipes and devices are left out. Standard library only.
"""

from __future__ import annotations

import fnmatch
import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_BYTES = 2**30  # of one download
_MAX_ENTRIES = 50_000
_MAX_DEPTH = 100
_CHUNK = 2**20


def pack(source: Path, path: str, target: Path) -> None:
    """An archive of a host file, or of a folder's content, for `path` in the container, to be unpacked at `/`.

    Owned by root. Parents need no entry: the daemon makes them.
    """
    name = path.strip("/")
    with tarfile.open(target, "w") as tar:
        if source.is_dir():
            for child in sorted(source.rglob("*")):
                tar.add(child, f"{name}/{child.relative_to(source).as_posix()}".lstrip("/"), False, filter=_root)
        else:
            tar.add(source.resolve(), name, False, filter=_root)


def pack_text(path: str, text: str, target: Path, mode: int = 0o755) -> None:
    """An archive of one file."""
    data = text.encode()
    info = tarfile.TarInfo(path.strip("/"))
    info.size, info.mode = len(data), mode
    with tarfile.open(target, "w") as tar:
        tar.addfile(info, io.BytesIO(data))


def _root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def unpack_file(archive: Path, target: Path) -> None:
    """The one regular file of an archive. Raises FileNotFoundError when it holds something else."""
    with tarfile.open(archive, "r:") as tar:
        member = tar.next()
        if member is None or not member.isreg():
            raise FileNotFoundError("not a regular file")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            target = target / posixpath.basename(member.name)
        _write(tar, member, target)


def unpack_folder(archive: Path, target: Path) -> list[str]:
    """The content of an archive's one folder into `target`. Returns the paths that were left out."""
    target.mkdir(parents=True, exist_ok=True)
    skipped: list[str] = []
    with tarfile.open(archive, "r:") as tar:
        files: dict[str, tarfile.TarInfo] = {}
        links: list[tuple[str, tarfile.TarInfo]] = []
        for count, (path, member) in enumerate(_members(tar, skipped)):
            if count >= _MAX_ENTRIES:
                skipped.append("the rest")
                break
            if member.isreg():
                files[path] = member
                _place(tar, member, target / path, path, skipped)
            elif member.isdir():
                if not _is_in_the_way(target / path):
                    (target / path).mkdir(parents=True, exist_ok=True)
            else:
                links.append((path, member))
        for path, member in links:
            source = files.get(_linked(path, member) or "")
            if source is None:
                skipped.append(path)
            else:
                _place(tar, source, target / path, path, skipped)
    return skipped


def _members(tar: tarfile.TarFile, skipped: list[str]) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """(path below the archive's folder, member) of what has a usable name."""
    for member in tar:
        parts = [part for part in member.name.split("/") if part not in ("", ".")][1:]
        if not parts:
            continue
        if ".." in parts or len(parts) > _MAX_DEPTH or "\0" in member.name:
            skipped.append(member.name)
            continue
        yield "/".join(parts), member


def _linked(path: str, member: tarfile.TarInfo, folder: str = "") -> str | None:
    """What a link means, below the archive's folder; None when it is no link or may leave it.

    `folder`: what the archive's folder is called in the container, so that absolute links into it are known. After the
    leading ".." no other may follow: behind a link to a folder it would lead elsewhere than the text says.
    """
    if member.islnk():  # hard links name the archive's member
        return "/".join(part for part in member.linkname.split("/")[1:] if part not in ("", "."))
    if not member.issym():
        return None
    target = member.linkname
    at = [part for part in posixpath.dirname(path).split("/") if part]
    if target.startswith("/"):
        if not folder or not f"{target}/".startswith(f"{folder.rstrip('/')}/"):
            return None
        target, at = target[len(folder.rstrip("/")) :], []
    parts = [part for part in target.split("/") if part not in ("", ".")]
    while parts and parts[0] == "..":
        if not at:
            return None
        at.pop()
        parts.pop(0)
    return None if ".." in parts else "/".join([*at, *parts])


def _is_in_the_way(path: Path) -> bool:
    return path.is_symlink() or (path.exists() and not path.is_dir())


def _place(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path, path: str, skipped: list[str]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(tar, member, target)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        skipped.append(path)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """A new file with the member's content and permissions; never through a link."""
    reader = tar.extractfile(member)
    assert reader is not None
    if target.is_symlink() or target.is_file():
        target.unlink()
    mode = (member.mode & 0o777) | stat.S_IRUSR | stat.S_IWUSR
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with open(fd, "wb") as writer:
        while chunk := reader.read(_CHUNK):
            writer.write(chunk)


def carry(archive: Path, path: str, target: Path, exclude: Sequence[str] = ()) -> list[str]:
    """What an agent left at `path`, rewritten for a new container. Returns what was refused.

    Regular files, folders and links that stay inside come along, with owner, permissions and times, without setuid and
    setgid bits. Devices, pipes, sockets and links that leave the folder do not. `exclude`: shell patterns of names or
    of paths below the folder.
    """
    refused: list[str] = []
    top = path.strip("/")
    with tarfile.open(archive, "r:") as source, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as out:
        first = source.next()
        if first is not None and first.isreg():
            out.addfile(_twin(first, top), source.extractfile(first))
            return refused
        if first is None or not first.isdir():
            return [path]
        out.addfile(_twin(first, top))
        for below, member in _members(source, refused):
            if _is_excluded(below, exclude):
                continue
            info = _twin(member, f"{top}/{below}")
            inside = _linked(below, member, path)
            if member.isreg():
                out.addfile(info, source.extractfile(member))
            elif member.isdir():
                out.addfile(info)
            elif inside is not None and not _is_excluded(inside, exclude):
                near = posixpath.relpath(inside or ".", posixpath.dirname(below) or ".")
                info.linkname = near if member.issym() else f"{top}/{inside}"
                out.addfile(info)
            else:
                refused.append(below)
    return refused


def _twin(member: tarfile.TarInfo, name: str) -> tarfile.TarInfo:
    """The same entry under another name, without what a name of a user, a bit or an attribute could bring along."""
    info = tarfile.TarInfo(name)
    info.type = tarfile.REGTYPE if member.isreg() else member.type
    info.mode, info.uid, info.gid, info.mtime = member.mode & 0o1777, member.uid, member.gid, member.mtime
    info.size = member.size if member.isreg() else 0
    return info


def _is_excluded(path: str, patterns: Sequence[str]) -> bool:
    parts = path.split("/")
    heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    return any(fnmatch.fnmatch(text, pattern) for pattern in patterns for text in [*parts, *heads])
