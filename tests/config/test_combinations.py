"""One case for each rule: what breaks it, and that the message names the key and what was expected."""

import pytest

from rl360.config.combinations import CHOICES, DEADLINES, RANGES, combination_problems, combination_warnings
from rl360.config.schemas import SCHEMAS


def test_the_defaults_have_no_problem(typed):
    assert combination_problems(typed()) == []


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, True),
        ({"checkpoint.at_end": True}, False),
        ({"checkpoint.hf": True}, False),
        ({"checkpoint.every": 10}, False),
        ({"checkpoint.every": 11}, True),  # of 10 iterations
        ({"trainer.learning_rate": 0.0}, False),  # the weights are those that it began with
    ],
)
def test_a_run_that_keeps_no_weights_is_warned_of(typed, changes, warned):
    nothing = {"checkpoint.every": 0, "checkpoint.at_end": False, "checkpoint.hf": False}
    found = list(combination_warnings(typed(**nothing | changes)))
    assert [text.startswith("checkpoint: nothing would be kept of the weights") for text in found] == [True] * warned


SERVERS = {"rollout.engine": "sglang", "rollout.sync": "ipc"}
COLOCATED = {"rollout.engine": "sglang", "rollout.sync": "ipc", "rollout.sglang.colocated": True}

CASES = [
    ({"group_size": 1}, "group_size: 1 leaves nothing to compare"),
    ({"algorithm.updates_per_batch": 33}, "algorithm.updates_per_batch: 33 updates from 32 attempts"),
    ({"reward": {}}, "reward: no reward at all"),
    (
        {"reward": {"kept": {"_target_": "rl360.rewards.verifier.VerifierReward"}}},
        "reward.kept: its scalar would take the place of reward/kept_mean",
    ),
    ({"logger": {}}, "logger: no logger at all"),
    ({"rollout.top_p": 0.9}, "rollout.top_p: 0.9 in training"),
    ({"rollout.top_k": 50}, "rollout.top_k: 50 in training"),
    ({"rollout.max_new_tokens": 2048}, "rollout.max_new_tokens: 2048 leaves no room for a prompt"),
    ({"rollout.max_context_tokens": 4096}, "rollout.max_context_tokens: 4096 is more than the model was trained for"),
    ({"rollout.engine": "external", "rollout.sync": "disk"}, "rollout.engine_urls: empty with engine external"),
    (
        {"rollout.engine": "external", "rollout.engine_urls": ["http://h:1"]},
        "rollout.sync: shared needs the embedded engine",
    ),
    (
        {"rollout.engine": "external", "rollout.engine_urls": ["http://h:1"], "rollout.sync": "nccl"},
        "rollout.sync: nccl needs servers of the run",
    ),
    ({"rollout.sync": "disk"}, "rollout.sync: disk with the embedded engine"),
    ({"rollout.engine": "sglang"}, "rollout.sync: shared needs the embedded engine (one process); expected disk, ipc"),
    (
        {"rollout.engine": "sglang", "rollout.sync": "disk", "rollout.engine_urls": ["http://h:1"]},
        "rollout.engine_urls: given with engine sglang",
    ),
    (
        {
            "rollout.engine": "sglang",
            "rollout.sync": "ipc",
            "rollout.sglang.devices": [0, 1, 2],
            "rollout.sglang.num_servers": 2,
            "rollout.sglang.tensor_parallel_size": 2,
        },
        "rollout.sglang.devices: 3 of them for 2 servers of 2 GPUs; expected 4",
    ),
    (
        {
            "model.fp32_logits": False,
            "rollout.engine": "sglang",
            "rollout.sync": "disk",
            "rollout.sglang.extra_args": ["--enable-fp32-lm-head"],
        },
        "rollout.sglang.extra_args: --enable-fp32-lm-head with model.fp32_logits false",
    ),
    ({"rollout.sglang.colocated": True}, "rollout.sglang.colocated: true with engine embedded"),
    (COLOCATED | {"rollout.sync": "nccl"}, "rollout.sync: nccl with rollout.sglang.colocated"),
    (COLOCATED | {"rollout.max_staleness": 1}, "rollout.max_staleness: 1 with rollout.sglang.colocated"),
    (COLOCATED | {"rollout.sglang.num_servers": 2}, "rollout.sglang.num_servers: 2 GPUs for 2 servers, colocated"),
    (COLOCATED | {"rollout.sglang.devices": [1]}, "rollout.sglang.devices: 1 beyond the trainer's 1"),
    (
        {"rollout.engine": "sglang", "rollout.sync": "ipc", "rollout.sglang.devices": [1, 1]},
        "rollout.sglang.devices: the same GPU twice",
    ),
    (
        {"rollout.engine": "sglang", "rollout.sync": "ipc", "rollout.sglang.base_port": 65535},
        "rollout.sglang.base_port: 65535 for 1 servers ends at 65536",
    ),
    (SERVERS | {"rollout.sglang.devices": [-1]}, "rollout.sglang.devices: -1; expected numbers of GPUs, from 0"),
    (
        SERVERS | {"rollout.sglang.extra_args": ["--threads", "1", "--port=30000"]},
        "rollout.sglang.extra_args: --port is set by RL360; expected rollout.sglang.base_port",
    ),
    (
        SERVERS | {"rollout.sglang.extra_args": ["--weight-version", "7"]},
        "rollout.sglang.extra_args: --weight-version is set by RL360; expected none",
    ),
    (
        SERVERS | {"rollout.sglang.extra_args": ["--api-key", "k"]},
        "rollout.sglang.extra_args: --api-key would store a secret",
    ),
    (
        SERVERS | {"rollout.sglang.extra_args": ["--threads", "1", "--admin-api-key=k"]},
        "rollout.sglang.extra_args: --admin-api-key would store a secret",
    ),
    (
        SERVERS | {"rollout.sglang.command": ["python", "-m", "sglang.launch_server", "--api-k", "k"]},
        "rollout.sglang.command: --api-k would store a secret",
    ),
    (
        SERVERS | {"rollout.sglang.extra_args": ["--config", "my.yaml"], "gateway.api_key_env": "MY_KEY"},
        "rollout.sglang.extra_args: --config with gateway.api_key_env: SGLang takes one such file",
    ),
    (
        SERVERS | {"rollout.sglang.base_port": 30000, "gateway.port": 30001},
        "gateway.port: 30001 is one of the servers' (rollout.sglang.base_port: 30000 to 30001)",
    ),
    (
        SERVERS | {"rollout.sglang.start_timeout_s": 2000.0},
        "rollout.sglang.start_timeout_s: 2000 s is not less than cluster.no_progress_s 1000 s",
    ),
    ({"rollout.engine_urls": ["http://h:1"]}, "rollout.engine_urls: given with engine embedded"),
    ({"rollout.engine_urls": ["host:30000"]}, "rollout.engine_urls: 'host:30000' is not a URL"),
    ({"rollout.engine_urls": ["http://h:1", "http://h:1"]}, "rollout.engine_urls: the same URL twice"),
    ({"rollout.max_staleness": 1}, "rollout.max_staleness: 1 with the embedded engine"),
    (
        {
            "rollout.engine": "external",
            "rollout.sync": "disk",
            "rollout.engine_urls": ["http://h:1"],
            "rollout.max_staleness": 1,
            "rollout.deterministic": True,
        },
        "rollout.deterministic: true with rollout.max_staleness 1",
    ),
    (
        {
            "rollout.engine": "external",
            "rollout.sync": "disk",
            "rollout.engine_urls": ["http://h:1"],
            "rollout.max_staleness": 2,
            "algorithm.importance_cap": None,
        },
        "algorithm.importance_cap: null with rollout.max_staleness 2",
    ),
    ({"algorithm.importance_level": "sequenc"}, "algorithm.importance_level: 'sequenc' is none of token, sequence"),
    ({"algorithm.importance_mask_below": 0.0}, "algorithm.importance_mask_below: 0.0"),
    ({"algorithm.importance_mask_above": 0.5}, "algorithm.importance_mask_above: 0.5"),
    ({"agent.timeout_s": 100.0}, "agent.timeout_s: 100 s for the agent is not more than rollout.turn_timeout_s 150 s"),
    ({"rollout.request_timeout_s": 150.0}, "rollout.turn_timeout_s: 150 s for the turn is not more than"),
    ({"cluster.client_timeout_s": 700.0}, "cluster.client_timeout_s: 700 s for the client is not more than"),
    ({"sandbox.lifetime_s": 10.0}, "sandbox.lifetime_s: 10 s for the sandbox lifetime is not more than"),
    ({"cluster.trial_timeout_s": 400.0}, "cluster.trial_timeout_s: 400 s is less than sandbox start, agent and"),
    ({"cluster.trial_timeout_s": 500.0}, "cluster.trial_timeout_s: 500 s leaves an agent that uses its whole time no"),
    ({"agent.kwargs": {"request_timeout_s": 120}}, "agent.kwargs.request_timeout_s: the agent gives up on an answer"),
    (
        {"rollout.request_timeout_s": 600.0, "rollout.turn_timeout_s": 650.0},
        "agent.kwargs.request_timeout_s: the agent gives up on an answer after 600 s",
    ),
    ({"agent.kwargs": {"command_timeout_s": 31}}, "agent.kwargs.command_timeout_s: 31 s for a command and 120 s for"),
    ({"cluster.no_progress_s": 100.0}, "cluster.no_progress_s: 100 s would end a run during one slow trial"),
    ({"evaluation.every": 5}, "evaluation.tasks: null with evaluation.every 5"),
    ({"evaluation.at_start": True}, "evaluation.at_start: true with evaluation.every 0, which turns every evaluation"),
    ({"trainer.num_threads": 5000}, "trainer.num_threads: 5000; expected at most 4096"),
    (
        {"rollout.engine": "external", "rollout.sync": "disk", "rollout.engine_urls": ["http://a:99999"]},
        "rollout.engine_urls: 'http://a:99999' is not a URL; expected http://host:port",
    ),
    (
        {"rollout.engine": "external", "rollout.sync": "disk", "rollout.engine_urls": ["http://a:1", "http://a:1/"]},
        "rollout.engine_urls: the same URL twice",
    ),
    ({"evaluation.k": 2, "evaluation.temperature": 0.0}, "evaluation.k: 2 greedy attempts are all the same"),
    ({"trainer.betas": [0.9]}, "trainer.betas: [0.9]; expected two numbers"),
    ({"trainer.betas": [0.9, 1.0]}, "trainer.betas: [0.9, 1.0]; expected two numbers"),
    ({"algorithm.clip_high": 0.1}, "algorithm.clip_high: 0.1 is below clip_low 0.2"),
    ({"algorithm.kl_estimator": "k4"}, "algorithm.kl_estimator: 'k4' is none of k1, k2, k3"),
    (
        {"rollout.engine": "embeded"},
        "rollout.engine: 'embeded' is none of embedded, sglang, external; did you mean embedded?",
    ),
    ({"algorithm.importance_cap": 0.0}, "algorithm.importance_cap: 0.0; expected more than 0"),
    ({"iterations": 0}, "iterations: 0; expected at least 1"),
    ({"gateway.port": 70000}, "gateway.port: 70000; expected at most 65535"),
    ({"rollout.max_masked_share": 1.5}, "rollout.max_masked_share: 1.5; expected at most 1"),
    ({"checkpoint.keep_last": 0}, "checkpoint.keep_last: 0; expected at least 1"),
    ({"checkpoint.keep_every": -1}, "checkpoint.keep_every: -1; expected at least 0"),
    ({"name": "../up"}, "name: '../up' becomes a folder"),
    ({"name": "a/b"}, "name: 'a/b' becomes a folder"),
]


