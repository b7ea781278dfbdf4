"""The base root file system of sandboxes: a read-only view of the host's /usr, a debootstrap, or a given folder.

In: `sandbox.base` and a cache folder. Out: a `Base`: which read-only folders make the root. Left to others: layers on
top (layers.py) and mounting (keeper.py). Standard library only.

The view of the host shows /usr and a list of files of /etc that programs need to start. It never shows /root, /home,
/var, /srv, /opt, /run, the host's users, password hashes, keys or environment: what is not on the list is not there.
Root inside is root outside where sandboxes are made by root, so what only root may read below /usr is hidden too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

_VERSION = "2"  # change it when the skeleton below changes: caches of older ones are then left alone
_RESCAN_S = 600.0  # looking through /usr for what only root may read takes about a second
_DEBOOTSTRAP_TIMEOUT_S = 900
_DEBOOTSTRAP_PACKAGES = "ca-certificates,python3-minimal,procps,tmux"

# Files and folders of the host's /etc that hold no secret and that programs in /usr look for.
_ETC = (
    "alternatives", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "debian_version", "gai.conf", "host.conf",
    "inputrc", "issue", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "localtime", "lsb-release",
    "magic", "mime.types", "nsswitch.conf", "os-release", "pki/ca-trust", "pki/tls/certs", "profile", "protocols",
    "python3", "python3.10", "python3.11", "python3.12", "python3.13", "rpc", "services", "shells", "ssl/certs",
    "ssl/openssl.cnf", "system-release", "terminfo", "timezone",
)  # fmt: skip
_PASSWD = """root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
bin:x:2:2:bin:/bin:/usr/sbin/nologin
mail:x:8:8:mail:/var/mail:/usr/sbin/nologin
www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin
_apt:x:100:65534::/nonexistent:/usr/sbin/nologin
agent:x:1000:1000:agent:/home/agent:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP = """root:x:0:
daemon:x:1:
bin:x:2:
tty:x:5:
mail:x:8:
www-data:x:33:
shadow:x:42:
staff:x:50:
users:x:100:
agent:x:1000:
nogroup:x:65534:
"""
_FOLDERS = {
    "usr": 0o755, "dev": 0o755, "proc": 0o755, "sys": 0o755, "run": 0o755, "run/lock": 0o1777, "tmp": 0o1777,
    "root": 0o700, "home": 0o755, "home/agent": 0o755, "opt": 0o755, "srv": 0o755, "mnt": 0o755, "media": 0o755,
    "var": 0o755, "var/tmp": 0o1777, "var/log": 0o755, "var/cache": 0o755, "var/lib": 0o755, "var/lib/dpkg": 0o755,
    "var/mail": 0o755, "var/spool": 0o755, "etc": 0o755,
}  # fmt: skip
_TOP = (
    "bin",
    "sbin",
    "lib",
    "lib32",
    "lib64",
    "libx32",
)  # links into /usr on a merged system, else folders of their own
_PYTHON_AT = "opt/python"


@dataclass(frozen=True)
class Base:
    """Trees to stack: folder in the root -> read-only folders of the host, top first. The first is the root itself."""

    name: str  # part of every layer's cache key
    trees: tuple[tuple[str, tuple[str, ...]], ...]
    read_only_binds: tuple[tuple[str, str], ...] = ()
    masks: tuple[str, ...] = ()  # folders and files that show empty
    extra_path: str = ""  # appended to PATH


