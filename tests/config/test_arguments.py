"""Values that only a running attempt would notice: of our agents, of the format penalty, of stops."""

from __future__ import annotations

import pytest

from rl360.config.arguments import argument_value_problems

VERIFIER = {"_target_": "rl360.rewards.verifier.VerifierReward", "kwargs": {}}
PENALTY = "rl360.rewards.format_penalty.FormatPenalty"
HARBOR = "rl360.agents.harbor:HarborAgent"


def penalty(**kwargs: object) -> dict:
    return {"_target_": PENALTY, "kwargs": kwargs}


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"command_timeout_s": -1}, "agent.kwargs.command_timeout_s: -1; expected more than 0"),
        ({"command_timeout_s": 0}, "agent.kwargs.command_timeout_s: 0; expected more than 0"),
        ({"max_output_bytes": 0}, "agent.kwargs.max_output_bytes: 0; expected at least 1"),
        ({"max_failures": 0}, "agent.kwargs.max_failures: 0; expected at least 1"),
        ({"request_retries": -1}, "agent.kwargs.request_retries: -1; expected at least 0"),
    ],
)
def test_ranges_of_our_agents(typed, kwargs, expected):
    assert list(argument_value_problems(typed(**{"agent.kwargs": kwargs}))) == [expected]
    assert not list(argument_value_problems(typed(**{"agent.kwargs": kwargs, "agent.import_path": "mine:Agent"})))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({"verifier": VERIFIER, "penalty": penalty()}, None),
        ({"judge": VERIFIER, "penalty": penalty(verifier="judge")}, None),
        ({"penalty": penalty(), "verifier": VERIFIER}, "reward.penalty.verifier: verifier comes after it"),
        ({"penalty": penalty()}, "reward.penalty.verifier: verifier is no reward of this experiment"),
        ({"verifier": VERIFIER, "penalty": penalty(penalty=-0.1)}, "reward.penalty.penalty: -0.1; expected 0 or more"),
    ],
)
def test_a_format_penalty_comes_after_its_verifier(typed, rewards, expected):
    from dataclasses import replace

    from rl360.config.schemas import RewardConfig

    config = replace(typed(), reward={name: RewardConfig(**entry) for name, entry in rewards.items()})
    found = list(argument_value_problems(config))
    assert [problem.startswith(expected or "") for problem in found] == [True] * (expected is not None)


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        ("nop", None),
        ("mini-swe-agent", None),
        ("rl360.agents.bash:BashAgent", None),
        ("nope", "agent.kwargs.agent: Harbor has no agent nope; did you mean nop?"),
        ("oracle", "agent.kwargs.agent: the oracle runs a task's own solution; there is nothing to train on"),
        ("no_such_module:Agent", "agent.kwargs.agent: no module no_such_module; is the package that has it installed?"),
    ],
)
def test_harbors_agent_is_there(typed, agent, expected):
    config = typed(**{"agent.import_path": HARBOR, "agent.kwargs": {"agent": agent}})
    assert list(argument_value_problems(config)) == ([] if expected is None else [expected])


def test_an_empty_stop_is_named(typed):
    (problem,) = argument_value_problems(typed(**{"rollout.stop": ["a", ""]}))
    assert problem.startswith("rollout.stop: an empty string among them")
