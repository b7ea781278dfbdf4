"""The single-turn agent: one model call, one code block, one file.

In: Harbor's instruction and a base URL that is this try's own session. Out: the solution file in the sandbox, and
`context.metadata`: format_ok, stop, code_chars, finish_reason. Left to others: sampling and caps (the session proxy),
grading (the task's verifier).

What counts as the answer: the first fenced code block that closes. `format_ok` is true when that block is all of the
reply but for blank space around it. Without a block nothing is written and the agent returns normally, so that the
verifier runs and the attempt scores what an empty solution scores. A request is made once and never repeated here: the
rollout requeues what the engine failed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import aiohttp
from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from rl360.types import Stop

# A fence is a line of three backticks; the closing one stands alone at the start of a line.
_BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_MAX_ERROR_CHARS = 500


class InternalServerError(RuntimeError):
    """The model endpoint answered 5xx. The name is one of Harbor's error table."""


class BadRequestError(RuntimeError):
    """The model endpoint refused the request. The name is one of Harbor's error table."""


class APIConnectionError(RuntimeError):
    """The model endpoint did not answer, or not in time. The name is one of Harbor's error table."""


def extract_code(reply: str) -> tuple[str | None, bool]:
    """Return (code of the first closed block or None, whether the reply is exactly one block)."""
    match = _BLOCK.search(reply)
    if match is None:
        return None, False
    alone = not reply[: match.start()].strip() and not reply[match.end() :].strip()
    return match.group(1), alone


class SingleTurnAgent(BaseAgent):
    """Keywords: `path` of the solution file, `system_prompt` (none by default), `request_timeout_s` of the one call."""

    MODEL_CONNECTION = ModelConnectionSpec(base_url_destination_names={"default": None})
    capabilities = AgentCapabilities(base_url=True)

    def __init__(
        self,
        *args: Any,
        path: str = "/app/solution.py",
        system_prompt: str | None = None,
        request_timeout_s: float = 600.0,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._path, self._system_prompt, self._request_timeout_s = path, system_prompt, request_timeout_s

    @staticmethod
    def name() -> str:
        return "rl360-single-turn"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing to install."""

    async def set_web_tools_disabled(self, disabled: bool, environment: BaseEnvironment) -> None:
        """It has no tools at all."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Raises InternalServerError, BadRequestError or APIConnectionError; a spent context is no error."""
        messages = [{"role": "user", "content": instruction}]
        if self._system_prompt:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        context.metadata = {"format_ok": False, "stop": Stop.FINISHED.value, "code_chars": 0, "finish_reason": None}
        answer = await self._ask({"model": self.model_name or "policy", "messages": messages})
        if answer is None:
            context.metadata["stop"] = Stop.LENGTH.value
            return
        choice = answer["choices"][0]
        usage = answer.get("usage") or {}
        context.n_input_tokens = usage.get("prompt_tokens")
        context.n_output_tokens = usage.get("completion_tokens")
        code, alone = extract_code(choice["message"].get("content") or "")
        stop = Stop.LENGTH if choice.get("finish_reason") == "length" else Stop.FINISHED
        context.metadata = {
            "format_ok": alone,
            "stop": stop.value,
            "code_chars": len(code or ""),
            "finish_reason": choice.get("finish_reason"),
        }
        if code is not None:
            local = Path(self.logs_dir) / Path(self._path).name
            local.write_text(code)
            await environment.upload_file(source_path=local, target_path=self._path)

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """One request. None: the context is spent."""
        url = f"{self._base_url}/chat/completions"
        timeout = aiohttp.ClientTimeout(total=self._request_timeout_s)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=body) as response:
                if response.status == 200:
                    return dict(await response.json())
                text = (await response.text())[:_MAX_ERROR_CHARS]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise APIConnectionError(f"POST {url}: {type(error).__name__}: {error}") from error
        if response.status == 400 and "context_length_exceeded" in text:
            return None
        kind = InternalServerError if response.status >= 500 else BadRequestError
        raise kind(f"POST {url}: {response.status}: {text}")
