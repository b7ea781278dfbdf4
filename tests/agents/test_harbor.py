"""Any other Harbor agent: found by name or path, made with what it needs, ended normally at a cap."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from harbor.agents.base import BaseAgent  # isort: skip
from harbor.agents.nop import NopAgent  # isort: skip
from harbor.llms.base import ContextLengthExceededError  # isort: skip
from harbor.models.agent.context import AgentContext  # isort: skip
from rl360.agents.bash import BashAgent
from rl360.agents.harbor import HarborAgent, capped, find
from rl360.engine.build import TRIAL_ENVIRONMENT, asked_directly
from tests.agents.kit import make, serving


class BadRequestError(Exception):
    pass


class WrappedContextError(ContextLengthExceededError):
    pass


class Plain(BaseAgent):
    """An agent of somebody else's; `raises` is what its run raises."""

    def __init__(self, *args: Any, raises: BaseException | None = None, says: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.raises, self.says = raises, says

    @staticmethod
    def name() -> str:
        return "plain"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: AgentContext) -> None:
        context.metadata = self.says
        if self.raises is not None:
            raise self.raises


def test_by_name_and_by_path() -> None:
    assert find("nop") is NopAgent
    assert find("rl360.agents.bash:BashAgent") is BashAgent
    assert find("terminus-2").name() == "terminus-2"
    with pytest.raises(ValueError, match="mini-swe-agent"):
        find("nobody")
    with pytest.raises(ValueError, match="nothing to train on"):
        find("oracle")


def test_it_is_the_named_agent(tmp_path: Path) -> None:
    agent = make(HarborAgent, tmp_path, "http://x/v1", agent="rl360.agents.bash:BashAgent", options={"max_failures": 5})
    assert isinstance(agent, BashAgent)
    assert (agent.name(), agent._base_url, agent._max_failures) == ("rl360-bash", "http://x/v1", 5)
    assert agent.model_name == "openai/policy"
    assert agent.extra_env["OPENAI_API_KEY"] == "unused"
    bare = make(HarborAgent, tmp_path, "http://x/v1", agent="rl360.agents.bash:BashAgent", litellm_provider="")
    assert bare.model_name == "policy"


ASKS_BY_LITELLM = """
import sys
import litellm
reply = litellm.completion("openai/policy", [{"role": "user", "content": "hi"}], api_base=sys.argv[1], api_key="unused")
print(reply.choices[0].message.content)
"""


async def test_a_proxy_for_the_internet_is_not_asked_for_the_model() -> None:
    """With http_proxy set, agents on LiteLLM sent every call there: no attempt ever had a reply."""
    nobody = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    env = {**os.environ, **TRIAL_ENVIRONMENT, **nobody, **asked_directly("127.0.0.1")}
    async with serving(["hello"]) as endpoint:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ASKS_BY_LITELLM, endpoint.url, env=env, stdout=asyncio.subprocess.PIPE
        )
        assert (await process.communicate())[0].decode().strip().endswith("hello")


def test_what_no_proxy_said_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org,127.0.0.1")
    expected = "example.org,127.0.0.1,10.0.0.1,localhost"
    assert asked_directly("10.0.0.1") == {"no_proxy": expected, "NO_PROXY": expected}
    monkeypatch.setenv("no_proxy", "*")  # in a list, most clients read it as the name of a host
    assert asked_directly("10.0.0.1") == {"no_proxy": "*", "NO_PROXY": "*"}


def test_an_agent_without_a_model_gets_no_url(tmp_path: Path) -> None:
    agent = HarborAgent(
        logs_dir=tmp_path, model_name="policy", base_url="http://x/v1", agent=f"{__name__}:Plain", options={"says": {}}
    )
    assert agent._base_url is None


@pytest.mark.parametrize(
    ("raises", "says", "metadata"),
    [
        (None, None, {"stop": "finished"}),
        (None, {"stop": "gave_up", "x": 1}, {"stop": "gave_up", "x": 1}),
        (ContextLengthExceededError("full"), {"x": 1}, {"stop": "length", "x": 1}),
        (WrappedContextError("full"), None, {"stop": "length"}),
    ],
)
async def test_a_cap_ends_it_normally(tmp_path: Path, raises: Any, says: Any, metadata: Any) -> None:
    context = AgentContext()
    await capped(Plain)(logs_dir=tmp_path, raises=raises, says=says).run("x", None, context)  # type: ignore[call-arg, arg-type]
    assert context.metadata == metadata


@pytest.mark.parametrize(
    ("raises", "stop"),
    [(BadRequestError("no"), "agent_error"), (asyncio.CancelledError(), "timeout"), (RuntimeError("x"), "agent_error")],
)
async def test_everything_else_is_raised(tmp_path: Path, raises: BaseException, stop: str) -> None:
    context = AgentContext()
    with pytest.raises(type(raises)):
        await capped(Plain)(logs_dir=tmp_path, raises=raises).run("x", None, context)  # type: ignore[call-arg, arg-type]
    assert context.metadata == {"stop": stop}
