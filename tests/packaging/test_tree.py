"""What is committed: locks that are complete and pinned, no address or path of one machine, every shipped file."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = ("base", "local", "dev")
EXTRAS = {"base": (), "local": ("local",), "dev": ("local", "dev")}

# Put together from parts, so that this file does not hold what it looks for. Of root's home only what lies hidden in it
# counts: the home itself is also a path inside every sandbox.
FORBIDDEN = re.compile(
    r"(?<![\w}.$])/(wo" + r"rk/|ro" + r"ot/\.)|pypi" + r"\.org|python" + r"hosted|registry\.npm" + r"js"
)


def locked(name: str) -> dict[str, str]:
    """Package -> version of one lock."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return {canonicalize_name(m[1]): m[2] for m in re.finditer(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.M)}


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_a_version_and_hashes(name: str) -> None:
    entries = re.split(r"^(?=[A-Za-z0-9])", (ROOT / "requirements" / f"{name}.txt").read_text(), flags=re.M)[1:]
    assert len(entries) > 20
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+==\S+", entry), entry.splitlines()[0]
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


@pytest.mark.parametrize("name", [*LOCKS, "overrides"])
def test_no_lock_names_an_address(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    for word in ("://", "--index", "--extra-index", "--find-links", " @ ", "file:"):
        assert word not in text


@pytest.mark.parametrize("name", LOCKS)
def test_the_locks_satisfy_what_the_project_asks_for(name: str) -> None:
    versions = locked(name)
    asked = list(PROJECT["dependencies"])
    for extra in EXTRAS[name]:
        asked += PROJECT["optional-dependencies"][extra]
    for line in asked:
        requirement = Requirement(line)
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{line} is not in requirements/{name}.txt: run `make lock`"
        assert requirement.specifier.contains(version, prereleases=True), f"{line}, locked {version}: run `make lock`"


def test_the_locks_agree_with_each_other() -> None:
    base, local, dev = (locked(name) for name in LOCKS)
    assert base.items() <= local.items() <= dev.items()


def test_the_openai_override_is_in_the_lock() -> None:
    """Harbor needs 2.20; others in the tree may ask for less, and the lock has to win."""
    (line,) = [x for x in (ROOT / "requirements" / "overrides.txt").read_text().splitlines() if not x.startswith("#")]
    override = Requirement(line)
    assert override.name == "openai"
    assert override.specifier.contains(locked("local")["openai"])


def test_the_base_has_no_torch_and_no_gpu_package() -> None:
    assert not {"torch", "triton", "transformers", "harbor"} & locked("base").keys()
    assert not [name for name in locked("base") if name.startswith(("nvidia-", "cuda-"))]


def test_no_machine_path_and_no_index_host_is_committed() -> None:
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        for number, line in enumerate(lines, start=1):
            if match := FORBIDDEN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert found == []


def test_the_files_that_every_reader_looks_for_are_there() -> None:
    for name in ("README.md", "LICENSE", "THIRD_PARTY_NOTICES", "CHANGELOG.md", "Makefile", ".ci/run", "conf/run.yaml"):
        assert (ROOT / name).stat().st_size > 100, name
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    for script in [ROOT / ".ci" / "run", *(ROOT / "scripts").glob("*.sh")]:
        assert os.access(script, os.X_OK), script


def test_the_readme_opens_with_the_two_commands() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:30])
    assert "make quickstart" in first_screen
    assert "make test" in first_screen


def test_links_inside_the_documents_lead_somewhere() -> None:
    missing = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert missing == []
