"""What is carried from one disk to another, on plain folders."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.sandboxes.artifact_paths import Artifact, problems_of
from rl360.sandboxes.local import artifacts
from rl360.sandboxes.local.artifacts import ArtifactsTooLarge, Disk, carry, resolve
from rl360.sandboxes.local.syscalls import OF_THE_HOST

APP = Artifact("/app", required=True)


class Disks:
    """Two folders that stand for the disks of two sandboxes."""

    def __init__(self, folder: Path):
        self.old, self.new = folder / "old", folder / "new"
        for path in (self.old / "app", self.new / "app"):
            path.mkdir(parents=True)

    def carry(self, *more: Artifact, max_bytes: int = 10**6) -> Any:
        fds = [os.open(path, os.O_PATH) for path in (self.old, self.new)]
        try:
            return carry(Disk({"": fds[0]}), Disk({"": fds[1]}), more or [APP], max_bytes)
        finally:
            for fd in fds:
                os.close(fd)

    def both(self, name: str, text: str) -> None:
        """A file that the image brought: one file in both overlays, with the same times."""
        for root in (self.old, self.new):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.old / name).write_text(text)
        os.link(self.old / name, self.new / name)


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


def tree(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = f"-> {os.readlink(path)}" if path.is_symlink() else "/" if path.is_dir() else path.read_text()
    return found


def test_new_changed_and_deleted(disks: Disks) -> None:
    disks.both("app/same", "same")
    disks.both("app/gone", "gone")
    disks.both("app/folder/gone", "gone")
    (disks.old / "app/gone").unlink()
    shutil.rmtree(disks.old / "app/folder")
    (disks.new / "app/changed").write_text("before")
    (disks.old / "app/changed").write_text("after")
    (disks.old / "app/sub").mkdir(mode=0o750)
    (disks.old / "app/sub/run.sh").write_text("echo")
    (disks.old / "app/sub/run.sh").chmod(0o755)
    os.utime(disks.old / "app/sub/run.sh", (1, 2))
    inode = (disks.new / "app/same").stat().st_ino
    carried = disks.carry()
    assert tree(disks.new / "app") == {"same": "same", "changed": "after", "sub": "/", "sub/run.sh": "echo"}
    assert (disks.new / "app/same").stat().st_ino == inode  # not copied
    assert (disks.new / "app/sub").stat().st_mode & 0o777 == 0o750
    assert (disks.new / "app/sub/run.sh").stat().st_mode & 0o777 == 0o755
    assert (disks.new / "app/sub/run.sh").stat().st_mtime == 2
    assert (carried.files, carried.num_refused, carried.bytes_left) == (2, 0, 10**6 - len("after") - len("echo"))


def test_kinds_that_change_places(disks: Disks) -> None:
    disks.both("app/file-then-folder", "x")
    disks.both("app/folder-then-file/x", "x")
    (disks.old / "app/file-then-folder").unlink()
    (disks.old / "app/file-then-folder").mkdir()
    shutil.rmtree(disks.old / "app/folder-then-file")
    (disks.old / "app/folder-then-file").write_text("y")
    disks.carry()
    assert tree(disks.new / "app") == {"file-then-folder": "/", "folder-then-file": "y"}


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        ("file", "file"),
        ("sub/inner", "sub/inner"),
        ("/app/file", "file"),
        ("/app/sub/../file", None),  # an absolute one with ".." is not worth the doubt
        ("not-there", "not-there"),
        ("..", None),
        ("../app/file", None),
        ("/", None),
        ("/etc/passwd", None),
        ("/apple", None),
        ("sub/up/../../outside", None),  # by its letters it stays inside: sub/up is a link to the top
        ("images/passwd", None),  # through a link of the image that leaves
        ("images/not-there", None),
        ("/app", "."),
    ],
)
def test_links(disks: Disks, target: str, kept: str | None) -> None:
    (disks.old / "app/sub/deep").mkdir(parents=True)
    (disks.old / "app/sub/inner").write_text("x")
    (disks.old / "app/file").write_text("x")
    (disks.old / "app/sub/up").symlink_to("..")
    for root in (disks.old, disks.new):
        (root / "outside").write_text("x")
    os.symlink("/etc", disks.new / "app/images")
    os.link(disks.new / "app/images", disks.old / "app/images", follow_symlinks=False)
    (disks.old / "app/link").symlink_to(target)
    carried = disks.carry()
    link = disks.new / "app/link"
    assert (os.readlink(link) if link.is_symlink() else None) == kept
    assert carried.refused == ([] if kept else ["/app/link: a link that leaves the artifact"])
    assert os.readlink(disks.new / "app/images") == "/etc"  # the image's own stays


def test_an_absolute_link_below_a_folder_becomes_relative(disks: Disks) -> None:
    (disks.old / "app/a/b").mkdir(parents=True)
    (disks.old / "app/file").write_text("x")
    (disks.old / "app/a/b/link").symlink_to("/app/file")
    disks.carry()
    assert os.readlink(disks.new / "app/a/b/link") == "../../file"


def test_a_refused_entry_does_not_bring_the_images_back(disks: Disks) -> None:
    disks.both("app/data", "image")
    (disks.old / "app/data").unlink()
    os.mkfifo(disks.old / "app/data")
    carried = disks.carry()
    assert tree(disks.new / "app") == {}
    assert carried.refused == ["/app/data: not a file, a folder or a link"]


def test_special_bits_and_hard_links(disks: Disks) -> None:
    (disks.old / "app/one").write_text("x")
    (disks.old / "app/one").chmod(0o6755)
    os.link(disks.old / "app/one", disks.old / "app/two")
    os.link(disks.old / "app/one", disks.old / "outside")
    disks.carry()
    assert (disks.new / "app/one").stat().st_mode & 0o7777 == 0o755
    assert (disks.new / "app/one").stat().st_nlink == 1
    assert not (disks.new / "outside").exists()


@pytest.mark.parametrize("instead", ["nothing", "link", "file", "pipe"])
def test_the_working_folder_exists_in_any_case(disks: Disks, instead: str) -> None:
    disks.both("app/file", "image")
    shutil.rmtree(disks.old / "app")
    if instead == "link":
        (disks.old / "app").symlink_to("/")
    elif instead == "file":
        (disks.old / "app").write_text("x")
    elif instead == "pipe":
        os.mkfifo(disks.old / "app")
    carried = disks.carry()
    assert (disks.new / "app").is_dir()
    assert tree(disks.new / "app") == {}
    assert carried.num_refused == (instead != "nothing")


def test_declared_files_folders_and_exclusions(disks: Disks) -> None:
    (disks.old / "srv/out").mkdir(parents=True)
    for name in ("srv/out/keep", "srv/out/drop.log", "srv/one", "srv/other"):
        (disks.old / name).write_text("x")
    disks.carry(APP, Artifact("/srv/out", ("*.log",)), Artifact("/srv/one"), Artifact("/srv/missing"))
    assert tree(disks.new / "srv") == {"one": "x", "out": "/", "out/keep": "x"}


def test_a_declared_path_through_a_link_of_the_image(disks: Disks) -> None:
    for root in (disks.old, disks.new):
        (root / "srv/real").mkdir(parents=True)
        (root / "data").symlink_to("/srv/real")
    (disks.old / "srv/real/x").write_text("x")
    (disks.old / "srv/evil").mkdir()
    (disks.old / "data").unlink()
    (disks.old / "data").symlink_to("/srv/evil")  # the agent's idea of where /data is does not count
    disks.carry(Artifact("/data"))
    assert tree(disks.new / "srv/real") == {"x": "x"}
    fd = os.open(disks.new, os.O_PATH)
    assert resolve(Disk({"": fd}), "/data/x/../y") == "/srv/real/y"
    os.close(fd)


def test_limits(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    (disks.old / "app/big").write_bytes(b"x" * 1000)
    with pytest.raises(ArtifactsTooLarge, match="bytes"):
        disks.carry(max_bytes=999)
    assert disks.carry(max_bytes=1000).bytes_left == 0
    monkeypatch.setattr(artifacts, "MAX_ENTRIES", 3)
    for i in range(4):
        (disks.old / f"app/{i}").touch()
    with pytest.raises(ArtifactsTooLarge, match="more than 3 files"):
        disks.carry()


def test_folders_and_links_count_as_files(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays as the image has it does not count: nothing is made for it."""
    monkeypatch.setattr(artifacts, "MAX_MADE", 3)
    for i in range(5):
        disks.both(f"app/same{i}", "same")
    (disks.old / "app/a/b").mkdir(parents=True)
    (disks.old / "app/link").symlink_to("a")
    assert disks.carry().made_left == 0
    for i in range(4):
        (disks.old / f"app/c{i}").mkdir()
    with pytest.raises(ArtifactsTooLarge, match="more than 3 new or changed files and folders"):
        disks.carry()


