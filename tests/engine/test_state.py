"""Checkpoints: one complete one through a crash at any step, the right ones kept, the newest found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl360.engine.run import _starting_state
from rl360.engine.state import CheckpointStore, RunState, only_writer, read_checkpoint, verify_checkpoint
from rl360.errors import CheckpointError, RL360Error


def weights(version: int):
    """A trainer that writes two files in a folder of its own."""

    def write(folder: Path) -> None:
        (folder / "inner").mkdir(parents=True)
        (folder / "trainer.pt").write_bytes(bytes([version]) * 100)
        (folder / "inner" / "moments.bin").write_bytes(bytes([version]) * 50)

    return write


def version_on_disk(folder: Path) -> int:
    return (folder / "trainer" / "trainer.pt").read_bytes()[0]


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_state_comes_back_as_saved(tmp_path):
    state = RunState(3, 2, 12, "ab", 0.5, 2, 2)
    CheckpointStore(tmp_path).save(state, weights(2))
    found = CheckpointStore(tmp_path).latest()
    assert found is not None
    assert found.state == state
    assert version_on_disk(found.folder) == 2
    assert found.trainer_folder == found.folder / "trainer"


def test_a_new_run_has_no_checkpoint(tmp_path):
    assert CheckpointStore(tmp_path).latest() is None
    assert CheckpointStore(tmp_path).best() is None
    with pytest.raises(RL360Error, match="keep_last"):
        CheckpointStore(tmp_path, keep_last=0)


def test_retention_keeps_the_last_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for iteration in range(1, 6):
        store.save(RunState(iteration, iteration), weights(iteration), best=iteration == 2)
    assert names(store) == [
        "best.json",
        "iteration-000002",
        "iteration-000004",
        "iteration-000005",
        "latest.json",
    ]
    best = store.best()
    assert best is not None
    assert best.state.iteration == 2
    without_best = CheckpointStore(tmp_path, keep_last=1, keep_best=False)
    without_best.save(RunState(6, 6), weights(6), best=True)
    without_best.save(RunState(7, 7), weights(7))
    assert [one.state.iteration for one in without_best.complete()] == [7]


def test_every_so_many_are_kept_for_good(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=False, keep_every=4)
    for iteration in range(10):
        store.save(RunState(iteration, iteration), weights(iteration))
    assert [one.state.iteration for one in store.complete()] == [9, 8, 4]
    store.save(RunState(8, 80), weights(80))  # trained again after a resume: the new one of the two
    assert [one.state.version for one in store.complete()] == [9, 80, 4]
    with pytest.raises(RL360Error, match=r"keep_every: -1"):
        CheckpointStore(tmp_path, keep_every=-1)


def test_a_second_save_of_an_iteration_replaces_the_state_alone(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(RunState(4, 4, best_success_rate=0.1), weights(4))

    def never(folder: Path) -> None:
        raise AssertionError("weights of this iteration are on disk")

    store.save(RunState(4, 4, best_success_rate=0.9), never, best=True)
    assert store.latest() == store.best()
    latest = store.latest()
    assert latest is not None
    assert latest.state.best_success_rate == 0.9


def test_same_iteration_of_another_version_is_written_anew(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(RunState(4, 3), weights(3))
    store.save(RunState(4, 4), weights(4))
    latest = store.latest()
    assert latest is not None
    assert (latest.state.version, version_on_disk(latest.folder)) == (4, 4)


@pytest.mark.parametrize("damage", ["short", "missing", "no_manifest", "no_state", "half_state"])
def test_an_incomplete_folder_is_not_a_checkpoint(tmp_path, damage):
    store = CheckpointStore(tmp_path, keep_last=2)
    store.save(RunState(1, 1), weights(1))
    newest = store.save(RunState(2, 2), weights(2)).folder
    if damage == "short":
        os.truncate(newest / "trainer" / "trainer.pt", 99)
    elif damage == "missing":
        (newest / "trainer" / "inner" / "moments.bin").unlink()
    elif damage == "no_manifest":
        (newest / "manifest.json").unlink()
    elif damage == "no_state":
        (newest / "state.json").unlink()
    else:
        os.truncate(newest / "state.json", 20)
    assert read_checkpoint(newest) is None
    latest = store.latest()
    assert latest is not None
    assert latest.state.iteration == 1
    store.save(RunState(2, 2), weights(2))
    latest = store.latest()
    assert latest is not None
    assert latest.state.iteration == 2


@pytest.mark.parametrize("text", ["null", "[]", "5", '"x"', "{}", '{"iteration": "2"}', '{"iteration": null}'])
@pytest.mark.parametrize("file", ["state.json", "manifest.json", "best.json", "latest.json"])
def test_a_file_that_holds_something_else_is_damage_and_no_bug(tmp_path, file, text):
    store = CheckpointStore(tmp_path, keep_last=2)
    store.save(RunState(1, 1), weights(1))
    newest = store.save(RunState(2, 2), weights(2), best=True).folder
    ((newest if (newest / file).exists() else store.folder) / file).write_text(text)
    if file == "latest.json":
        (store.folder / "best.json").unlink()
    assert store.best() is None
    assert len(store.damaged()) == (file in ("state.json", "manifest.json"))
    latest = CheckpointStore(tmp_path).latest()
    assert latest is not None
    assert latest.state.iteration == (2 if file in ("best.json", "latest.json") else 1)
    verify_checkpoint(latest)
    store.save(RunState(3, 3), weights(3))
    latest = store.latest()
    assert latest is not None
    assert latest.state.iteration == 3


def test_copies_that_somebody_made_are_neither_counted_nor_deleted(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=False)
    store.save(RunState(1, 1), weights(1))
    mine = ["iteration-000001-backup", "iteration-000001.bak", "iteration-000001 (copy)", "iteration-old"]
    for name in mine:
        shutil.copytree(store.folder / "iteration-000001", store.folder / name)
    (store.folder / "iteration-notes.txt").write_text("the second one is the good one")
    assert [one.folder.name for one in store.complete()] == ["iteration-000001"]
    store.save(RunState(1, 10), weights(10))
    store.save(RunState(2, 2), weights(2))
    assert names(store) == sorted([*mine, "iteration-notes.txt", "iteration-000002", "latest.json"])
    assert store.damaged() == []


def test_a_checkpoint_that_was_moved_away_and_linked(tmp_path):
    """It counts like any; when its time has come the link goes, and what it points at stays."""
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=False)
    moved = store.save(RunState(1, 1), weights(1)).folder
    elsewhere = moved.rename(tmp_path / "large disk")
    moved.symlink_to(elsewhere)
    assert CheckpointStore(tmp_path).latest().state.iteration == 1
    store.save(RunState(2, 2), weights(2))
    assert names(store) == ["iteration-000002", "latest.json"]
    assert read_checkpoint(elsewhere) is not None


def test_a_lost_or_broken_pointer_does_not_lose_the_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(RunState(2, 2), weights(2))
    for damage in ("", "{", json.dumps({"checkpoint": "gone"})):
        (store.folder / "latest.json").write_text(damage)
        latest = store.latest()
        assert latest is not None
        assert latest.state.iteration == 2


def test_a_trainer_that_fails_leaves_the_old_one(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(RunState(1, 1), weights(1))

    def full(folder: Path) -> None:
        weights(2)(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.save(RunState(2, 2), full)
    with pytest.raises(CheckpointError, match="wrote nothing"):
        store.save(RunState(2, 2), lambda folder: None)
    latest = store.latest()
    assert latest is not None
    assert version_on_disk(latest.folder) == 1
    store.save(RunState(2, 2), weights(2))
    assert not [name for name in names(store) if name.startswith(".tmp-")]


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch):
    """A killed process loses nothing that the kernel has, so the many saves below need not wait. Still counted."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class Crash(BaseException):
    """The process ends here: nothing that follows may run."""


