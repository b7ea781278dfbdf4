from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl360.config.check import load
from rl360.config.compose import Request, compose
from rl360.config.files import Found
from rl360.config.resume import changed_tasks, resume_folder, resumed
from rl360.types import Task


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder as a finished start leaves it: quickstart with another seed."""
    folder = tmp_path / "run"
    folder.mkdir()
    values = compose(Request(("experiment=quickstart", "seed=7"))).values
    OmegaConf.save(OmegaConf.create({**values, "output_dir": str(folder)}), folder / "resolved.yaml")
    return folder


def test_the_saved_values_win(run):
    composed = resumed(Request((f"resume={run}",)), run)
    assert composed.problems == ()
    assert (composed.values["seed"], composed.values["name"]) == (7, "quickstart")
    assert composed.values["resume"] == composed.values["output_dir"] == str(run)


def test_listed_keys_may_change_and_only_they(run):
    changes = ("iterations=20", "logger=[jsonl]", "checkpoint.every=2", "+cluster.no_progress_s=700.0")
    composed = resumed(Request((f"resume={run}", *changes)), run)
    assert composed.problems == ()
    assert composed.values["iterations"] == 20
    assert list(composed.values["logger"]) == ["jsonl"]
    assert composed.values["checkpoint"]["every"] == 2
    assert composed.values["cluster"]["no_progress_s"] == 700.0
    assert composed.values["trainer"]["learning_rate"] == 2e-5


def test_paths_that_an_earlier_version_saved_as_they_were_given(run, tmp_path, monkeypatch):
    """The same command line differed from them, and the run could not be resumed by it."""
    monkeypatch.chdir(tmp_path)
    saved = OmegaConf.load(run / "resolved.yaml")
    saved.model.path, saved.tasks.path = "my model", "pool"
    OmegaConf.save(saved, run / "resolved.yaml")
    composed = resumed(Request((f"resume={run}", "model.path=my model", "tasks.path=pool")), run)
    assert composed.problems == ()
    assert composed.values["model"]["path"] == str(tmp_path / "my model")
    assert resumed(Request((f"resume={run}",)), run).values["tasks"]["path"] == str(tmp_path / "pool")


def test_folders_that_are_elsewhere_now(run):
    """A run folder that was copied to another machine: its paths are absolute, and named the first one's."""
    moved = ("model.path=/there/model", "tasks.path=/there/pool", "evaluation.tasks.path=/there/held_out")
    composed = resumed(Request((f"resume={run}", *moved)), run)
    assert composed.problems == ()
    assert composed.values["model"]["path"] == "/there/model"
    assert composed.values["tasks"]["path"] == "/there/pool"
    assert composed.values["evaluation"]["tasks"]["path"] == "/there/held_out"
    by_a_group = resumed(Request((f"resume={run}", "tasks=multi_turn")), run).problems
    assert any(problem.startswith("tasks.path: ") for problem in by_a_group)


def test_every_other_change_is_named_with_both_values(run):
    composed = resumed(Request((f"resume={run}", "seed=8", "trainer.learning_rate=0.1", "group_size=8")), run)
    assert [problem.split(" of the saved")[0] for problem in composed.problems] == [
        "seed: 8 (seed=8) differs from 7",
        "trainer.learning_rate: 0.1 (trainer.learning_rate=0.1) differs from 2e-05",
    ]
    assert ["only iterations, logger, cluster" in problem for problem in composed.problems] == [False, True]  # once


def test_another_class_is_one_difference(run):
    (problem,) = resumed(Request((f"resume={run}", "trainer=megatron")), run).problems
    assert problem.startswith("trainer._target_: 'rl360.trainers.megatron.trainer.MegatronTrainer' (trainer=megatron)")


def test_a_misspelt_key_is_called_that(run):
    """It "differs from None of the saved run" also where the right one may change."""
    slips = ("rollout.concurency=3", "trainer.num_thread=2", "foo=1")
    problems = resumed(Request((f"resume={run}", *slips)), run).problems
    assert [problem.partition("; ")[0] for problem in problems] == [
        "rollout.concurency: unknown key for QueueRollout",
        "trainer.num_thread: unknown key for TorchTrainer",
        "foo: unknown key",
    ]


