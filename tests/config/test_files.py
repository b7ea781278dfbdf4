from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from rl360.config import files
from rl360.config.files import look, visible
from rl360.config.schemas import MegatronTrainerConfig
from rl360.diagnostics.machine import Gpu, Memory
from tests.tiny_model import write_tiny_llama


@pytest.fixture
def here(tmp_path, typed, write_tasks):
    """A config that everything is there for; changes as for `typed`."""
    pool = write_tasks(["a", "b", "c", "d"])
    model = write_tiny_llama(tmp_path / "model")

    def make(**changes: object):
        found = {"tasks.path": str(pool), "model.path": str(model), "paths.outputs": str(tmp_path / "out")}
        others = {"paths.cache": str(tmp_path / "cache"), "sandbox.import_path": "rl360.sandboxes.other:Other"}
        return typed(**(found | others | changes))

    return make


def test_all_is_there(here, tmp_path):
    before = sorted(tmp_path.iterdir())
    found = look(here())
    assert found.problems == []
    assert [task.task_id for task in found.training] == ["a", "b", "c", "d"]
    assert found.num_parameters is not None
    assert found.forecast is not None
    assert sorted(tmp_path.iterdir()) == before  # looking leaves nothing behind


def test_a_missing_model_says_how_to_get_it(here, tmp_path):
    changes = {"model.path": None, "model.name": "smollm2_135m", "model.source": "hub/id"}
    found = look(here(**changes, **{"paths.models": str(tmp_path / "models")}))
    assert found.problems == [
        f"model: no model folder {tmp_path}/models/smollm2_135m; try: rl360 model fetch smollm2_135m"
    ]


def test_an_incomplete_model_is_not_enough(here, tmp_path):
    folder = write_tiny_llama(tmp_path / "half", weights=False)
    assert any("model.safetensors" in problem for problem in look(here(**{"model.path": str(folder)})).problems)
    assert look(here(**{"model.path": str(folder), "model.random_init": True})).problems == []
    (folder / "tokenizer.json").unlink()
    problems = look(here(**{"model.path": str(folder), "model.random_init": True})).problems
    assert problems == [f"model.path: {folder}: no tokenizer.json"]


def test_a_model_that_is_no_decoder(here, tmp_path):
    folder = write_tiny_llama(tmp_path / "other")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "num_attention_heads": 2}))
    problems = look(here(**{"model.path": str(folder)})).problems
    assert any("has no num_hidden_layers; expected a Llama-like decoder" in problem for problem in problems)


def test_a_task_in_the_manifest_without_a_folder(here, write_tasks):
    pool = write_tasks(["a", "b"], listed=["a", "b", "gone"], folder="other")
    problems = look(here(**{"tasks.path": str(pool), "tasks_per_iteration": 2})).problems
    assert len(problems) == 1
    assert problems[0].startswith("tasks: ")
    assert "gone" in problems[0]


def test_duplicate_ids(here, write_tasks):
    pool = write_tasks(["a", "b"], listed=["a", "b", "a"], folder="other")
    problems = look(here(**{"tasks.path": str(pool), "tasks_per_iteration": 2})).problems
    assert len(problems) == 1
    assert "'a'" in problems[0] or " a" in problems[0]
    twice = look(here(**{"tasks.include": ["a", "a", "b", "c", "d"]})).problems
    assert twice == ["tasks.include: the same id twice: a"]


@pytest.mark.parametrize("part", ["instruction.md", "task.toml", "environment/Dockerfile", "tests/test.sh"])
def test_each_part_of_a_task_is_needed(here, write_tasks, part):
    pool = write_tasks(["a", "b", "c", "d"], folder="other")
    (pool / "b" / part).unlink()
    problems = look(here(**{"tasks.path": str(pool)})).problems
    assert len(problems) == 1
    assert part in problems[0]


def test_no_such_pool_and_unknown_ids(here):
    assert look(here(**{"tasks.path": "/nowhere/pool"})).problems[0].startswith("tasks.path: no folder /nowhere/pool")
    problems = look(here(**{"tasks.include": ["a", "b", "c", "dd"]})).problems
    assert any(problem.startswith("tasks.include: ") and "dd" in problem for problem in problems)


