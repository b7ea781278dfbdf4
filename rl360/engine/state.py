"""What a resume needs, saved so that a crash at any moment leaves one complete checkpoint.

In: the loop's `RunState` and a function that writes the trainer's part into a folder. Out: `checkpoints/` with
complete folders only, `latest.json` and `best.json` that name one each. Left to others: what the trainer writes; the
ledger and the journal, which are files of their own that only grow.

A checkpoint is written under a temporary name, every file and folder is synced, and one rename makes it real. Its
`manifest.json` lists each file's size, so that a folder that lost data in a power failure is not taken for whole. A
trainer that writes in the background leaves all of that to a thread: until its end nothing points at the new folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from rl360.engine.frames import replace_file, sync_folder
from rl360.errors import CheckpointError, RL360Error

STATE = "state.json"
MANIFEST = "manifest.json"
CHECKSUMS = "checksums.json"  # crc32 of each of the trainer's files, verified when a run resumes
TRAINER = "trainer"  # what the trainer wrote
TEMPORARY = ".tmp-"
NAME = re.compile(r"iteration-\d{6,}(-\d+)?")  # a folder of another name, such as somebody's copy, is left alone
POINTERS = ("latest", "best")
CHECKSUM_THREADS = 8  # a core computes about 1 GB/s, and disks that hold 100 GB checkpoints read faster


class PendingWrite(Protocol):
    """What a trainer that writes in the background gives (rl360.protocols.PendingSave)."""

    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands between two iterations. JSON-able; arrays belong to the trainer's part."""

    iteration: int = 0  # the next one to train: as many are done
    version: int = 0  # of the weights
    task_position: int = 0  # of the task cursor
    task_fingerprint: str | None = None  # of the data set that the position counts in
    best_success_rate: float | None = None  # of the evaluations so far
    best_iteration: int | None = None
    last_evaluated: int | None = None  # iteration whose evaluation is complete; one that was cut is made again
    canary: Mapping[str, Any] | None = None  # of a run at learning rate 0: what its mismatch is compared with


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    state: RunState

    @property
    def trainer_folder(self) -> Path:
        return self.folder / TRAINER


