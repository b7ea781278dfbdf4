"""The wheel: what is in it, and that a clean environment with nothing but the base packages can run `check`."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rl360.models.fetch import MODELS_ENV

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def relative(folder: Path, pattern: str) -> set[str]:
    """Files below a folder, as paths from it, without caches and the reports that `rl360 tasks validate` leaves."""
    found = (p for p in folder.rglob(pattern) if p.is_file() and p.name != "validation.json")
    return {str(p.relative_to(folder)) for p in found if "__pycache__" not in p.parts}


def test_every_shipped_file_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, prefix, pattern in (
        ("rl360", "rl360", "*.py"),
        ("launchers", "launchers", "*.py"),
        ("conf", "rl360/conf", "*.yaml"),
        ("sweeps", "rl360/sweeps", "*.yaml"),
        ("rl360/tasks/bundled", "rl360/tasks/bundled", "*"),
    ):
        shipped = {f"{prefix}/{name}" for name in relative(ROOT / folder, pattern)}
        assert shipped
        assert shipped <= names, sorted(shipped - names)


def test_the_licence_is_in_the_wheel_and_the_tests_are_not(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    licences = {name.rsplit("/", 1)[1] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "THIRD_PARTY_NOTICES"}
    assert not [name for name in names if name.startswith(("tests/", "docs/", "models/", "outputs/", "scripts/"))]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.sandbox
def test_a_clean_environment_finds_conf_and_runs_check(wheel: Path, smollm2_dir: Path, tmp_path: Path) -> None:
    """No torch and no Harbor there: a login node has to be able to check an experiment."""
    venv = tmp_path / "venv"
    python = venv / "bin" / "python"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {MODELS_ENV: str(smollm2_dir.parent), "UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}
    uv = Path(sys.executable).parent / "uv"

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    if uv.exists():
        steps = [
            (uv, "venv", "--quiet", "--python", sys.executable, venv),
            (uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "--require-hashes"),
            (uv, "pip", "install", "--quiet", "--python", python, "--no-deps", wheel),
        ]
    else:
        steps = [
            (sys.executable, "-m", "venv", venv),
            (python, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"),
            (python, "-m", "pip", "install", "--quiet", "--no-deps", wheel),
        ]
    steps[1] = (*steps[1], "-r", ROOT / "requirements" / "base.txt")
    for step in steps:
        done = run(*step)
        assert done.returncode == 0, done.stderr

    where = run(python, "-c", "import rl360; print(rl360.__file__)").stdout
    assert str(venv) in where
    done = run(venv / "bin" / "rl360", "check", "experiment=quickstart")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 to train on" in done.stdout
    done = run(venv / "bin" / "rl360", "check", "experiment=quickstart", "algorithm.clip_hihg=0.3")
    assert done.returncode == 1
    assert "clip_high" in done.stdout + done.stderr
    missing = run(python, "-c", "import torch")
    assert "No module named 'torch'" in missing.stderr