def test_names_that_are_no_text(disks: Disks) -> None:
    os.symlink("/etc/passwd", os.fsencode(disks.old / "app") + b"/\xff")
    carried = disks.carry()
    assert carried.refused == ["/app/\\xff: a link that leaves the artifact"]
    "".join(carried.refused).encode()  # can be logged and stored


def test_a_level_holds_two_descriptors(disks: Disks) -> None:
    path = disks.old / "app"
    for _ in range(artifacts.MAX_DEPTH):
        path = path / "d"
        path.mkdir()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2 * artifacts.MAX_DEPTH + 8, before[1]))
    try:
        disks.carry()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_hole_stays_a_hole(disks: Disks) -> None:
    with open(disks.old / "app/hole", "wb") as file:
        file.truncate(2**40)
        file.seek(2**30)
        file.write(b"data")
    disks.carry(max_bytes=2**20)
    info = (disks.new / "app/hole").stat()
    assert info.st_size == 2**40
    assert info.st_blocks * 512 < 2**20
    with open(disks.new / "app/hole", "rb") as file:
        file.seek(2**30)
        assert file.read(4) == b"data"


def test_folders_too_deep(disks: Disks) -> None:
    path = disks.old / "app"
    for _ in range(artifacts.MAX_DEPTH + 1):
        path = path / "d"
        path.mkdir()
    with pytest.raises(ArtifactsTooLarge, match="deeper"):
        disks.carry()


