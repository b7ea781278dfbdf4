"""Which part of a reply is the answer, and what the agent does with every kind of endpoint."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from harbor.models.agent.context import AgentContext  # isort: skip
from rl360.agents.blocks import extract_code  # isort: skip
from rl360.agents.endpoint import APIConnectionError, BadRequestError, InternalServerError  # isort: skip
from rl360.agents.single_turn import SingleTurnAgent  # isort: skip


@pytest.mark.parametrize(
    ("reply", "code", "alone"),
    [
        ("```python\nx = 1\n```", "x = 1\n", True),
        ("\n\n```\nx = 1\n```  \n", "x = 1\n", True),
        ("Here it is:\n```python\nx = 1\n```", "x = 1\n", False),
        ("```python\nx = 1\n```\nThat adds.", "x = 1\n", False),
        ("```python\nx = 1\n```\n```python\ny = 2\n```", "x = 1\n", False),
        ("```python\nx = 1\n", None, False),  # cut off before the fence closed
        ("x = 1", None, False),
        ("", None, False),
        ("```python x = 1 ```", None, False),  # one line: no block
        ("```python\ns = 'a ``` b'\n```", "s = 'a ``` b'\n", True),  # backticks within a line close nothing
        ("```python\n```", "", True),
    ],
)
def test_extract_code(reply: str, code: str | None, alone: bool) -> None:
    assert extract_code(reply) == (code, alone)


@given(st.text(alphabet="ab \n'", max_size=80), st.sampled_from(["", "python", "py"]))
def test_a_block_comes_back_as_it_was(code: str, language: str) -> None:
    assert extract_code(f"```{language}\n{code}\n```") == (f"{code}\n", True)


class Environment:
    def __init__(self) -> None:
        self.uploaded: dict[str, str] = {}

    async def upload_file(self, source_path: Path, target_path: str) -> None:
        self.uploaded[target_path] = Path(source_path).read_text()


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[SimpleNamespace]:
    """A server that answers with `.reply` (a dict, or (status, text)) and keeps the requests."""
    state = SimpleNamespace(reply={}, requests=[], url="")

    async def answer(request: web.Request) -> web.Response:
        state.requests.append(await request.json())
        if isinstance(state.reply, tuple):
            return web.Response(status=state.reply[0], text=state.reply[1])
        return web.json_response(state.reply)

    app = web.Application()
    app.router.add_post("/s/try/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}/s/try/v1"
    yield state
    await runner.cleanup()


def completion(text: str | None, finish_reason: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 7, "completion_tokens": 5}
    return {"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage}


async def run(endpoint: SimpleNamespace, tmp_path: Path, **kwargs: Any) -> tuple[AgentContext, Environment]:
    agent = SingleTurnAgent(logs_dir=tmp_path, model_name="m", base_url=endpoint.url, skip_model_parsing=True, **kwargs)
    context, environment = AgentContext(), Environment()
    await agent.run("Write f.", environment, context)  # type: ignore[arg-type]
    return context, environment


async def test_writes_the_block(endpoint: SimpleNamespace, tmp_path: Path) -> None:
    endpoint.reply = completion("```python\nx = 1\n```")
    context, environment = await run(endpoint, tmp_path, path="/app/s.py", system_prompt="Be short.")
    assert environment.uploaded == {"/app/s.py": "x = 1\n"}
    assert context.metadata == {"format_ok": True, "stop": "finished", "code_chars": 6, "finish_reason": "stop"}
    assert (context.n_input_tokens, context.n_output_tokens) == (7, 5)
    assert [m["role"] for m in endpoint.requests[0]["messages"]] == ["system", "user"]
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("text", "finish_reason", "stop"),
    [("no block", "stop", "finished"), ("```python\nx = ", "length", "length"), (None, "stop", "finished")],
)
async def test_no_block_writes_nothing_and_returns(
    endpoint: SimpleNamespace, tmp_path: Path, text: str | None, finish_reason: str, stop: str
) -> None:
    endpoint.reply = completion(text, finish_reason)
    context, environment = await run(endpoint, tmp_path)
    assert environment.uploaded == {}
    assert context.metadata is not None
    assert (context.metadata["format_ok"], context.metadata["stop"]) == (False, stop)


async def test_a_spent_context_is_no_error(endpoint: SimpleNamespace, tmp_path: Path) -> None:
    endpoint.reply = (400, json.dumps({"error": {"code": "context_length_exceeded", "message": "too long"}}))
    context, environment = await run(endpoint, tmp_path)
    assert environment.uploaded == {}
    assert context.metadata is not None
    assert context.metadata["stop"] == "length"


@pytest.mark.parametrize(
    ("reply", "error"),
    [((500, "boom"), InternalServerError), ((503, ""), InternalServerError), ((404, "x"), BadRequestError)],
)
async def test_errors_are_raised_after_one_request(
    endpoint: SimpleNamespace, tmp_path: Path, reply: tuple[int, str], error: type[Exception]
) -> None:
    endpoint.reply = reply
    with pytest.raises(error, match=str(reply[0])):
        await run(endpoint, tmp_path)
    assert len(endpoint.requests) == 1


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(APIConnectionError, match=r"127\.0\.0\.1:9"):
        await run(SimpleNamespace(url="http://127.0.0.1:9/v1"), tmp_path)