def test_more_tasks_an_iteration_than_there_are(here):
    assert look(here(tasks_per_iteration=5)).problems == [
        "tasks_per_iteration: 5, but tasks has 4; a batch of different tasks cannot be formed; expected at most 4"
    ]


def test_evaluation_on_what_is_trained_on(here, write_tasks, tmp_path):
    changes = {"evaluation.every": 2, "evaluation.tasks": {"path": str(tmp_path / "pool"), "include": ["b", "a"]}}
    problems = look(here(**changes)).problems
    assert problems == ["evaluation.tasks: also trained on: a, b; expected other tasks, see include and exclude"]
    copied = write_tasks(["z"], folder="copy")
    (copied / "z" / "instruction.md").write_text((tmp_path / "pool" / "a" / "instruction.md").read_text())
    problems = look(here(**{"evaluation.every": 2, "evaluation.tasks": {"path": str(copied)}})).problems
    assert problems == ["evaluation.tasks: also trained on: a; expected other tasks, see include and exclude"]
    never = {"evaluation.every": 0, "evaluation.tasks": {"path": str(copied)}}
    assert look(here(**never)).problems == []


def test_output_that_cannot_be_written(here, tmp_path):
    (tmp_path / "file").write_text("")
    problems = look(here(**{"paths.outputs": str(tmp_path / "file" / "out")})).problems
    assert problems[0].startswith(f"paths.outputs: {tmp_path}/file is a file")
    problems = look(here(output_dir="/proc/rl360")).problems
    assert problems[0].startswith("output_dir: cannot write to /proc")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_without_permission(here, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    problems = look(here(**{"paths.outputs": str(tmp_path / "locked")})).problems
    assert problems[0].startswith(f"paths.outputs: cannot write to {tmp_path}/locked")


def test_a_folder_that_holds_a_run_is_not_overwritten(here, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resolved.yaml").write_text("")
    config = here(output_dir=str(tmp_path / "run"))
    assert look(config).problems == [
        f"output_dir: {tmp_path}/run already holds a run; continue it with resume={tmp_path}/run"
    ]
    assert look(config, Path(config.output_dir), resuming=True).problems == []


def test_no_sandbox_ability(here, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    problems = look(here(**{"sandbox.import_path": "rl360.sandboxes.local:LocalSandbox"})).problems
    assert any("bubblewrap" in problem and "apt-get install bubblewrap" in problem for problem in problems)
    assert look(here()).problems == []  # another backend needs no bubblewrap


def test_a_taken_port_is_said_before_anything_starts(here):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        problems = look(here(**{"gateway.port": port})).problems
    assert problems[0].startswith(f"gateway.port: {port} on 127.0.0.1 cannot be used")
    assert look(here(**{"gateway.port": port})).problems == []


def test_too_little_memory_and_disk(here, monkeypatch):
    monkeypatch.setattr(files, "memory", lambda: Memory(total=2**28, available=2**27))
    monkeypatch.setattr(files, "free_disk_bytes", lambda folder: 1000)
    problems = look(here()).problems
    assert [problem.split(":")[0] for problem in problems] == ["memory", "disk"]
    assert "the machine has 0.2 GiB" in problems[0]
    monkeypatch.setattr(files, "memory", lambda: Memory(total=2**40, available=2**27))
    found = look(here())
    assert found.warnings[0].startswith("memory: ")


def test_no_checkpoint_needs_no_disk_and_is_warned_of(here, monkeypatch):
    monkeypatch.setattr(files, "free_disk_bytes", lambda folder: 2**30)
    many = {"checkpoint.keep_last": 100_000}
    (problem,) = look(here(**many)).problems
    assert problem.startswith("disk: ")
    assert "checkpoint.at_end=false" in problem
    found = look(here(**many, **{"checkpoint.every": 0, "checkpoint.at_end": False, "checkpoint.hf": False}))
    assert found.problems == []
    assert any("nothing would be kept of the weights" in text for text in found.warnings)


def test_keys_without_a_value_are_not_looked_for(here):
    found = look(here(**{"model.path": "", "tasks.path": ""}), unset=["model.path", "tasks.path"])
    assert found.problems == []


def test_no_docker_daemon(here, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = look(here(**{"sandbox.import_path": "rl360.sandboxes.docker:DockerSandbox"})).problems
    assert problem == "sandbox: docker: docker is not on the PATH; install Docker, or use sandbox=local"


def test_no_daytona_key(here, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    changes = {"sandbox.import_path": "rl360.sandboxes.daytona:DaytonaSandbox"}
    changes |= {"sandbox.kwargs": {"api_key_env": "NO_SUCH_KEY", "api_url": "http://example.org"}}
    problems = look(here(**changes)).problems
    assert any("variable NO_SUCH_KEY is not set" in p for p in problems)
    assert any("unencrypted" in p for p in problems)


def test_servers_of_somebody_else_cannot_be_told_of_fp32_logits(here):
    external = {"rollout.engine": "external", "rollout.sync": "disk", "rollout.engine_urls": ["http://h:1"]}
    (warning,) = [text for text in look(here(**external)).warnings if text.startswith("model.fp32_logits: ")]
    assert "--enable-fp32-lm-head" in warning
    for others in (external | {"model.fp32_logits": False}, {}):
        assert not [text for text in look(here(**others)).warnings if "fp32_logits" in text]


def test_a_server_command_that_is_not_here_is_said_before_anything_starts(here):
    servers = {"rollout.engine": "sglang", "rollout.sync": "disk"}
    found = look(here(**servers, **{"rollout.sglang.command": ["/nowhere/python", "-m", "serve"]}))
    assert [problem for problem in found.problems if "command" in problem] == [
        "rollout.sglang.command: /nowhere/python is no program here; expected what takes SGLang's flags, or none for "
        "this Python's SGLang"
    ]
    assert look(here(**servers, **{"rollout.sglang.command": ["sh", "serve"]})).problems == []


def test_ports_of_servers_that_somebody_has_are_named(here):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        changes = {"rollout.engine": "sglang", "rollout.sync": "disk", "rollout.sglang.base_port": port}
        problems = look(here(**changes, **{"rollout.sglang.command": ["sh", "serve"]})).problems
    assert [problem for problem in problems if "port" in problem] == [
        f"rollout.sglang.base_port: port {port} of rollout.sglang.base_port {port} cannot be used on 127.0.0.1: "
        "[Errno 98] Address already in use; expected free ones, or 0 to take any"
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, [80, 40, 80]),
        ("", []),
        ("1", [40]),
        ("2, 1", [80, 40]),
        ("-1", []),
        ("NoDevFiles", []),  # Slurm's, for a job without GPUs
        ("0,-1,2", [80]),
        ("0,7,1", [80]),
        ("0,0,1", []),
        ("GPU-11,GPU-22", [40, 40]),  # which ones they are nobody asked
    ],
)
def test_cards_are_those_that_cuda_shows(monkeypatch, names, expected):
    """A job with 2 of a node's 8 GPUs got a plan for 8, and its third rank found none."""
    if names is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    cards = [Gpu("A", memory, "570") for memory in (80, 40, 80)]
    assert [card.memory_mib for card in visible(cards)] == expected
    assert visible([]) == []


def test_ranks_are_counted_against_the_cards_that_are_shown(typed, monkeypatch, tmp_path):
    monkeypatch.setattr("rl360.config.files.gpus", lambda: [Gpu("A", 81920, "570")] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = replace(typed(**{"model.path": str(tmp_path)}), trainer=MegatronTrainerConfig(num_gpus=4))
    (problem,) = [problem for problem in look(config).problems if problem.startswith("trainer.num_gpus")]
    assert problem.startswith("trainer.num_gpus: 4, and this machine has 2 CUDA GPUs that CUDA_VISIBLE_DEVICES shows")
