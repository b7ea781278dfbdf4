"""The gateway's keys: what does not fit together, and what this machine lacks."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from rl360.config.check import load
from rl360.config.combinations import combination_problems
from rl360.config.compose import Request, compose
from rl360.config.gateway import gateway_machine_problems
from rl360.config.schemas import DirectGatewayConfig, RootConfig, SmgGatewayConfig


@pytest.fixture
def smg(typed: Callable[..., RootConfig]) -> Callable[..., RootConfig]:
    """A config with gateway=smg, its keys changed, as in smg(smg_port=1)."""

    def make(**changes: Any) -> RootConfig:
        config = typed()
        merged = OmegaConf.merge(OmegaConf.structured(SmgGatewayConfig), changes)
        config.gateway = OmegaConf.to_object(merged)  # type: ignore[assignment]
        return config

    return make


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"smg_port": 70000}, "gateway.smg_port: 70000; expected at most 65535"),
        ({"metrics_port": -1}, "gateway.metrics_port: -1; expected at least 0"),
        ({"smg_port": 4000, "port": 4000}, "gateway.smg_port: 4000 is gateway.port too"),
        ({"smg_port": 4000, "metrics_port": 4000}, "gateway.metrics_port: 4000 is gateway.smg_port too"),
        ({"policy": "manuel"}, "gateway.policy: 'manuel' is none of manual, consistent_hashing; did you mean manual?"),
        ({"start_timeout_s": 0.0}, "gateway.start_timeout_s: 0.0; expected more than 0"),
        ({"health_interval_s": 120.0}, "gateway.health_interval_s: 120 s; a dead engine would be noticed after"),
        ({"smg_args": ["--policy", "random"]}, "gateway.smg_args: --policy is set by RL360"),
        ({"smg_args": ["--api-key=abc"]}, "gateway.smg_args: --api-key would store a secret"),
        ({"smg_args": ["--retry-max-retries", "3"]}, "gateway.smg_args: --retry-max-retries lets SMG send requests"),
    ],
)
def test_each_rule(smg: Callable[..., RootConfig], changes: dict[str, Any], text: str) -> None:
    problems = combination_problems(smg(**changes))
    assert any(problem.startswith(text) for problem in problems), problems


def test_the_key_of_an_argument_is_not_printed(smg: Callable[..., RootConfig]) -> None:
    assert not any("s3cret" in problem for problem in combination_problems(smg(smg_args=["--api-key=s3cret"])))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"smg_port": 4000, "metrics_port": 4001},
        {"policy": "consistent_hashing"},
        {"smg_args": ["--log-level", "info"]},
    ],
)
def test_what_is_right_passes(smg: Callable[..., RootConfig], changes: dict[str, Any]) -> None:
    assert combination_problems(smg(**changes)) == []


def test_what_this_machine_lacks(smg: Callable[..., RootConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL360_NO_SUCH_KEY", raising=False)
    assert list(gateway_machine_problems(smg())) == []
    problems = list(gateway_machine_problems(smg(api_key_env="RL360_NO_SUCH_KEY")))
    assert problems == ["gateway.api_key_env: the variable that it names is not set; expected the engines' key in it"]
    for key, said in (("", "is empty or"), ("s3cret\n", "is empty or"), ("s3 cret", "is empty or"), ("-s3cret", "")):
        monkeypatch.setenv("RL360_TEST_KEY", key)
        problems = list(gateway_machine_problems(smg(api_key_env="RL360_TEST_KEY")))
        assert len(problems) == (1 if said else 0)  # a key that begins with - is one for SGLang only
        assert all(said in problem and "cret" not in problem for problem in problems)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = gateway_machine_problems(smg())
    assert problem == "gateway: smg is not installed; it is in the extra `cluster`: pip install 'rl360[cluster]'"


@pytest.mark.parametrize("key", ["port", "smg_port", "metrics_port"])
def test_a_taken_port_is_named(smg: Callable[..., RootConfig], key: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (problem,) = gateway_machine_problems(smg(**{key: port}))
    assert problem.startswith(f"gateway.{key}: {port} on 127.0.0.1 cannot be used")


def test_a_host_that_is_not_here_is_named(smg: Callable[..., RootConfig]) -> None:
    (problem,) = gateway_machine_problems(smg(host="192.0.2.1"))  # of the range that is nobody's, RFC 5737
    assert problem.startswith("gateway.host: 192.0.2.1 is no address of this machine")


def test_each_option_has_its_own_keys() -> None:
    composed = compose(Request(("gateway=smg", "gateway.smg_port=4000", "gateway.smg_args=[--log-level,info]")))
    config = load(composed.values, composed.choices).config
    assert config is not None
    assert isinstance(config.gateway, SmgGatewayConfig)
    assert (config.gateway.smg_port, config.gateway.smg_args) == (4000, ["--log-level", "info"])
    direct = load(compose(Request(())).values).config
    assert direct is not None
    assert isinstance(direct.gateway, DirectGatewayConfig)
    wrong = compose(Request(("+gateway.policy=manual",)))
    problems = (*wrong.problems, *load(wrong.values, wrong.choices).problems)
    assert any("gateway.policy" in problem and "gateway=smg" in problem for problem in problems), problems