class BaseError(RuntimeError):
    """No usable base root file system; says what to do."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock file across processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        flock(file, LOCK_EX)
        yield


def resolve(base: str, cache_dir: Path) -> Base:
    """Make or find the base. `auto` takes the host's view when bash and python3 can run in it, else debootstrap.

    Raises BaseError.
    """
    if base == "auto":
        base = "host" if Path("/usr/bin/bash").exists() and _host_python() is not None else "debootstrap"
    if base == "host":
        return _host(cache_dir)
    if base == "debootstrap":
        return _debootstrap(cache_dir)
    folder = Path(base).expanduser().resolve()
    if not (folder / "bin/bash").exists() and not (folder / "usr/bin/bash").exists():
        raise BaseError(
            f"sandbox.base: {folder} is no root file system with /bin/bash; expected auto, host, debootstrap or one"
        )
    info = folder.stat()
    return Base(f"folder:{folder}:{info.st_ino}:{info.st_mtime_ns}", (("", (str(folder),)),))


def _host_python() -> str | None:
    """Where the sandbox's python3 comes from: "" when the host's /usr has one, else the prefix of this interpreter."""
    if Path("/usr/bin/python3").exists():
        return ""
    prefix = Path(sys.base_prefix).resolve()
    return str(prefix) if (prefix / "bin/python3").exists() else None


def _host(cache_dir: Path) -> Base:
    if not Path("/usr/bin/bash").exists():
        raise BaseError(
            "sandbox.base=host: the host has no /usr/bin/bash; install bash or use sandbox.base=debootstrap"
        )
    python = _host_python()
    if python is None:
        raise BaseError(
            "sandbox.base=host: the host has no /usr/bin/python3; install python3 or use sandbox.base=debootstrap"
        )
    key = hashlib.sha256(f"{_VERSION}|{os.getuid()}|{_etc_stamp()}".encode()).hexdigest()[:16]
    folder = cache_dir / "rootfs" / f"host-{key}"
    with locked(cache_dir / "rootfs" / "host.lock"):
        if not folder.exists():
            temporary = folder.with_suffix(f".tmp{os.getpid()}")
            shutil.rmtree(temporary, ignore_errors=True)
            _make_skeleton(temporary)
            temporary.rename(folder)
    tops = ["usr", *(n for n in _TOP if Path("/", n).is_dir() and not Path("/", n).is_symlink())]
    hidden, private = _hidden(cache_dir / "rootfs", tops) if os.getuid() == 0 else ({}, [])
    trees: list[tuple[str, tuple[str, ...]]] = [("", (str(folder),))]
    trees += [(name, (*hidden.get(name, ()), f"/{name}")) for name in tops]
    info = os.stat("/usr")
    name = f"host:{key}:{info.st_dev}:{info.st_ino}:{_digest(private)}"
    binds = ((python, _PYTHON_AT),) if python else ()
    return Base(name, tuple(trees), binds, ("usr/local/etc", *private), f"/{_PYTHON_AT}/bin" if python else "")


def _digest(paths: list[str]) -> str:
    return hashlib.sha256("\0".join(paths).encode(errors="surrogateescape")).hexdigest()[:12]


def _hidden(folder: Path, tops: list[str]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """A layer for each tree that hides what only root may read, by overlayfs's marks for deleted files; and the paths.

    The paths are masks too, for a sandbox without overlayfs. Workers share what one of them found in the last minutes.
    """
    with locked(folder / "hidden.lock"):
        known = folder / "hidden.txt"
        if not known.exists() or time.time() - known.stat().st_mtime > _RESCAN_S:
            temporary = known.with_suffix(f".tmp{os.getpid()}")
            temporary.write_bytes(os.fsencode("\0".join(_private(tops))))
            temporary.rename(known)
        paths = [path for path in os.fsdecode(known.read_bytes()).split("\0") if path]
        if not paths:
            return {}, []
        layer = folder / f"hidden-{_digest(paths)}"
        if not layer.exists():
            temporary = layer.with_suffix(f".tmp{os.getpid()}")
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                for path in paths:
                    _white_out(temporary, path)
            except PermissionError:  # a container without mknod: they are mounted over instead
                shutil.rmtree(temporary, ignore_errors=True)
                return {}, paths
            temporary.rename(layer)
    return {top: (str(layer / top),) for top in tops if (layer / top).is_dir()}, paths


def _private(tops: list[str]) -> list[str]:
    """What others may not read below folders of the host, as paths from the root. A folder stands for all in it."""
    found: list[str] = []
    waiting = list(tops)
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(os.scandir(f"/{folder}"))
        except OSError:
            continue
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_symlink():
                    continue
                mode = entry.stat(follow_symlinks=False).st_mode
                path = f"{folder}/{entry.name}"
                readable = mode & stat.S_IROTH and (not stat.S_ISDIR(mode) or mode & stat.S_IXOTH)
                if not readable:
                    found.append(path)
                elif stat.S_ISDIR(mode):
                    waiting.append(path)
    return sorted(found)


def _white_out(layer: Path, path: str) -> None:
    """Mark a path as deleted. Its folders are merged with the host's, and keep their modes and owners."""
    for parent in reversed(Path(path).parents):
        target, source = layer / parent, Path("/", parent)
        if not target.exists():
            target.mkdir(parents=True)
            info = source.stat()
            os.chown(target, info.st_uid, info.st_gid)
            shutil.copystat(source, target)
    os.mknod(layer / path, stat.S_IFCHR, 0)


