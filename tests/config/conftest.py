"""What the config tests share: a typed config from overrides, and task folders that are real but tiny."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl360.config.schemas import RootConfig


@pytest.fixture
def typed() -> Callable[..., RootConfig]:
    """A config that has no problem, with dotted keys changed, as in typed(**{"rollout.top_p": 0.9})."""

    def make(**changes: object) -> RootConfig:
        entry = {"_target_": "rl360.x.Y", "kwargs": {}}
        config = OmegaConf.structured(RootConfig)
        needed = {
            "model.name": "tiny",
            "tasks.path": "/nowhere",
            "paths.models": "/nowhere",
            "paths.cache": "/nowhere",
            "paths.outputs": "/nowhere",
            "reward.verifier": entry,
            "logger.jsonl": entry,
        }
        for key, value in (needed | changes).items():
            if value == {}:
                OmegaConf.update(config, key, {}, merge=False)
                continue
            nested: object = value
            for part in reversed(key.split(".")):
                nested = {part: nested}
            config = OmegaConf.merge(config, nested)  # type: ignore[arg-type]
        made = OmegaConf.to_object(config)
        assert isinstance(made, RootConfig)
        return made

    return make


@pytest.fixture
def write_tasks(tmp_path: Path) -> Callable[..., Path]:
    """Write task folders with a manifest and return the folder. listed: the manifest's ids, when they differ."""

    def write(ids: Sequence[str], listed: Sequence[str] | None = None, folder: str = "pool") -> Path:
        pool = tmp_path / folder
        for task_id in ids:
            task = pool / task_id
            (task / "environment").mkdir(parents=True)
            (task / "tests").mkdir()
            (task / "instruction.md").write_text(f"Do {folder} {task_id}.\n")
            (task / "task.toml").write_text('version = "1.0"\n')
            (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
            (task / "tests" / "test.sh").write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
        pool.mkdir(exist_ok=True)
        rows = [{"prompt": "Do.", "metadata": {"instance_id": i, "tags": ["coding"]}} for i in listed or ids]
        (pool / "harbor_records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return pool

    return write
