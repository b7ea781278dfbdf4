"""The probes for check and doctor: quick, without heavy imports, and with something to do for each lack."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rl360.sandboxes import abilities


def test_probe_imports_neither_harbor_nor_torch_and_is_quick() -> None:
    code = (
        "import sys, time; t = time.monotonic(); from rl360.sandboxes import abilities; abilities.probe(); "
        "print(time.monotonic() - t, [m for m in ('harbor', 'torch', 'litellm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, _, modules = done.stdout.partition(" ")
    assert modules.strip() == "[]"
    assert float(seconds) < 3.0  # 0.1 s on an idle machine; the bound only catches what hangs


def test_a_machine_without_bubblewrap_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abilities.shutil, "which", lambda name: None)
    report = abilities.probe()
    assert len(report.problems) == 1
    assert "bubblewrap" in report.problems[0]
    assert "apt-get install" in report.problems[0]


def test_a_refused_user_namespace_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"userns": "unshare: Operation not permitted", "overlay": "no mount namespace", "bwrap": ""}
    monkeypatch.setattr(abilities, "_try_calls", lambda userns, run_bwrap: refused)
    monkeypatch.setattr(abilities.shutil, "which", lambda name: "/usr/bin/bwrap")
    report = abilities.probe(unprivileged=True)
    assert any("user namespaces" in p and "Operation not permitted" in p for p in report.problems)
    assert report.root_mode == "copy"


def test_every_ability_that_lacks_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"userns": "no", "overlay": "no", "bwrap": "no"}
    monkeypatch.setattr(abilities, "_try_calls", lambda userns, run_bwrap: refused)
    for report in (abilities.probe(True), abilities.probe(False)):
        assert all(a.remedy for a in report.abilities if not a.ok)
        assert len(report.problems) + len(report.warnings) == sum(not a.ok for a in report.abilities)
