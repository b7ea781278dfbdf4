"""Layers: the result of a Dockerfile's steps, built once in a sandbox and kept by content hash.

In: a base, an `Image` and the folder its COPY reads. Out: the stack of read-only folders of each tree. Left to others:
parsing (dockerfile.py), mounting (keeper.py). A file lock per layer makes one process build and the others wait; a
layer appears by rename, so a killed build leaves none.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import posixpath
import shlex
import shutil
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import partial
from pathlib import Path

from rl360.sandboxes.local import transfer
from rl360.sandboxes.local.dockerfile import Image, Step
from rl360.sandboxes.local.keeper_client import Keeper
from rl360.sandboxes.local.namespace import SandboxProcess
from rl360.sandboxes.local.plan import Plan, User
from rl360.sandboxes.local.rootfs import Base
from rl360.sandboxes.local.threads import in_thread
from rl360.sandboxes.local.users import UnknownUser, find_user

_LOCK_EVERY_S = 0.05
_FORMAT = "1"  # part of every key; change it when the way layers are built changes

Trees = tuple[tuple[str, tuple[str, ...]], ...]


class BuildError(RuntimeError):
    """A step failed; names the step and the end of its output."""


def key_of(base: Base, image: Image, folder: Path, mode: str, userns: bool) -> str:
    """Hash of everything that the layer depends on: base, steps in order, and the bytes and modes of copied files."""
    digest = hashlib.sha256(repr((_FORMAT, base.name, mode, userns, os.getuid(), image.steps)).encode())
    for step in image.steps:
        for source in step.sources:
            path = folder / source
            files = [path] if path.is_file() or path.is_symlink() else sorted(path.rglob("*"))
            for file in files:
                info = file.lstat()
                digest.update(f"{file.relative_to(folder).as_posix()}\0{stat.S_IMODE(info.st_mode):o}\0".encode())
                if file.is_symlink():
                    digest.update(b"link\0" + os.fsencode(os.readlink(file)))
                elif file.is_file():
                    digest.update(f"{info.st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def base_trees(base: Base) -> Trees:
    return base.trees


def stacked(base: Base, layer: Path, mode: str) -> Trees:
    """The layer on top of the base. Without overlayfs a layer is a whole copy of the root tree, and replaces it."""
    trees: list[tuple[str, tuple[str, ...]]] = []
    for index, (name, lowers) in enumerate(base.trees):
        upper = str(layer / f"upper{index}")
        if mode == "copy":
            trees.append((name, (upper,) if not name else lowers))
        else:
            trees.append((name, (upper, *lowers)))
    return tuple(trees)


async def ensure(
    keeper: Keeper, plan: Plan, base: Base, image: Image, folder: Path, layers_dir: Path, force: bool
) -> Trees:
    """Return the trees of `image`, building its layer first if it is not there. `plan` gives limits, network and mode.

    Raises BuildError.
    """
    if not image.steps:
        return base_trees(base)
    key = await asyncio.to_thread(key_of, base, image, folder, plan.mode, plan.userns)
    layer = layers_dir / key
    if layer.exists() and not force:
        return stacked(base, layer, plan.mode)
    async with _lock(layers_dir / f"{key}.lock"):
        if layer.exists() and force:
            await asyncio.to_thread(shutil.rmtree, layer)
        if not layer.exists():
            temporary = layers_dir / f"{key}.tmp{os.getpid()}"
            await asyncio.to_thread(shutil.rmtree, temporary, True)
            try:
                await _build(keeper, plan, base, image, folder, temporary)
                temporary.rename(layer)
            finally:
                await asyncio.to_thread(shutil.rmtree, temporary, True)
    return stacked(base, layer, plan.mode)


@contextlib.asynccontextmanager
async def _lock(path: Path) -> AsyncIterator[None]:
    """A file lock that waits without blocking the event loop and is released when the waiter is cancelled."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:  # noqa: ASYNC230  (an empty file; the waiting below does not block)
        while True:
            try:
                flock(file, LOCK_EX | LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_EVERY_S)
        yield


async def _build(keeper: Keeper, plan: Plan, base: Base, image: Image, folder: Path, target: Path) -> None:
    uppers = tuple((str(target / f"upper{i}"), str(target / f"work{i}")) for i in range(len(base.trees)))
    target.mkdir(parents=True)
    building = replace(
        plan, trees=base_trees(base), uppers=uppers, disk_mib=0, lifetime_s=0.0, env=dict(plan.env), workdir="/"
    )
    sandbox = SandboxProcess(keeper, building)
    try:
        await sandbox.start()
        for step in image.steps:
            await _apply(sandbox, step, folder)
    except (OSError, UnknownUser) as error:
        raise BuildError(f"layer of {folder}: {error}") from error
    finally:
        await sandbox.stop()
    if sandbox.interrupted:  # a step that goes on after its program was killed looks done
        raise BuildError(f"layer of {folder}: its sandbox was interrupted: {sandbox.interrupted}")
    for _, work in uppers:
        await asyncio.to_thread(shutil.rmtree, work, True)


async def _apply(sandbox: SandboxProcess, step: Step, folder: Path) -> None:
    root = sandbox.root_fd
    if step.kind == "mkdir":
        existed = transfer.kind(root, step.target) == "dir"
        transfer.make_folder(root, step.target)
        if step.user and not existed:
            await _run(sandbox, step, f"chown {shlex.quote(step.user)} {shlex.quote(step.target)}", None)
    elif step.kind == "run":
        user = find_user(root, step.user) if step.user else None
        await _run(sandbox, step, f"exec /bin/sh -c {shlex.quote(step.command)}", user)
    else:
        for source in step.sources:
            path, target = folder / source, step.target
            if path.is_dir():
                await in_thread({"": root}, partial(_upload, transfer.upload_folder, path, target))
            else:
                await in_thread({"": root}, partial(_upload, transfer.upload_file, path, target))
                if target.endswith("/"):
                    target = posixpath.join(target, path.name)
            if step.chown:
                await _run(sandbox, step, f"chown -R {shlex.quote(step.chown)} {shlex.quote(target)}", None)
            if step.chmod:
                await _run(sandbox, step, f"chmod -R {shlex.quote(step.chmod)} {shlex.quote(target)}", None)


def _upload(how: Callable[[int, Path, str], None], path: Path, target: str, root: dict[str, int]) -> None:
    how(root[""], path, target)


async def _run(sandbox: SandboxProcess, step: Step, command: str, user: User | None) -> None:
    done = await sandbox.run(command, cwd=step.workdir, env=dict(step.env), user=user)
    if done.return_code != 0:
        hint = "" if sandbox.plan.network else " (builds have no network unless sandbox.network is true)"
        raise BuildError(
            f"{step.kind.upper()} {step.command or step.target!r} ended with {done.return_code}{hint}: "
            f"{(done.stderr or done.stdout)[-800:]}"
        )
