"""`rl360 model`: what a user types and sees."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from rl360 import cli
from rl360.models.cli import Bar
from rl360.models.tiny import write_tiny


@pytest.mark.parametrize("command", [[], ["convert"], ["export"], ["fetch"], ["prepare"]])
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


@pytest.mark.parametrize("size", ["0", "-1", "inf", "nan"])
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
