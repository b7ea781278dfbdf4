"""The run folder: its name, and the two files that are in it before anything starts.

In: checked values and a plan. Out: resolved.yaml (the experiment; every process of the run loads it) and plan.json
(what was found and forecast). What a run adds later is the engine's.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

RESOLVED = "resolved.yaml"
PLAN = "plan.json"


def new_run_dir(outputs: str, name: str) -> Path:
    """`<outputs>/<name>/<time>-<id>`, absolute. The id keeps two runs of one second apart."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(outputs).absolute() / name / f"{stamp}-{secrets.token_hex(2)}"


@cache
def process_id() -> str:
    """Four hexadecimal digits that keep two processes of one second apart; the same for all of one."""
    return secrets.token_hex(2)


def save(run_dir: Path, values: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Write both files; an earlier resolved.yaml that differs is kept as resolved.<n>.yaml. Raises `OSError`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    resolved = run_dir / RESOLVED
    text = OmegaConf.to_yaml(OmegaConf.create(dict(values)))
    if resolved.exists() and resolved.read_text(encoding="utf-8") != text:
        kept = sum(1 for _ in run_dir.glob("resolved.*.yaml"))
        os.replace(resolved, run_dir / f"resolved.{kept}.yaml")
    _write(resolved, text)
    _write(run_dir / PLAN, json.dumps(plan, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """Whole or not at all, also through a crash."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, path)