class CrashAt:
    """Replaces calls that change the disk, and crashes before the n-th of them."""

    CALLS = ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        self.left = step
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))
        monkeypatch.setattr(Path, "write_bytes", self.counted(Path.write_bytes))

    def counted(self, call):
        def counting(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise Crash
            return call(*args, **kwargs)

        return counting


def crash_in_save(store: CheckpointStore, step: int, state: RunState, best: bool) -> bool:
    """Whether the save crashed before its step-th change of the disk."""
    with pytest.MonkeyPatch.context() as patch:
        CrashAt(patch, step)
        try:
            store.save(state, weights(state.version), best=best)
        except Crash:
            return True
    return False


@pytest.mark.usefixtures("no_waiting_for_the_disk")
@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("keep_best", [False, True])
def test_a_crash_at_any_step_leaves_a_complete_checkpoint(tmp_path, best, keep_best):
    steps = 0
    while True:
        run = tmp_path / str(steps)
        store = CheckpointStore(run, keep_last=1, keep_best=keep_best)
        store.save(RunState(1, 1), weights(1), best=True)
        store.save(RunState(2, 2), weights(2))
        crashed = crash_in_save(store, steps, RunState(3, 3), best)
        again = CheckpointStore(run, keep_last=1, keep_best=keep_best)
        latest = again.latest()
        assert latest is not None, f"nothing left after a crash at step {steps}"
        assert latest.state.iteration in (2, 3)
        assert version_on_disk(latest.folder) == latest.state.version
        if keep_best:
            pointed = again.best()
            assert pointed is not None
            assert pointed.state.iteration in ((1, 3) if best else (1,))
        again.save(RunState(4, 4), weights(4))
        latest = again.latest()
        assert latest is not None
        assert latest.state.iteration == 4
        assert not [name for name in names(again) if name.startswith(".")]
        if not crashed:
            break
        steps += 1
    assert steps > 15  # every file, folder and rename was a step


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_crash_in_a_second_save_of_an_iteration_keeps_it(tmp_path):
    steps = 0
    crashed = True
    while crashed:
        store = CheckpointStore(tmp_path / str(steps))
        store.save(RunState(1, 1, best_success_rate=1.0), weights(1))
        crashed = crash_in_save(store, steps, RunState(1, 1, best_success_rate=2.0), best=True)
        latest = CheckpointStore(tmp_path / str(steps)).latest()
        assert latest is not None
        assert latest.state.best_success_rate in (1.0, 2.0)
        steps += 1


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_resumed_run_that_saves_its_iteration_again_is_safe_at_any_step(tmp_path):
    """Another process wrote iteration 1: its weights are replaced, since those trained again may differ."""
    steps = 0
    crashed = True
    while crashed:
        run = tmp_path / str(steps)
        CheckpointStore(run).save(RunState(1, 1), weights(1))
        crashed = crash_in_save(CheckpointStore(run), steps, RunState(1, 2), best=False)
        latest = CheckpointStore(run).latest()
        assert latest is not None
        assert version_on_disk(latest.folder) == latest.state.version
        steps += 1
    assert latest.state.version == 2
    assert names(CheckpointStore(run)) == ["iteration-000001-2", "latest.json"]


def test_only_one_process_writes_a_run(tmp_path):
    code = "import sys; from pathlib import Path; from rl360.engine.state import only_writer\n"
    code += "with only_writer(Path(sys.argv[1])): print('mine')"
    env = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    with only_writer(tmp_path):
        other = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert f"in use by process {os.getpid()}" in other.stderr
    free = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert free.stdout == "mine\n"


def test_flipped_bytes_are_noticed_before_a_run_goes_on(tmp_path):
    store = CheckpointStore(tmp_path)
    saved = store.save(RunState(1, 1), weights(1))
    verify_checkpoint(saved)
    victim = next(path for path in saved.trainer_folder.rglob("*") if path.is_file())
    data = bytearray(victim.read_bytes())
    data[0] ^= 0xFF
    victim.write_bytes(data)  # the size is as it was
    assert store.latest() is not None
    with pytest.raises(CheckpointError, match=victim.name):
        verify_checkpoint(store.latest())


def test_a_changed_checkpoint_is_refused_with_the_way_to_the_older_one(tmp_path):
    store, cursor = CheckpointStore(tmp_path, keep_last=2), SimpleNamespace(fingerprint=None, position=0)
    store.save(RunState(1, 1), weights(1))
    newest = store.save(RunState(2, 2), weights(2)).folder
    (newest / "trainer" / "trainer.pt").write_bytes(bytes([7]) * 100)
    with pytest.raises(CheckpointError, match=rf"restore it, or move {newest} away to go on from iteration-000001$"):
        _starting_state(store, store.latest(), cursor)
    newest.rename(tmp_path / "away")
    assert _starting_state(store, store.latest(), cursor).iteration == 1
    (store.folder / "iteration-000001" / "trainer" / "trainer.pt").write_bytes(bytes([7]) * 100)
    with pytest.raises(CheckpointError, match=r"restore it$"):
        _starting_state(store, store.latest(), cursor)


def test_a_cut_checkpoint_is_named(tmp_path):
    store = CheckpointStore(tmp_path)
    saved = store.save(RunState(1, 1), weights(1))
    victim = next(path for path in saved.trainer_folder.rglob("*") if path.is_file())
    victim.write_bytes(b"")
    assert store.latest() is None
    (line,) = store.damaged()
    assert saved.folder.name in line


# ---- trainers that write in the background


class Slow:
    """A trainer whose files are complete when the test says so."""

    def __init__(self, version: int, fails: BaseException | None = None) -> None:
        self.version = version
        self.fails = fails
        self.may_end = threading.Event()
        self.began = threading.Event()

    def __call__(self, folder: Path) -> Slow:
        folder.mkdir()
        (folder / "half.bin").write_bytes(b"half")
        self.folder = folder
        self.began.set()
        return self

    def wait(self) -> None:
        assert self.may_end.wait(30)
        if self.fails is not None:
            raise self.fails
        (self.folder / "half.bin").unlink()
        weights(self.version)(self.folder / "files")
        os.rename(self.folder / "files" / "trainer.pt", self.folder / "trainer.pt")


def test_nothing_points_at_a_checkpoint_that_is_being_written(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=True)
    store.save(RunState(1, 1), weights(1), best=True)
    assert [one.state.iteration for one in store.completed()] == [1]
    slow = Slow(2)
    assert store.save(RunState(2, 2), slow, best=True) is None
    assert store.completed() == []
    for found in (store.latest(), store.best(), CheckpointStore(tmp_path).latest()):
        assert found is not None
        assert found.state.iteration == 1
    assert json.loads((store.folder / "latest.json").read_text()) == {"checkpoint": "iteration-000001"}
    slow.may_end.set()
    store.wait()
    assert [one.state.iteration for one in store.completed()] == [2]
    assert store.completed() == []
    assert store.latest() == store.best()
    assert names(store) == ["best.json", "iteration-000002", "latest.json"]
    verify_checkpoint(store.latest())


def test_the_next_save_waits_for_the_one_before(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    first = Slow(1)
    store.save(RunState(1, 1), first)
    second = Slow(2)
    saving = threading.Thread(target=store.save, args=(RunState(2, 2), second))
    saving.start()
    assert not second.began.wait(0.2)
    first.may_end.set()
    assert second.began.wait(30)
    second.may_end.set()
    saving.join(30)
    store.wait()
    assert [one.state.iteration for one in store.completed()] == [1, 2]


def test_a_second_save_of_an_iteration_in_the_background_is_one_checkpoint(tmp_path):
    """As the best of its evaluation, and because it is due."""
    store = CheckpointStore(tmp_path)
    slow = Slow(4)
    slow.may_end.set()
    store.save(RunState(4, 4, best_success_rate=0.1), slow, best=True)

    def never(folder: Path) -> None:
        raise AssertionError("weights of this iteration are on disk")

    store.save(RunState(4, 4, best_success_rate=0.9), never)
    assert store.latest() == store.best()
    assert store.latest().state.best_success_rate == 0.9


@pytest.mark.parametrize("ask", ["completed", "wait", "save"])
def test_what_goes_wrong_in_the_background_is_raised_where_the_loop_asks(tmp_path, ask):
    store = CheckpointStore(tmp_path)
    store.save(RunState(1, 1), weights(1))
    slow = Slow(2, OSError(28, "No space left on device"))
    store.save(RunState(2, 2), slow)
    background = store._background
    slow.may_end.set()
    with pytest.raises(OSError, match="No space left"):
        background.result(30)
    arguments = (RunState(3, 3), weights(3)) if ask == "save" else ()
    with pytest.raises(OSError, match="No space left"):
        getattr(store, ask)(*arguments)
    latest = store.latest()
    assert latest is not None
    assert latest.state.iteration == 1
    store.save(RunState(3, 3), weights(3))
    assert not [name for name in names(store) if name.startswith(".tmp-")]


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_a_crash_at_any_step_of_a_background_save_leaves_a_complete_checkpoint(tmp_path):
    steps = 0
    crashed = True
    while crashed:
        run = tmp_path / str(steps)
        store = CheckpointStore(run, keep_last=1)
        store.save(RunState(1, 1), weights(1), best=True)
        store.save(RunState(2, 2), weights(2))
        with pytest.MonkeyPatch.context() as patch:
            CrashAt(patch, steps)
            try:
                slow = Slow(3)
                slow.may_end.set()
                store.save(RunState(3, 3), slow, best=True)
                store.wait()
                crashed = False
            except Crash:
                crashed = True
        again = CheckpointStore(run, keep_last=1)
        latest, best = again.latest(), again.best()
        assert latest is not None, f"nothing left after a crash at step {steps}"
        assert best is not None
        assert latest.state.iteration in (2, 3)
        assert best.state.iteration in (1, 3)
        assert version_on_disk(latest.folder) == latest.state.version
        verify_checkpoint(latest)
        again.save(RunState(4, 4), weights(4))
        assert not [name for name in names(again) if name.startswith(".")]
        steps += 1
    assert steps > 15


KILLED = """
import os, sys, threading, time
from pathlib import Path
from rl360.engine.state import CheckpointStore, RunState

class Pending:
    def __init__(self, folder, version): self.folder, self.version = folder, version
    def wait(self):
        for part in range(40):
            (self.folder / f"part-{part}").write_bytes(bytes([self.version]) * 20_000)
            time.sleep(0.0005)

def begin(version):
    def write(folder):
        folder.mkdir()
        (folder / "trainer.pt").write_bytes(bytes([version]))
        return Pending(folder, version)
    return write

store = CheckpointStore(Path(sys.argv[1]), keep_last=1, keep_best=False)
print("begun", flush=True)
for version in range(1, 200):
    store.save(RunState(version, version), begin(version))
"""


@pytest.mark.parametrize("delay_s", [0.01, 0.05, 0.11, 0.23])
def test_a_killed_process_leaves_a_complete_checkpoint(tmp_path, delay_s):
    """SIGKILL while saves follow each other without a pause: whatever is found is whole, and the next run saves on."""
    CheckpointStore(tmp_path).save(RunState(0, 0), weights(0))
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(delay_s)
        process.kill()
    store = CheckpointStore(tmp_path)
    latest = store.latest()
    assert latest is not None
    verify_checkpoint(latest)
    assert version_on_disk(latest.folder) == latest.state.version
    store.save(RunState(500, 500), weights(7))
    assert not [name for name in names(store) if name.startswith(".")]