def test_paths_that_cannot_be_artifacts() -> None:
    fine = ["/app", "/root", "/usr/src/app", "/var/www/html", "/etc/nginx", "/srv", "/logs/agent", "/opt/x", "/tmp/out"]
    assert problems_of(fine) == []
    system = [
        "/",
        "/usr",
        "/usr/local",
        "/etc",
        "/var",
        "/bin/x",
        "/usr/lib/python3",
        "/tests",
        "/logs",
        "/proc/1",
        "/app/..",
    ]
    assert len(problems_of(system)) == len(system)
    assert problems_of(["relative"]) == ["artifact 'relative': expected an absolute path"]


NAMES = st.sampled_from(["a", "b", "c"])
ENTRY = st.one_of(
    st.tuples(st.just("file"), NAMES),
    st.tuples(st.just("folder"), NAMES),
    st.tuples(st.just("link"), st.lists(st.sampled_from(["..", "a", "b", "c", "/app", "/", "/app/a"]), max_size=4)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=3), ENTRY), max_size=12))
def test_no_link_ever_leaves(tmp_path_factory: pytest.TempPathFactory, plan: list[Any]) -> None:
    """Random trees of files, folders and links: afterwards the kernel cannot be led out of the artifact."""
    disks = Disks(tmp_path_factory.mktemp("disks"))
    for where, (kind, what) in plan:
        path = disks.old / "app" / "/".join(where)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not Path(os.path.realpath(path)).is_relative_to(disks.old / "app"):
                continue
            if kind == "file":
                path.write_text("x")
            elif kind == "folder":
                path.mkdir()
            else:
                path.symlink_to("/".join(what) or "a")
        except OSError:
            continue
    disks.carry()
    root = disks.new / "app"
    for path in root.rglob("*"):
        if path.is_symlink():
            target = os.readlink(path)
            assert not target.startswith("/")
            assert Path(os.path.realpath(path)).is_relative_to(root), (path, target)


@pytest.mark.parametrize("number", sorted(OF_THE_HOST))
@pytest.mark.parametrize("at", ["/app", "/app/answer"])
def test_what_this_machine_lacks_is_not_taken_for_a_missing_answer(
    disks: Disks, monkeypatch: pytest.MonkeyPatch, number: int, at: str
) -> None:
    (disks.old / "app/answer").write_text("right")
    real = Disk.open

    def failing(self: Disk, path: str, flags: int) -> int:
        if path == at and flags & os.O_NONBLOCK:
            raise OSError(number, os.strerror(number))
        return real(self, path, flags)

    monkeypatch.setattr(Disk, "open", failing)
    with pytest.raises(OSError, match=os.strerror(number)):
        disks.carry(Artifact(at))