@pytest.mark.parametrize(
    ("changes", "text"), CASES, ids=[text.split(":")[0] + str(i) for i, (_, text) in enumerate(CASES)]
)
def test_each_rule(typed, changes, text):
    problems = combination_problems(typed(**changes))
    assert any(problem.startswith(text) for problem in problems), problems


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.importance_cap": None},
        {"algorithm.kl_coef": 0.01},
        {"trainer.max_grad_norm": 0.0},
        {"rollout.engine": "external", "rollout.sync": "disk", "rollout.engine_urls": ["http://a:1", "http://b:1"]},
        {"group_size": 1, "algorithm._target_": "mine.Reinforce"},
        {"evaluation.every": 5, "evaluation.tasks": {"path": "/x"}},
        {"agent.kwargs": {"command_timeout_s": 30.0, "request_timeout_s": 121}},
        {"gateway.api_key_env": "ENGINE_KEY"},
    ],
)
def test_what_is_fine(typed, changes):
    assert combination_problems(typed(**changes)) == []


SECRET = "sk-abcdefghijklmnop"


@pytest.mark.parametrize(
    "changes",
    [
        {"gateway.api_key_env": SECRET},
        {"gateway.api_key_env": "not a name"},
        {"model.source": "hf_abcdefghijklmnop"},
        {"logger.wandb": {"_target_": "rl360.x.Y", "kwargs": {"api_key": "abc"}}},
        {"sandbox.kwargs": {"password": "abc"}},
        {"agent.kwargs": {"list": [{"auth_token": "abc"}]}},
    ],
)
def test_secrets_are_refused_and_not_repeated(typed, changes):
    problems = combination_problems(typed(**changes))
    assert len(problems) == 1
    assert "secret" in problems[0]
    assert SECRET not in problems[0]
    assert "abc" not in problems[0]


def test_ordinary_keys_are_no_secrets(typed):
    reward = {"_target_": "rl360.x.Y", "kwargs": {"key": "reward"}}
    assert combination_problems(typed(**{"reward.verifier": reward, "rollout.max_new_tokens": 9})) == []


def test_the_tables_name_keys_that_exist(typed):
    config = typed()
    for key in [*CHOICES, *RANGES, *(key for _, key in DEADLINES)]:
        group, _, name = key.partition(".")
        if group in SCHEMAS:
            assert any(name in schema.__dataclass_fields__ for schema in SCHEMAS[group].values()), key
            continue
        node: object = config
        for part in key.split("."):
            node = getattr(node, part)
    assert [name for name, _ in DEADLINES] == ["model call", "turn", "agent", "trial", "client", "sandbox lifetime"]