def test_a_resume_may_have_other_servers(run):
    """Fewer GPUs than the run began with are no reason to lose it."""
    changes = ("rollout.sglang.num_servers=2", "rollout.sglang.devices=[4,5]", "rollout.kv_cache_gib=0.5")
    composed = resumed(Request((f"resume={run}", *changes)), run)
    assert composed.problems == ()
    assert composed.values["rollout"]["sglang"]["devices"] == [4, 5]
    assert composed.values["rollout"]["kv_cache_gib"] == 0.5
    (problem,) = resumed(Request((f"resume={run}", "rollout.sglang.dtype=float32")), run).problems
    assert problem.startswith("rollout.sglang.dtype: 'float32'")


def test_what_may_change_may_be_taken_away(run):
    composed = resumed(Request((f"resume={run}", "~logger.console")), run)
    assert composed.problems == ()
    assert list(composed.values["logger"]) == ["tensorboard", "jsonl"]
    assert load(composed.values, composed.choices).problems == ()


def test_an_experiment_given_again_must_be_the_saved_one(run):
    problems = resumed(Request((f"resume={run}", "experiment=quickstart")), run).problems
    assert [problem.split(" of the")[0] for problem in problems] == ["seed: 0 (experiment=quickstart) differs from 7"]
    assert resumed(Request((f"resume={run}", "experiment=quickstart", "seed=7")), run).problems == ()


def test_a_group_given_again_is_compared_key_by_key(run):
    assert resumed(Request((f"resume={run}", "algorithm=grpo")), run).problems == ()
    problems = resumed(Request((f"resume={run}", "algorithm=grpo_std")), run).problems
    assert sorted(problem.split(":")[0] for problem in problems) == [
        "algorithm.clip_high",
        "algorithm.normalize_std",
        "algorithm.reducer",
    ]


def test_a_moved_folder_is_where_the_run_goes_on(run, tmp_path):
    moved = run.rename(tmp_path / "elsewhere")
    assert resumed(Request((f"resume={moved}",)), moved).values["output_dir"] == str(moved)


def test_no_run_there(tmp_path):
    assert resumed(Request(), tmp_path).problems == (
        f"resume: no resolved.yaml in {tmp_path}; expected the folder of an earlier run",
    )
    (tmp_path / "resolved.yaml").write_text("a: [1\n")
    assert "cannot be read" in resumed(Request(), tmp_path).problems[0]
    (tmp_path / "resolved.yaml").write_text("- a\n")
    assert "holds no experiment" in resumed(Request(), tmp_path).problems[0]


def test_a_finished_run_with_nothing_left_is_said(run):
    (run / "summary.json").write_text(json.dumps({"exit_reason": "finished", "iterations": 10}))
    assert resumed(Request((f"resume={run}",)), run).problems == (
        "iterations: 10, and the run has done 10; give more, such as iterations=20",
    )
    assert resumed(Request((f"resume={run}", "iterations=11")), run).problems == ()
    (run / "summary.json").write_text(json.dumps({"exit_reason": "interrupted", "iterations": 10}))
    assert resumed(Request((f"resume={run}",)), run).problems == ()


def test_a_changed_data_set_is_noticed(run):
    def task(task_id: str, content: str) -> Task:
        return Task(task_id, run, ("coding",), content)

    hashes = {"tasks": {"a": "1", "b": "2"}, "evaluation.tasks": {}}
    (run / "plan.json").write_text(json.dumps({"task_hashes": hashes}))
    same = Found(model_dir=run, training=[task("a", "1"), task("b", "2")])
    assert changed_tasks(run, same) == []
    other = Found(model_dir=run, training=[task("a", "1"), task("b", "3"), task("c", "4")])
    assert changed_tasks(run, other) == ["tasks: changed since the run began: b, c; expected the same data set"]


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        (("seed=1",), None),
        (("resume=null",), None),
        (("resume=/a/b",), Path("/a/b")),
        (("+resume='/a/b c'",), Path("/a/b c")),
        (("resume=/a", "seed=1", "resume=/b"), Path("/b")),  # the last, as of every key
    ],
)
def test_where_resume_points(overrides, folder):
    assert resume_folder(Request(overrides)) == folder
