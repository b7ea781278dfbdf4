"""The second check: what composed is compared with schemas, sources and rules, and comes out typed."""

from __future__ import annotations

import copy
import subprocess
import sys

from omegaconf import OmegaConf

from rl360.config.check import examine, load
from rl360.config.compose import Composed, Request, compose
from rl360.config.schemas import RootConfig


def values(*overrides: str) -> dict:
    composed = compose(Request(overrides))
    assert composed.problems == ()
    return copy.deepcopy(dict(composed.values))


def test_sets_come_out_as_target_and_arguments():
    config, problems = load(values("reward.format_penalty.penalty=0.1"))
    assert problems == ()
    assert isinstance(config, RootConfig)
    assert list(config.reward) == ["verifier", "format_penalty"]
    assert config.reward["format_penalty"]._target_ == "rl360.rewards.format_penalty.FormatPenalty"
    assert config.reward["format_penalty"].kwargs == {"penalty": 0.1}


def test_resolved_yaml_loads_to_the_same_config():
    first = values("experiment=quickstart")
    saved = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(first)))
    assert load(saved).config == load(first).config


def test_every_kind_of_problem_at_once_with_the_option_in_its_name():
    broken = values()
    broken["algorithm"]["clip_hihg"] = 1
    broken["iterations"] = "many"
    broken["group_size"] = 1
    broken["reward"]["format_penalty"]["penaltty"] = 1
    broken["reward"]["format_penalty"]["penalty"] = "much"
    broken["logger"]["mine"] = {"_target_": "os.system"}
    broken["logger"]["jsonl"] = 5
    broken["gateway"]["_target_"] = "rl360.gateway.direct.DirectGatway"
    broken["agent"]["import_path"] = "rl360.agents.single_trun:SingleTurnAgent"
    broken["stepz"] = 1
    config, problems = load(broken, {"algorithm": "grpo"})
    assert config is None
    for text in (
        "algorithm.clip_hihg: unknown key for grpo; did you mean clip_high?",
        "iterations: 'many' is text; expected a whole number",
        "group_size: 1 leaves nothing to compare",
        "reward.format_penalty.penaltty: unknown key for FormatPenalty; did you mean penalty?",
        "reward.format_penalty.penalty: 'much'; expected float",
        "logger.mine._target_: os.system is not allowed; expected rl360. or launchers., or add its module to allow",
        "logger.jsonl: 5; expected a section with _target_",
        "gateway._target_: no class DirectGatway in rl360.gateway.direct; did you mean DirectGateway?",
        "agent.import_path: no module rl360.agents.single_trun; did you mean single_turn?",
        "stepz: unknown key",
    ):
        assert any(problem.startswith(text) for problem in problems), (text, problems)
    assert len(problems) == 10


def test_a_reward_of_ones_own_is_checked_by_its_constructor(tmp_path, monkeypatch):
    (tmp_path / "lab_rewards.py").write_text(
        "class Brevity:\n    def __init__(self, name: str, weight: float, limit: int = 10): ...\n"
        "    async def score(self, task, attempts, deadline_s): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"_target_": "lab_rewards.Brevity", "weight": 0.1}
    base = values()
    assert load({**base, "reward": {"brevity": own}, "allow_targets": ["lab_rewards"]}).problems == ()
    assert "not allowed" in load({**base, "reward": {"brevity": own}}).problems[0]
    wrong = {"_target_": "lab_rewards.Brevity", "weigth": 0.1}
    assert load({**base, "reward": {"brevity": wrong}, "allow_targets": ["lab_rewards"]}).problems == (
        "reward.brevity.weigth: unknown key for Brevity; did you mean weight?",
        "reward.brevity.weight: Brevity needs a value for it",
    )


def test_keys_without_a_value_are_named_once():
    base = values()
    base["model"]["name"] = "???"
    del base["tasks"]["path"]
    problems = load(base).problems
    assert problems == ("model.name: needs a value; expected text", "tasks.path: needs a value")


def test_problems_of_composing_config_and_machine_come_together(tmp_path):
    composed = compose(
        Request(("model=tinny", "algorithm.clip_hihg=1", f"paths.models={tmp_path}", "paths.outputs=/proc/x"))
    )
    problems = examine(composed).problems
    assert [problem.split(":")[0] for problem in problems] == [
        "model=tinny",
        "algorithm.clip_hihg",
        "model",
        "paths.outputs",
    ]


def test_an_empty_mapping_is_reported_and_not_a_crash():
    assert examine(Composed({})).problems != ()


def test_checking_never_imports_the_heavy_packages():
    code = (
        "import sys\n"
        "from rl360.cli import main\n"
        "main(['check', 'experiment=quickstart'])\n"
        "heavy = {'torch', 'harbor', 'transformers', 'litellm', 'sglang', 'tensorboard'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_keyword_that_a_sandbox_or_an_agent_of_ours_does_not_take_is_named():
    """Harbor's base classes take any keyword and drop it, so a slip would change nothing and say nothing."""
    broken = values("agent=terminus_2")
    broken["agent"]["kwargs"] |= {"max_failurs": 2, "parser_name": "xml", "request_timeout_s": 500.0}
    broken["sandbox"]["kwargs"] = {"artifact_mib": 5, "persistent_env": {}}
    assert load(broken).problems == (
        "agent.kwargs.max_failurs: unknown key for Terminus2Agent; did you mean max_failures?",
        "sandbox.kwargs.artifact_mib: unknown key for LocalSandbox; did you mean artifacts_mib?",
    )
    handed_on = values("agent=harbor")
    handed_on["agent"]["kwargs"]["anything"] = 1  # the named agent may know it
    assert load(handed_on).problems == ()


def test_an_experiment_whose_keys_are_not_the_roots_says_its_first_line(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("name: mine\nseed: 3\n")
    (tmp_path / "experiment" / "blank.yaml").write_text("")
    for name in ("mine", "blank"):
        composed = compose(Request((f"hydra.searchpath=[file://{tmp_path}]", f"experiment={name}")))
        assert load(composed.values, composed.choices).problems == (
            f"experiment: {name} does not set the root's keys; expected `# @package _global_` as the file's very "
            "first line",
        )


def test_resume_in_a_file_is_not_dropped_without_a_word():
    composed = Composed({**values(), "resume": "/somewhere/run"})
    expected = "resume: would not be heeded here"
    assert any(problem.startswith(expected) for problem in examine(composed).problems)
    assert not any(problem.startswith(expected) for problem in examine(composed, resuming=True).problems)
