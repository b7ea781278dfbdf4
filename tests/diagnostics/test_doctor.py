from __future__ import annotations

import importlib.metadata

import pytest

from rl360.diagnostics import doctor
from rl360.diagnostics.machine import Memory


def examine() -> tuple[int, str]:
    lines: list[str] = []
    return doctor.examine_machine(lines.append), "\n".join(lines)


def test_it_names_what_the_issue_asks_for():
    _, text = examine()
    for label in ("python", "cpu", "gpu", "bubblewrap", "overlayfs", "control groups", "memory", "disk", "torch"):
        assert label in text, label
    assert "asked: ==2.11.0" in text  # torch: the version matrix


def test_no_bubblewrap_is_wrong_and_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, text = examine()
    assert code == 1
    assert "wrong: sandbox: bubblewrap: install it: apt-get install bubblewrap" in text
    assert text.endswith("something that a run needs is missing")


@pytest.mark.sandbox
def test_a_machine_that_has_it_all():
    code, text = examine()
    assert code == 0, text
    assert text.endswith("everything that a local run needs is here")


def test_a_missing_package_is_needed_and_another_version_is_a_note(monkeypatch):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "harbor":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0.0" if name == "torch" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, text = examine()
    assert code == 1
    assert "wrong: harbor [local]: expected harbor==0.25.0" in text
    assert "note: torch [local]: expected ==2.11.0" in text


@pytest.mark.parametrize(("version", "fine"), [((3, 11), False), ((3, 12), True), ((3, 13), True), ((3, 14), False)])
def test_python_versions(monkeypatch, version, fine):
    monkeypatch.setattr(doctor.sys, "version_info", (*version, 0, "final", 0))
    finding = doctor._python()[0]
    assert (finding.advice is None) is fine


def test_no_model_yet_is_a_note_that_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("RL360_MODELS", str(tmp_path))
    finding = doctor._model()[0]
    assert finding.text == "none yet"
    assert finding.advice is not None
    assert finding.advice.endswith("rl360 model fetch smollm2_135m")
    assert not finding.needed


def test_little_memory_is_a_note(monkeypatch):
    monkeypatch.setattr(doctor, "memory", lambda: Memory(total=2**31, available=2**30))
    assert "note: memory: the quickstart may take 4 GiB" in examine()[1]
