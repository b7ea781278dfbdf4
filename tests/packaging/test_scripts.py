"""The set-up's scripts: which Python they choose, and the one line they say when there is none."""

from __future__ import annotations

import os
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
def test_the_scripts_are_plain_sh(script: Path) -> None:
    assert subprocess.run(["/bin/sh", "-n", str(script)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["everything"], {}, "setup: unknown set 'everything'; expected local or dev"),
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
