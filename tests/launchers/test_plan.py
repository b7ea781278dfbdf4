from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launchers.local import LocalLauncher
from rl360.config.check import load
from rl360.config.compose import Request, compose
from rl360.config.files import Found
from rl360.config.forecast import GIB, Forecast
from rl360.diagnostics.machine import Memory
from rl360.types import Task


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    config = load(compose(Request(("experiment=quickstart", "name=named", "evaluation.every=3"))).values).config
    assert config is not None
    tasks = [Task(name, tmp_path, ("coding",), f"hash-{name}") for name in "abcdef"]
    found = Found(
        model_dir=Path("/models/m"),
        num_parameters=134_515_008,
        training=tasks[:4],
        evaluation=tasks[4:],
        forecast=Forecast({"weights": GIB, "adam": 2 * GIB}, {"checkpoints": 5 * GIB}),
        memory=Memory(total=8 * GIB, available=4 * GIB),
        free_disk=100 * GIB,
        warnings=["sandbox: weak"],
    )
    fields = {key: value for key, value in vars(config.cluster).items() if key != "_target_"}
    return LocalLauncher(**fields).plan(config, found, Path("/out/named/x"))


def test_batch_arithmetic_by_hand(plan):
    assert plan.batch == {
        "iterations": 10,
        "tasks_per_iteration": 4,
        "group_size": 8,
        "attempts_per_iteration": 32,
        "training_attempts": 320,
        "evaluation_attempts": 3 * 2 * 4,  # after iterations 3, 6 and 9; two tasks; k 4
    }


def test_roles_and_the_command_of_the_driver(plan):
    assert [(role.name, role.processes) for role in plan.roles] == [("driver", 1), ("proxy", 1), ("trial", 3)]
    assert plan.roles[0].command[1:] == ("-m", "launchers.local", "/out/named/x")
    assert plan.roles[1].command == ()


def test_it_is_plain_data_and_keeps_the_hashes_that_a_resume_compares(plan):
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["task_hashes"]["tasks"] == {name: f"hash-{name}" for name in "abcd"}
    assert data["task_hashes"]["evaluation.tasks"] == {name: f"hash-{name}" for name in "ef"}
    assert data["deadlines_s"]["model call"] == 120.0
    assert OmegaConf.create(data) is not None


def test_it_prints_everything_that_was_decided(plan):
    text = "\n".join(plan.lines())
    for part in (
        "named on local",
        "/models/m, 134,515,008 parameters, final logits in fp32",
        "4 to train on, 2 to evaluate on",
        "4 tasks x 8 attempts = 32 an iteration",
        "model call 120 s < turn 150 s < agent 300 s < trial 700 s < client 800 s < sandbox lifetime 900 s",
        "3.0 GiB needed (adam 2.0 GiB, weights 1.0 GiB), 8.0 GiB in the machine",
        "5.0 GiB needed (checkpoints 5.0 GiB), 100.0 GiB free",
        "rl360.algorithms.grpo.GRPO",
        "sandbox: weak",
    ):
        assert part in text, part
