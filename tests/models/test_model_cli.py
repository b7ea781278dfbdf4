"""`rl360 model`: what a user types and sees."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from rl360 import cli
from rl360.models.cli import Bar
from rl360.models.tiny import write_tiny


@pytest.mark.parametrize("command", [[], ["convert"], ["export"], ["fetch"], ["prepare"], ["tiny"]])
def test_help_needs_no_torch(command):
    code = (
        "import sys; from rl360.models.cli import main\n"
        f"try: main({[*command, '--help']!r})\n"
        "except SystemExit: pass\n"
        "print({'torch', 'megatron', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "usage: rl360 model" in done.stdout
    assert done.stdout.splitlines()[-1] == "set()"


def test_convert_there_and_back_and_what_is_in_the_way(tmp_path, capsys):
    source = write_tiny(tmp_path / "hf", "llama")
    assert cli.main(["model", "convert", str(source), "--to", "megatron", "--out", str(tmp_path / "m")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'm'}\n"
    back = ["model", "convert", str(tmp_path / "m"), "--to", "hf", "--out", str(tmp_path / "back")]
    assert cli.main(back) == 0
    assert (tmp_path / "back" / "model.safetensors").is_file()
    assert cli.main(back) == 1
    captured = capsys.readouterr()
    assert f"{tmp_path / 'back'}: is there already; name a new folder, or remove this one" in captured.err
    export = ["model", "export", str(tmp_path / "m"), "--out", str(tmp_path / "exported"), "--max-shard-gb", "0.00001"]
    assert cli.main(export) == 0
    assert (tmp_path / "exported" / "model.safetensors.index.json").is_file()
    assert cli.main(["model", "export", str(tmp_path / "m"), "--out", str(tmp_path / "x"), "--dtype", "bfloat16"]) == 1
    assert "keeps its dtype; leave out --dtype" in capsys.readouterr().err


def test_a_source_that_is_not_there_and_an_option_of_the_other_way(tmp_path, capsys):
    source, out = write_tiny(tmp_path / "hf", "llama"), ["--out", str(tmp_path / "out")]
    assert cli.main(["model", "convert", str(tmp_path / "hff"), "--to", "hf", *out]) == 1
    assert f"{tmp_path / 'hff'}: no such folder" in capsys.readouterr().err
    assert cli.main(["model", "convert", str(source), "--to", "megatron", "--model", str(source), *out]) == 1
    assert "--model goes with --to hf" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_link_is_followed_and_what_no_folder_can_replace_is_refused_at_once(tmp_path, capsys, monkeypatch):
    """Found out when all is written, it would cost all that was written."""
    source = str(write_tiny(tmp_path / "hf", "llama"))
    convert = ["model", "convert", source, "--to", "megatron", "--out"]
    (tmp_path / "empty").mkdir()
    for link, target in (("ahead", "large disk"), ("to-empty", "empty")):
        (tmp_path / link).symlink_to(target)
        assert cli.main([*convert, str(tmp_path / link)]) == 0
        assert (tmp_path / link).is_symlink()
        assert (tmp_path / target / "release" / ".metadata").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("rl360.models.megatron.torch_dist.write", None)
    capsys.readouterr()
    assert cli.main([*convert, "."]) == 1
    assert ".: the folder that you are in; name a new one" in capsys.readouterr().err
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "mounted")
    (tmp_path / "mounted").mkdir()
    assert cli.main([*convert, str(tmp_path / "mounted")]) == 1
    assert "mounted: a mount point, which no new folder can replace; name a folder in it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob(".*") if path.name != ".metadata"] == []  # no lock stays, no leftover


def test_what_the_disk_refuses_is_one_sentence(tmp_path, capsys):
    source = write_tiny(tmp_path / "hf", "llama")
    file = source / "config.json"
    for words, said in (
        (["convert", str(source), "--to", "megatron", "--out", str(file / "x")], f"{file}: File exists"),
        (["convert", str(file), "--to", "megatron", "--out", str(tmp_path / "x")], "cannot be read (Not a directory)"),
        (["tiny", "--out", "/proc/nowhere/x"], "RL360Error: /proc/nowhere: No such file or directory"),
        (["fetch", "m", "--source", str(source), "--folder", "/proc/x"], "/proc/.x.lock: No such file or directory"),
        (["fetch", "m", "--source", str(source), "--folder", str(file)], f"{file}: a file; expected a folder"),
    ):
        assert cli.main(["model", *words]) == 1
        assert said in capsys.readouterr().err
    (source / "gone.json").symlink_to("nowhere")
    assert cli.main(["model", "fetch", "m", "--source", str(source), "--folder", str(tmp_path / "x")]) == 1
    assert "gone.json: cannot be copied: " in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_full_disk_is_said_whoever_meets_it(tmp_path, capsys):
    source, disk = write_tiny(tmp_path / "hf", "llama"), tmp_path / "small"
    assert cli.main(["model", "convert", str(source), "--to", "megatron", "--out", str(tmp_path / "m")]) == 0
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small disk can be mounted by root only")
    try:
        for words in (
            ["convert", str(source), "--to", "megatron", "--out", str(disk / "x")],
            ["convert", str(tmp_path / "m"), "--to", "hf", "--out", str(disk / "x")],
            ["fetch", "m", "--source", str(source), "--folder", str(disk / "x")],
            ["tiny", "--out", str(disk / "x")],
        ):
            capsys.readouterr()
            assert cli.main(["model", *words]) == 1
            assert "No space left on device" in capsys.readouterr().err
            assert {path.name for path in disk.iterdir()} <= {".x.lock"}
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("size", ["0", "-1", "inf", "nan", "five"])
def test_a_shard_size_that_is_none(tmp_path, capsys, size):
    with pytest.raises(SystemExit):
        cli.main(["model", "export", "run", "--out", "out", "--max-shard-gb", size])
    assert f"{size}; expected a number above 0" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_on_a_terminal_and_in_a_file(monkeypatch):
    now = [0.0]
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Bar(clock=lambda: now[0]) as bar:
        for now[0], done in ((0.0, 10**9), (0.01, 2 * 10**9), (4.0, 4 * 10**9), (5.0, 8 * 10**9)):
            bar(done, 8 * 10**9)
    lines = terminal.getvalue().replace("\033[K", "").split("\r")
    assert lines == [
        "",
        "[####..........................]  12%  1.00 of 8.00 GB",
        "[###############...............]  50%  4.00 of 8.00 GB  1000 MB/s, 4 s left",
        "[##############################] 100%  8.00 of 8.00 GB  1600 MB/s, 0 s left\n",
    ]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Bar() as bar:
        bar(1, 2)
    assert sys.stderr.getvalue() == ""
