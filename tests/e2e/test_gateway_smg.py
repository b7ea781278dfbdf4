"""A whole run through SMG learns, to the bit, what the same run learns without it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from rl360.diagnostics.recount import recount
from tests.e2e.test_run_tiny import ROOT, command, finish, learned, leftovers, metrics

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]


def test_the_same_run_with_and_without_smg(tiny_llama_dir: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    runs = {kind: tmp_path / kind for kind in ("direct", "smg")}
    for kind, out in runs.items():
        finish(command(tiny_llama_dir, out, "iterations=2", f"gateway={kind}"), environment)
        assert json.loads((out / "summary.json").read_text())["exit_reason"] == "finished"
        assert recount(out).problems == []
        assert leftovers(out) == []
    assert (runs["smg"] / "logs" / "smg.log").exists()
    direct, smg = (
        [{name: value for name, value in row.items() if not name.startswith("gateway/")} for row in metrics(runs[kind])]
        for kind in ("direct", "smg")
    )
    assert direct == smg
    direct, smg = learned(runs["direct"]), learned(runs["smg"])
    assert direct.keys() == smg.keys()
    assert all(torch.equal(direct[name], smg[name]) for name in direct)
