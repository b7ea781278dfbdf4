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

from pathlib import Path
from typing import Any

from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from rl360.agents.blocks import extract_code
from rl360.agents.endpoint import Endpoint, Spent
from rl360.types import Stop


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
        async with Endpoint(self._base_url, self.model_name, timeout_s=self._request_timeout_s) as endpoint:
            reply = await endpoint.ask(messages)
        if isinstance(reply, Spent):
            context.metadata["stop"] = reply.stop.value
            return
        context.n_input_tokens, context.n_output_tokens = reply.prompt_tokens, reply.completion_tokens
        code, alone = extract_code(reply.text)
        context.metadata = {
            "format_ok": alone,
            "stop": (Stop.LENGTH if reply.truncated else Stop.FINISHED).value,
            "code_chars": len(code or ""),
            "finish_reason": reply.finish_reason,
        }
        if code is not None:
            local = Path(self.logs_dir) / Path(self._path).name
            local.write_bytes(code.encode("utf-8", "replace"))
            await environment.upload_file(source_path=local, target_path=self._path)
