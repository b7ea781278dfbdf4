"""Files in and out by a root descriptor: links mean the sandbox's own files, and nothing is written through a link."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl360.sandboxes.local import transfer


@pytest.fixture
def root(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    folder = tmp_path / "root"
    (folder / "etc").mkdir(parents=True)
    (folder / "etc/secret").write_text("the sandbox's")
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    yield fd, folder
    os.close(fd)


@pytest.fixture
def host_secret(tmp_path: Path) -> Path:
    path = tmp_path / "etc" / "secret"
    path.parent.mkdir()
    path.write_text("the host's")
    return path


def test_links_resolve_inside(root: tuple[int, Path], host_secret: Path, tmp_path: Path) -> None:
    fd, folder = root
    (folder / "absolute").symlink_to("/etc/secret")
    (folder / "upwards").symlink_to("../../../../etc/secret")
    (folder / "host").symlink_to(host_secret)
    for name in ("absolute", "upwards"):
        transfer.download_file(fd, f"/{name}", tmp_path / "out" / name)
        assert (tmp_path / "out" / name).read_text() == "the sandbox's"
    with pytest.raises(OSError, match="No such file"):
        transfer.download_file(fd, "/host", tmp_path / "out/host")


def test_upload_through_a_link_stays_inside(root: tuple[int, Path], host_secret: Path, tmp_path: Path) -> None:
    fd, folder = root
    (folder / "app").symlink_to(host_secret.parent)  # as an absolute path it is one of the sandbox's own
    source = tmp_path / "new"
    source.write_text("new")
    with pytest.raises(OSError, match=r"."):
        transfer.upload_file(fd, source, "/app/secret")
    assert host_secret.read_text() == "the host's"
    (folder / "etc2").symlink_to("/etc")
    transfer.upload_file(fd, source, "/etc2/secret")
    assert (folder / "etc/secret").read_text() == "new"


def test_download_folder_makes_no_links_and_skips_what_is_no_file(root: tuple[int, Path], tmp_path: Path) -> None:
    fd, folder = root
    logs = folder / "logs"
    (logs / "sub").mkdir(parents=True)
    (logs / "sub/file").write_text("x")
    (logs / "to_file").symlink_to("/etc/secret")
    (logs / "to_folder").symlink_to("/etc")
    (logs / "dangling").symlink_to("/nowhere")
    os.mkfifo(logs / "pipe")
    left_out = transfer.download_folder(fd, "/logs", tmp_path / "out")
    assert sorted(left_out) == ["/logs/dangling", "/logs/pipe", "/logs/to_folder"]
    assert (tmp_path / "out/sub/file").read_text() == "x"
    assert (tmp_path / "out/to_file").read_text() == "the sandbox's"
    assert not any(p.is_symlink() for p in (tmp_path / "out").rglob("*"))


def test_download_replaces_a_link_on_the_host(root: tuple[int, Path], host_secret: Path, tmp_path: Path) -> None:
    fd, _ = root
    target = tmp_path / "out"
    target.mkdir()
    (target / "secret").symlink_to(host_secret)
    transfer.download_folder(fd, "/etc", target)
    assert host_secret.read_text() == "the host's"
    assert (target / "secret").read_text() == "the sandbox's"


def test_downloads_are_bounded(root: tuple[int, Path], tmp_path: Path) -> None:
    fd, folder = root
    (folder / "logs").mkdir()
    with open(folder / "logs/a_huge", "wb") as file:
        file.truncate(transfer.MAX_DOWNLOAD_BYTES + 1)  # sparse: it takes no space here, and would there
    (folder / "logs/small").write_text("x")
    assert transfer.download_folder(fd, "/logs", tmp_path / "out") == ["/logs/a_huge"]
    assert (tmp_path / "out/small").read_text() == "x"
    with pytest.raises(OSError, match="larger"):
        transfer.download_file(fd, "/logs/a_huge", tmp_path / "huge")


def test_upload_keeps_modes_and_links(root: tuple[int, Path], tmp_path: Path) -> None:
    fd, folder = root
    source = tmp_path / "tests"
    (source / "sub").mkdir(parents=True)
    (source / "test.sh").write_text("#!/bin/sh\n")
    (source / "test.sh").chmod(0o755)
    (source / "sub/link").symlink_to("../test.sh")
    transfer.upload_folder(fd, source, "/deep/tests")
    assert (folder / "deep/tests/test.sh").stat().st_mode & 0o777 == 0o755
    assert os.readlink(folder / "deep/tests/sub/link") == "../test.sh"


def test_remove_never_follows(root: tuple[int, Path], host_secret: Path) -> None:
    fd, folder = root
    (folder / "logs").mkdir()
    (folder / "logs/verifier").symlink_to("/etc")
    transfer.remove(fd, "/logs/verifier")
    assert not (folder / "logs/verifier").is_symlink()
    assert (folder / "etc/secret").exists()
    transfer.remove(fd, "/not/there")


def test_kind(root: tuple[int, Path]) -> None:
    fd, folder = root
    os.mkfifo(folder / "pipe")
    found = [transfer.kind(fd, p) for p in ("/etc", "/etc/secret", "/pipe", "/none", "/../../etc")]
    assert found == ["dir", "file", "other", "missing", "dir"]


def test_what_this_machine_lacks_is_not_taken_for_a_missing_file(
    root: tuple[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, folder = root
    (folder / "reward.txt").write_text("1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 40, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(fd))
        with pytest.raises(OSError, match="Too many open files"):
            transfer.kind(fd, "/reward.txt")
        os.close(taken.pop())
        os.close(taken.pop())
        with pytest.raises(OSError, match="Too many open files"):  # the folder is open, and its files cannot be
            transfer.download_folder(fd, "/", tmp_path / "out")
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert transfer.kind(fd, "/reward.txt") == "file"
