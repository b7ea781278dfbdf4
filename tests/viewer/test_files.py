"""Files outside the run folder are not shown, however they are asked for."""

from __future__ import annotations

import os

import pytest

from rl360.viewer import files
from rl360.viewer.files import inside, listing, read_part, trial_folder


@pytest.fixture
def run_dir(tmp_path):
    run = tmp_path / "run"
    (run / "trials" / "a.t0" / "verifier").mkdir(parents=True)
    (run / "trials" / "a.t0" / "verifier" / "test-stdout.txt").write_text("ok\n")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "secret.pt").write_text("weights")
    (tmp_path / "secret").write_text("secret")
    return run


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "trials/../../secret",
        "trials/a.t0/../../checkpoints/secret.pt",
        "/etc/passwd",
        "checkpoints/secret.pt",
        ".lock",
        "",
        ".",
        "trials/a.t0/link",
        "trials/a.t0/up/secret",
        "trials/a.t0/within",
        "trials/a.t0/loop",
        "trials/a.t0/\0",
        "trials/nothing",
    ],
)
def test_refused(run_dir, name):
    trial = run_dir / "trials" / "a.t0"
    (trial / "link").symlink_to(run_dir.parent / "secret")
    (trial / "up").symlink_to(run_dir.parent)
    (trial / "within").symlink_to(run_dir / "checkpoints" / "secret.pt")
    (trial / "loop").symlink_to("loop")
    with pytest.raises(FileNotFoundError):
        read_part(run_dir, name)


def test_a_link_to_a_shown_file_is_followed(run_dir):
    (run_dir / "trials" / "a.t0" / "latest").symlink_to("verifier/test-stdout.txt")
    assert read_part(run_dir, "trials/a.t0/latest").text == "ok\n"


def test_a_pipe_and_a_folder_are_no_files(run_dir):
    os.mkfifo(run_dir / "trials" / "a.t0" / "pipe")
    for name in ("trials/a.t0/pipe", "trials/a.t0"):
        with pytest.raises(FileNotFoundError):
            read_part(run_dir, name)


def test_a_folder_swapped_for_a_link_after_the_check(run_dir, monkeypatch):
    """What a sandbox could do in the moment between: the open file is looked at once more."""
    trial = run_dir / "trials" / "a.t0"
    (run_dir.parent / "elsewhere").mkdir()
    (run_dir.parent / "elsewhere" / "test-stdout.txt").write_text("secret")

    def swapped(run, name):
        path = inside(run, name)
        (trial / "verifier").rename(trial / "moved")
        (trial / "verifier").symlink_to(run_dir.parent / "elsewhere")
        return path

    monkeypatch.setattr(files, "inside", swapped)
    with pytest.raises(FileNotFoundError):
        read_part(run_dir, "trials/a.t0/verifier/test-stdout.txt")


def test_parts_of_a_long_file(run_dir, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 10)
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "x.log").write_bytes(b"0123456789abcdefghij\xff")
    assert read_part(run_dir, "logs/x.log") == files.Part("bcdefghij\ufffd", 11, 21, 21)
    assert read_part(run_dir, "logs/x.log", 0) == files.Part("0123456789", 0, 10, 21)
    assert read_part(run_dir, "logs/x.log", 99) == files.Part("", 21, 21, 21)


def test_listing_leaves_links_out_and_ends(run_dir, monkeypatch):
    trial = run_dir / "trials" / "a.t0"
    (trial / "link").symlink_to(run_dir.parent / "secret")
    (trial / "up").symlink_to(run_dir.parent)
    (trial / "trial.log").write_text("12345")
    assert listing(run_dir, "trials/a.t0") == [
        ("trials/a.t0/trial.log", 5),
        ("trials/a.t0/verifier/test-stdout.txt", 3),
    ]
    assert listing(run_dir, "trials/b.t0") == []
    assert listing(run_dir, "../..") == []
    monkeypatch.setattr(files, "MAX_FILES", 1)
    assert len(listing(run_dir, "trials/a.t0")) == 1


@pytest.mark.parametrize(
    ("trial_dir", "folder"),
    [
        ("/old/place/run/trials/a.t0", "trials/a.t0"),
        ("a.t0", "trials/a.t0"),
        ("/etc/..", None),
        ("/", None),
        ("", None),
    ],
)
def test_a_trial_is_found_by_its_name_alone(trial_dir, folder):
    assert trial_folder({"trial": {"trial_dir": trial_dir}}) == folder


def test_no_trial():
    assert trial_folder({"trial": None}) is None