class CheckpointStore:
    """`<run_dir>/checkpoints`, one writer.

    Args:
        keep_last: newest checkpoints to keep, at least 1.
        keep_best: keep the one last saved with `best=True` too.
        keep_every: keep those of iterations that are a multiple of this for good; 0: none.
    """

    def __init__(self, run_dir: Path, keep_last: int = 1, keep_best: bool = True, keep_every: int = 0) -> None:
        if keep_last < 1:
            raise RL360Error(f"checkpoint.keep_last: {keep_last}; expected at least 1")
        if keep_every < 0:
            raise RL360Error(f"checkpoint.keep_every: {keep_every}; expected 0 or more")
        self.folder = Path(run_dir) / "checkpoints"
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.keep_every = keep_every
        self._mine: Checkpoint | None = None  # the last one that this object saved
        self._background: Future[Checkpoint] | None = None  # the save that is not complete yet
        self._completed: list[Checkpoint] = []

    def save(
        self, state: RunState, write: Callable[[Path], PendingWrite | None], best: bool = False
    ) -> Checkpoint | None:
        """Save and then delete what retention no longer keeps. Waits for an earlier save first.

        `write` gets a path that does not exist yet, inside an existing folder. Where it returns something to wait for,
        the rest is done in the background, and None is returned; `completed` and `wait` tell. This store writes the
        weights of an iteration once: a second save of the same iteration and version replaces the state alone, without
        `write`.
        """
        self.wait()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        mine = read_checkpoint(self._mine.folder) if self._mine is not None else None
        if mine is not None and (mine.state.iteration, mine.state.version) == (state.iteration, state.version):
            replace_file(mine.folder / STATE, _dump(asdict(state)))
            return self._settle(Checkpoint(mine.folder, state), best)
        temporary, final = self._new_folder(state)
        pending = write(temporary / TRAINER)
        if pending is None:
            return self._finish(temporary, final, state, best)
        background: Future[Checkpoint] = Future()

        def finish() -> None:
            try:
                pending.wait()
                background.set_result(self._finish(temporary, final, state, best))
            except BaseException as error:  # raised where the loop asks: by `completed`, `wait` or the next `save`
                background.set_exception(error)

        self._background = background
        threading.Thread(target=finish, name="checkpoint", daemon=True).start()
        return None

    def completed(self) -> list[Checkpoint]:
        """What has become complete since the last call. Raises what went wrong in the background."""
        if self._background is not None and self._background.done():
            self.wait()
        found, self._completed = self._completed, []
        return found

    def wait(self) -> None:
        """Until no save is open. Raises what went wrong in the background."""
        background, self._background = self._background, None
        if background is not None:
            background.result()

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint; None when the run has none. `latest.json` is for people and scripts: a crash
        can leave it one behind."""
        return next(iter(self.complete()), None)

    def damaged(self) -> list[str]:
        """Checkpoint folders that are not whole, one line each."""
        return [
            f"{folder} is incomplete or damaged"
            for folder in sorted(self._folders())
            if read_checkpoint(folder) is None
        ]

    def best(self) -> Checkpoint | None:
        return self._pointed("best")

    def complete(self) -> list[Checkpoint]:
        """Every complete checkpoint, the newest first."""
        found = [read_checkpoint(folder) for folder in self._folders()]
        whole = (one for one in found if one is not None)
        return sorted(whole, key=lambda one: (one.state.iteration, _serial(one.folder)), reverse=True)

    # ---- inside

    def _folders(self) -> list[Path]:
        """The store's own, whole or not; a link to one that was moved to another disk is one, too."""
        return [path for path in self.folder.glob("iteration-*") if NAME.fullmatch(path.name) and path.is_dir()]

    def _new_folder(self, state: RunState) -> tuple[Path, Path]:
        """(where to write, what that becomes)."""
        # A resumed run may come to an iteration that has a folder; that one stays until the new one is complete.
        name = f"iteration-{state.iteration:06d}"
        taken = [path.name for path in self.folder.glob(f"{name}*")]
        serials = [_serial(Path(found)) for found in taken if NAME.fullmatch(found)]
        final = self.folder / (f"{name}-{max(serials) + 1}" if serials else name)
        temporary = self.folder / f"{TEMPORARY}{name}"
        temporary.mkdir()
        return temporary, final

    def _finish(self, temporary: Path, final: Path, state: RunState, best: bool) -> Checkpoint:
        """The trainer's files are written: make a checkpoint of them."""
        if not (temporary / TRAINER).exists():
            raise CheckpointError(f"the trainer wrote nothing to {temporary / TRAINER}")
        (temporary / STATE).write_bytes(_dump(asdict(state)))
        sums = {str(path.relative_to(temporary)): value for path, value in _checksums(_files(temporary / TRAINER))}
        (temporary / CHECKSUMS).write_bytes(_dump(sums))
        sizes = {str(p.relative_to(temporary)): p.stat().st_size for p in _files(temporary) if p.name != STATE}
        (temporary / MANIFEST).write_bytes(_dump(sizes))
        _sync_tree(temporary)
        os.rename(temporary, final)
        sync_folder(self.folder)
        return self._settle(Checkpoint(final, state), best)

    def _settle(self, made: Checkpoint, best: bool) -> Checkpoint:
        self._mine = made
        self._point("latest", made.folder)
        if best:
            self._point("best", made.folder)
        self._retain()
        self._completed.append(made)
        return made

    def _point(self, name: str, target: Path) -> None:
        replace_file(self.folder / f"{name}.json", _dump({"checkpoint": target.name}))

    def _pointed(self, name: str) -> Checkpoint | None:
        try:
            pointer = json.loads((self.folder / f"{name}.json").read_text())
            return read_checkpoint(self.folder / pointer["checkpoint"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _retain(self) -> None:
        complete = self.complete()
        keep = {one.folder for one in complete[: self.keep_last]}
        if self.keep_every:
            newest = {one.state.iteration: one.folder for one in reversed(complete)}  # of two of one iteration
            keep |= {folder for iteration, folder in newest.items() if iteration and iteration % self.keep_every == 0}
        for name in POINTERS if self.keep_best else POINTERS[:1]:
            if (pointed := self._pointed(name)) is not None:
                keep.add(pointed.folder)
        if not keep:
            return
        for folder in self._folders():
            if folder not in keep:
                doomed = self.folder / f"{TEMPORARY}deleted-{folder.name}"
                os.rename(folder, doomed)  # in one step no checkpoint any more, however long the deletion takes
                _remove(doomed)

    def _remove_leftovers(self) -> None:
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            _remove(leftover)
        for half_written in self.folder.glob(".*.json.tmp"):
            half_written.unlink()


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """None unless the folder is complete: its state reads and every file has the size that the manifest says."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
        known = {f.name for f in fields(RunState)}
        row = json.loads((folder / STATE).read_text())
        state = RunState(**{key: value for key, value in row.items() if key in known})
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
        whole = whole and CHECKSUMS in sizes and type(row["iteration"]) is int and type(row["version"]) is int
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Checkpoint(folder, state) if whole else None


def verify_checkpoint(checkpoint: Checkpoint) -> None:
    """Read every file of the trainer's part once. Raises CheckpointError naming the first whose bytes have changed."""
    try:
        sums = dict(json.loads((checkpoint.folder / CHECKSUMS).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.folder / CHECKSUMS}: unreadable ({error})") from error
    for path, found in _checksums([checkpoint.folder / name for name in sums]):
        if found != sums[str(path.relative_to(checkpoint.folder))]:
            raise CheckpointError(f"{path}: its bytes are not those that were saved; restore it")


def _remove(path: Path) -> None:
    """A folder with what is in it; of a link only itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _checksums(paths: list[Path]) -> list[tuple[Path, int]]:
    with ThreadPoolExecutor(CHECKSUM_THREADS) as pool:
        return list(zip(paths, pool.map(_crc32, paths), strict=True))


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


@contextmanager
def only_writer(run_dir: Path) -> Iterator[None]:
    """Hold a run folder. Raises RL360Error when another process has it; released by the kernel when we die."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / ".lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "?"
            raise RL360Error(f"{run_dir}: in use by process {holder}; wait for it or end it") from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _serial(folder: Path) -> int:
    """1 for `iteration-000004`, 2 for `iteration-000004-2`."""
    parts = folder.name.split("-")
    return int(parts[2]) if len(parts) > 2 else 1


def _dump(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync_tree(folder: Path) -> None:
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    for inner in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync_folder(inner)