def _etc_stamp() -> str:
    """Changes when the host's linker cache or release does, so that an upgraded host gets a new skeleton."""
    stamps = []
    for name in ("ld.so.cache", "os-release", "alternatives"):
        with contextlib.suppress(OSError):
            stamps.append(f"{name}:{os.stat(f'/etc/{name}').st_mtime_ns}")
    return "|".join(stamps)


def _make_skeleton(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, mode in _FOLDERS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name).chmod(mode)
    for name in _TOP:
        host = Path("/", name)
        if host.is_symlink():
            (folder / name).symlink_to(os.readlink(host))
        elif host.is_dir():
            (folder / name).mkdir()
    (folder / _PYTHON_AT).mkdir(parents=True)
    etc = folder / "etc"
    for name in _ETC:
        source, target = Path("/etc", name), etc / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # absent, or readable for root only: then the sandbox does without
            if source.is_symlink():
                target.symlink_to(os.readlink(source))
            elif source.is_dir():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=_not_for_all)
            elif source.is_file() and not _not_for_all("/etc", [name]):
                shutil.copyfile(source, target)
    (etc / "passwd").write_text(_PASSWD)
    (etc / "group").write_text(_GROUP)
    (etc / "shadow").write_text("".join(f"{row.split(':')[0]}:*:19000:0:99999:7:::\n" for row in _PASSWD.splitlines()))
    (etc / "shadow").chmod(0o600)
    (etc / "hostname").write_text("sandbox\n")
    (etc / "hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n")
    (etc / "resolv.conf").write_text("")
    (folder / "var/lib/dpkg/status").write_text("")
    (folder / "var/run").symlink_to("/run")
    if os.getuid() == 0:
        os.chown(folder / "home/agent", 1000, 1000)


def _not_for_all(folder: str, names: list[str]) -> list[str]:
    """Those that only root or a group may read: keys beside certificates, for one."""
    return [n for n in names if not os.lstat(os.path.join(folder, n)).st_mode & stat.S_IROTH]


def _debootstrap(cache_dir: Path) -> Base:
    folder = cache_dir / "rootfs" / "debootstrap"
    with locked(cache_dir / "rootfs" / "debootstrap.lock"):
        if not folder.exists():
            tool = shutil.which("debootstrap")
            if tool is None or os.getuid() != 0:
                raise BaseError(
                    "sandbox.base=debootstrap needs root and the debootstrap program (apt-get install debootstrap) "
                    f"once; or put a root file system at {folder}"
                )
            temporary = folder.with_suffix(f".tmp{os.getpid()}")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            command = [tool, "--variant=minbase", f"--include={_DEBOOTSTRAP_PACKAGES}", _suite(), str(temporary)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DEBOOTSTRAP_TIMEOUT_S, check=False)
            if done.returncode != 0:
                shutil.rmtree(temporary, ignore_errors=True)
                raise BaseError(f"debootstrap failed ({done.returncode}): {(done.stdout + done.stderr)[-500:]}")
            temporary.rename(folder)
    return Base(f"debootstrap:{folder.stat().st_ino}", (("", (str(folder),)),))


def _suite() -> str:
    """The host's own release when it is a Debian, else the current stable."""
    with contextlib.suppress(OSError):
        rows = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
        if rows.get("ID") == "debian" and "VERSION_CODENAME" in rows:
            return rows["VERSION_CODENAME"].strip('"')
    return "stable"
