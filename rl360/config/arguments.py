"""Values of what our own agents, rewards and stops are given: those that only a running attempt would notice.

In: a typed config. Out: problems as `key: what; expected; try`. Left to others: names and types of arguments
(components), keys with a schema (combinations).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rl360.config.names import suggestion
from rl360.config.schemas import RootConfig
from rl360.config.targets import OWN_PREFIXES, TargetError, constructor, source_of

FORMAT_PENALTY = "rl360.rewards.format_penalty.FormatPenalty"
HARBOR_AGENT = "rl360.agents.harbor:HarborAgent"
_HARBORS_NAMES = "harbor.models.agent.name", "AgentName"
_NOT_TO_TRAIN = "oracle"  # runs a task's own solution

# Argument of our agents -> (least, whether that itself is excluded).
_AGENT_RANGES: dict[str, tuple[float, bool]] = {
    "command_timeout_s": (0, True),
    "max_output_bytes": (1, False),
    "max_failures": (1, False),
    "request_timeout_s": (0, True),
    "request_retries": (0, False),
}


def argument_value_problems(config: RootConfig) -> Iterator[str]:
    """Everything wrong with them."""
    yield from _agent(config)
    yield from _format_penalties(config)
    if "" in config.rollout.stop:
        yield "rollout.stop: an empty string among them, which engines refuse; expected texts that end a turn"


def _agent(config: RootConfig) -> Iterator[str]:
    agent = config.agent
    if agent.import_path.startswith(OWN_PREFIXES):
        for key, (least, excluded) in _AGENT_RANGES.items():
            value = agent.kwargs.get(key)
            if not isinstance(value, int | float):
                continue
            if value < least or (excluded and value == least):
                yield f"agent.kwargs.{key}: {value}; expected {'more than' if excluded else 'at least'} {least}"
    name = agent.kwargs.get("agent")
    if agent.import_path == HARBOR_AGENT and isinstance(name, str):
        yield from _harbors_agent(name)


def _harbors_agent(name: str) -> Iterator[str]:
    """Whether there is such an agent: every attempt would fail on it."""
    key = "agent.kwargs.agent"
    if ":" in name:
        try:
            constructor(name)
        except TargetError as error:
            yield f"{key}: {error}"
        except (OSError, SyntaxError) as error:
            yield f"{key}: {name} cannot be read ({error})"
        return
    if name == _NOT_TO_TRAIN:
        yield f"{key}: the {name} runs a task's own solution; there is nothing to train on"
    elif (known := _names_of_harbors_agents()) and name not in known:
        yield f"{key}: Harbor has no agent {name}{suggestion(name, known)}"


def _names_of_harbors_agents() -> list[str]:
    """Read from Harbor's source; empty where it is not installed, or says it otherwise."""
    module, enum = _HARBORS_NAMES
    try:
        tree = source_of(module)
    except (TargetError, OSError, SyntaxError):
        return []
    body = next((s.body for s in tree.body if isinstance(s, ast.ClassDef) and s.name == enum), [])
    values = [s.value for s in body if isinstance(s, ast.Assign)]
    return [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def _format_penalties(config: RootConfig) -> Iterator[str]:
    earlier: list[str] = []
    for name, reward in config.reward.items():
        if reward._target_ == FORMAT_PENALTY:
            penalty, verifier = reward.kwargs.get("penalty", 0), reward.kwargs.get("verifier", "verifier")
            if isinstance(penalty, int | float) and penalty < 0:
                yield f"reward.{name}.penalty: {penalty}; expected 0 or more: it is subtracted"
            if verifier not in earlier:
                where = "comes after it" if verifier in config.reward else "is no reward of this experiment"
                yield (
                    f"reward.{name}.verifier: {verifier} {where}, and its success decides who pays; expected one of "
                    f"the rewards before it ({', '.join(earlier) or 'none'}); try 'reward=[verifier,format_penalty]'"
                )
        earlier.append(name)
