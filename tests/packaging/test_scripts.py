"""The set-up's scripts: which Python they choose, and the one line they say when there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "cut", "id", "ls", "sed", "awk", "env", "dirname")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with the tools that the script uses and no Python; and no password database to find a home in."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for tool in TOOLS:
        for place in ("/usr/bin", "/bin"):
            if Path(place, tool).exists() and not (folder / tool).exists():
                (folder / tool).symlink_to(Path(place, tool))
    make_program(folder / "getent", "exit 2")
    return folder


def make_program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def make_python(path: Path, version: str) -> Path:
    """Something that answers the script's question as a Python of this version does."""
    return make_program(path, f"echo {version}")


def find(path: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(ROOT / "scripts" / "find_python.sh")],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# The script also looks at these; where the machine has one, "none found" cannot be shown.
HAS_SYSTEM_PYTHON = any(Path(p, f"python3.{m}").exists() for p in ("/usr/bin", "/usr/local/bin") for m in (12, 13))
ENOUGH_DISK = "echo head; echo 'disk 99 9 31457280 1% /'"  # a df that says 30 GiB, whatever this machine has
needs_none = pytest.mark.skipif(HAS_SYSTEM_PYTHON, reason="this machine has a Python 3.12 or 3.13 in /usr")


def test_the_one_on_the_path(tools: Path, tmp_path: Path) -> None:
    python = make_python(tmp_path / "bin" / "python3", "3.12")
    done = find(f"{tmp_path / 'bin'}:{tools}")
    assert (done.returncode, done.stdout) == (0, f"{python}\n")


def test_twelve_before_thirteen(tools: Path, tmp_path: Path) -> None:
    make_python(tmp_path / "bin" / "python3.13", "3.13")
    twelve = make_python(tmp_path / "later" / "python3.12", "3.12")
    done = find(f"{tmp_path / 'bin'}:{tmp_path / 'later'}:{tools}")
    assert done.stdout == f"{twelve}\n"


@needs_none
def test_thirteen_when_there_is_no_twelve(tools: Path, tmp_path: Path) -> None:
    make_python(tmp_path / "bin" / "python3", "3.11")
    thirteen = make_python(tmp_path / "bin" / "python3.13", "3.13")
    assert find(f"{tmp_path / 'bin'}:{tools}").stdout == f"{thirteen}\n"


def test_a_pyenv_that_is_not_on_the_path(tools: Path, tmp_path: Path) -> None:
    make_python(tmp_path / ".pyenv" / "versions" / "3.11.7" / "bin" / "python", "3.11")
    python = make_python(tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python", "3.12")
    assert find(tools, HOME=str(tmp_path)).stdout == f"{python}\n"


def test_a_pyenv_of_the_users_own_home_when_home_is_another(tools: Path, tmp_path: Path) -> None:
    python = make_python(tmp_path / "me" / ".pyenv" / "versions" / "3.12.1" / "bin" / "python", "3.12")
    (tools / "getent").unlink()
    make_program(tools / "getent", f"echo me:x:1:1::{tmp_path / 'me'}:/bin/sh")
    assert find(tools, HOME=str(tmp_path)).stdout == f"{python}\n"


def test_shims_that_fail_are_skipped_and_their_versions_found(tools: Path, tmp_path: Path) -> None:
    root = tmp_path / "somewhere" / ".pyenv"
    for name in ("python3.12", "python3.13", "python3"):
        make_program(root / "shims" / name, f"echo 'pyenv: {name}: command not found' >&2; exit 127")
    python = make_python(root / "versions" / "3.12.1" / "bin" / "python", "3.12")
    assert find(f"{root / 'shims'}:{tools}").stdout == f"{python}\n"


@needs_none
def test_only_eleven_is_one_clear_line(tools: Path, tmp_path: Path) -> None:
    make_python(tmp_path / "bin" / "python3", "3.11")
    done = find(f"{tmp_path / 'bin'}:{tools}")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("RL360 needs Python 3.12 or 3.13; found 3.11.")


def test_a_named_python(tools: Path, tmp_path: Path) -> None:
    assert find(tools, RL360_PYTHON=sys.executable).stdout == f"{sys.executable}\n"
    eleven = make_python(tmp_path / "python3.11", "3.11")
    done = find(tools, RL360_PYTHON=str(eleven))
    assert (done.returncode, done.stderr) == (1, f"RL360_PYTHON={eleven} is 3.11; RL360 needs Python 3.12 or 3.13\n")
    assert find(tools, RL360_PYTHON="/nowhere").returncode == 1


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda p: p.name)
def test_the_scripts_parse_with_the_shell_that_they_name(script: Path) -> None:
    """What a user runs is plain sh; only a script that says bash may need it."""
    shell = "bash" if script.read_text().startswith("#!/usr/bin/env bash\n") else "/bin/sh"
    assert subprocess.run([shell, "-n", str(script)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["everything"], {}, "setup: unknown set 'everything'; expected local, cluster or dev"),
        (["local"], {"TORCH": "rocm"}, "setup: TORCH=rocm is unknown; expected cpu, or leave it out"),
    ],
)
def test_setup_refuses_what_it_does_not_know(arguments: list[str], environment: dict[str, str], said: str) -> None:
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "scripts" / "setup.sh"), *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (1, said)


def test_make_without_a_target_lists_the_targets() -> None:
    done = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True)
    for target in ("quickstart", "test", "setup", "lint", "lock"):
        assert f"make {target} " in done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As much of a checkout as the set-up reads before it installs the packages."""
    folder = tmp_path / "checkout"
    for name in ("scripts/setup.sh", "scripts/find_python.sh", "requirements/base.txt", "requirements/local.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    shutil.copy2(ROOT / "requirements" / "dev.txt", folder / "requirements")
    shutil.copy2(ROOT / "pyproject.toml", folder)
    return folder


def set_up(checkout: Path, *, first_on_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Plain pip, no uv, an index that refuses at once."""
    refused = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        ["/bin/sh", str(checkout / "scripts" / "setup.sh")],
        env={"PATH": f"{first_on_path}:/usr/bin:/bin", "RL360_PYTHON": sys.executable, **refused, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(shutil.which("uv", path="/usr/bin:/bin") is not None, reason="uv lies in /usr/bin here")
def test_an_index_that_does_not_answer_is_one_clear_line(checkout: Path, tmp_path: Path) -> None:
    make_program(tmp_path / "df", ENOUGH_DISK)
    done = set_up(checkout, first_on_path=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("setup: installing packages failed: the package index does not answer; check the network")


def test_a_disk_that_is_too_small_is_said_before_anything_is_downloaded(checkout: Path, tmp_path: Path) -> None:
    make_program(tmp_path / "df", "echo head; echo 'disk 9 9 3145728 1% /'")  # 3 GiB in KiB
    done = set_up(checkout, first_on_path=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == f"setup: 3 GiB free in {checkout}; the packages need about 9 GiB"


def test_a_disk_that_fills_up_is_one_clear_line(checkout: Path, tmp_path: Path) -> None:
    make_program(tmp_path / "df", ENOUGH_DISK)
    make_program(tmp_path / "uv", "echo 'error: failed to write: No space left on device (os error 28)' >&2; exit 2")
    done = set_up(checkout, first_on_path=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("setup: installing packages failed: the disk is full; free about 9 GiB in ")
