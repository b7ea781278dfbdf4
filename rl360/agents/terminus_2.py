"""Harbor's terminus-2, made safe for training.

In: Harbor's instruction and a tmux session in the sandbox. Out: whatever its keystrokes do, and metadata: stop,
format_ok, turns, format_failures. Left to others: prompts, parsing and keystrokes (Harbor's Terminus2), caps and tokens
(the session proxy).

What is different from Harbor's:
- its model calls go to the session's URL through our endpoint, once each, instead of through LiteLLM with retries
  inside retries;
- a reply that was cut off is a turn like any other: Harbor's asks again inside itself without counting, which ran to
  316 calls with max_turns=2; here it is parsed, fails, and the next turn says that it was too long;
- the history is never summarised nor rewritten, and nothing is recorded;
- a cap on turns or tokens ends it normally, so that the verifier runs, and so do `max_failures` replies in a row that
  cannot be read or typed;
- a reply that Harbor's parser or the trajectory's encoding fails on is unreadable, no error of the program;
- keystrokes that end the shell end the attempt as given up, also when more were to follow. Whatever else fails after
  the first reply ends it normally as well, as long as the sandbox answers and the model call was not what failed.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from harbor.agents.terminus_2 import Terminus2
from harbor.agents.terminus_2.terminus_2 import Command
from harbor.agents.terminus_2.terminus_json_plain_parser import ParseResult
from harbor.agents.terminus_2.tmux_session import TmuxSession
from harbor.environments.base import BaseEnvironment
from harbor.llms.base import BaseLLM, LLMResponse
from harbor.llms.chat import Chat
from harbor.models.agent.context import AgentContext
from harbor.models.metric import UsageInfo

from rl360.agents.blame import hosts_failure, printable, sandbox_answers
from rl360.agents.endpoint import ENDPOINT_ERRORS, Endpoint, Reply, Spent
from rl360.types import Stop

CUT = (
    "Your reply was cut off because it was too long, and none of its commands were run. Reply again with fewer or "
    "shorter commands"
)
UNREADABLE = "The reply cannot be read"
NOT_SENT = "ERROR: the keystrokes could not be sent to the terminal."
# Fixed, whatever a config says: each would rewrite the history or install software in the sandbox.
_FIXED = {"enable_summarize": False, "record_terminal_session": False, "suppress_max_turns_warning": True}


class _Ended(Exception):
    """Leaves Harbor's loop."""

    def __init__(self, stop: Stop):
        self.stop = stop
        super().__init__(stop.value)


class _Parser:
    """Harbor's parser, whose own errors are the reply's. Lone surrogates, which JSON can write, are errors as well."""

    def __init__(self, inner: Any):
        self._inner = inner

    def parse_response(self, response: str) -> ParseResult:
        try:
            result = self._inner.parse_response(response)
            said = [result.analysis, result.plan, *(command.keystrokes for command in result.commands)]
            for text in said:
                str(text).encode()
        except Exception as error:  # RecursionError and UnicodeEncodeError are known
            return ParseResult([], False, f"{UNREADABLE} ({type(error).__name__})", "")
        result.error, result.warning = printable(result.error), printable(result.warning)
        return cast(ParseResult, result)


class _SessionModel(BaseLLM):
    """The session's endpoint as Harbor's agents see a model. It keeps the last reply, which says more than Harbor's."""

    def __init__(self, model_name: str):
        super().__init__()
        self._model_name = model_name
        self.endpoint: Endpoint | None = None
        self.last: Reply | None = None

    async def call(self, prompt: str, **kwargs: Any) -> LLMResponse:
        """Raises _Ended at a cap, and what the endpoint raises."""
        assert self.endpoint is not None, "only inside run()"
        history = kwargs.get("message_history") or []
        reply = await self.endpoint.ask([*history, {"role": "user", "content": prompt}])
        if isinstance(reply, Spent):
            raise _Ended(reply.stop)
        self.last = reply
        usage = UsageInfo(
            prompt_tokens=reply.prompt_tokens or 0,
            completion_tokens=reply.completion_tokens or 0,
            cache_tokens=0,
            cost_usd=0.0,
        )
        reasoning = reply.message.get("reasoning_content")
        return LLMResponse(content=reply.text, reasoning_content=reasoning, model_name=self._model_name, usage=usage)

    def get_model_context_limit(self) -> int:
        return 2**31  # the proxy's cap is the limit

    def get_model_output_limit(self) -> int | None:
        return None


class Terminus2Agent(Terminus2):
    """Keywords: those of Harbor's Terminus2, and

    max_turns: of the attempt; take `agent.max_turns`.
    max_failures: replies in a row that cannot be read or typed, which end it.
    request_timeout_s, request_retries: of one model call.
    """

    def __init__(
        self,
        *args: Any,
        max_turns: int | None = None,
        max_failures: int = 3,
        request_timeout_s: float = 600.0,
        request_retries: int = 2,
        **kwargs: Any,
    ):
        self._max_failures = max_failures
        self._request_timeout_s, self._request_retries = request_timeout_s, request_retries
        super().__init__(*args, max_turns=max_turns, **{**kwargs, **_FIXED})

    def _init_llm(self, llm_backend: Any, model_name: str, *args: Any, **kwargs: Any) -> BaseLLM:
        self._model = _SessionModel(model_name)
        return self._model

    def _get_parser(self) -> Any:
        return _Parser(super()._get_parser())

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Raises what the endpoint raises, and what a dead sandbox raises; a cap is no error."""
        self._sandbox, self._model.last = environment, None
        self._format_failures = self._failures_in_a_row = self._completions_in_a_row = 0
        stop = Stop.AGENT_ERROR
        try:
            async with Endpoint(
                self._base_url, self.model_name, timeout_s=self._request_timeout_s, retries=self._request_retries
            ) as self._model.endpoint:
                await super().run(instruction, environment, context)
            stop = self._why_it_returned()
        except _Ended as ended:
            stop = ended.stop
        except asyncio.CancelledError:
            stop = Stop.TIMEOUT
            raise
        except ENDPOINT_ERRORS:
            raise
        except Exception as error:
            if self._model.last is None or hosts_failure(error, environment) or not await sandbox_answers(environment):
                raise
            self.logger.warning("ended by %s: %s", type(error).__name__, error, exc_info=True)
        finally:
            turns = len(self._api_request_times)
            context.metadata = {
                **(context.metadata or {}),
                "stop": stop.value,
                "format_ok": turns > 0 and self._format_failures == 0,
                "turns": turns,
                "format_failures": self._format_failures,
            }

    def _why_it_returned(self) -> Stop:
        if self._completions_in_a_row >= 2:  # Harbor's asks for a confirmation
            return Stop.FINISHED
        if self._n_episodes >= self._max_episodes:
            return Stop.TURNS
        return Stop.GAVE_UP  # its shell has ended: the policy closed it

    async def _query_llm(
        self, chat: Chat, prompt: str, original_instruction: str = "", session: TmuxSession | None = None
    ) -> LLMResponse:
        began = asyncio.get_running_loop().time()
        response = await chat.chat(printable(prompt))
        self._api_request_times.append((asyncio.get_running_loop().time() - began) * 1000)
        return response

    async def _handle_llm_interaction(
        self, chat: Chat, prompt: str, original_instruction: str = "", session: TmuxSession | None = None
    ) -> tuple[list[Command], bool, str, str, str, LLMResponse]:
        commands, complete, feedback, analysis, plan, response = await super()._handle_llm_interaction(
            chat, prompt, original_instruction, session
        )
        if self._model.last is not None and self._model.last.truncated:
            commands, complete, feedback = [], False, f"ERROR: {CUT}"
        failed = "ERROR:" in feedback
        self._format_failures += failed
        self._completions_in_a_row = self._completions_in_a_row + 1 if complete and not failed else 0
        if failed:
            self._count_failure()
        return commands, complete, feedback, analysis, plan, response

    async def _execute_commands(self, commands: list[Command], session: TmuxSession) -> tuple[bool, str]:
        try:
            done = await super()._execute_commands(commands, session)
        except Exception as error:
            if hosts_failure(error, self._sandbox) or not await sandbox_answers(self._sandbox):
                raise
            if not await session.is_session_alive():
                raise _Ended(Stop.GAVE_UP) from error
            self._completions_in_a_row = 0
            self._count_failure()
            return False, f"{NOT_SENT}\n{self._limit_output_length(await session.get_incremental_output())}"
        self._failures_in_a_row = 0
        return done

    def _count_failure(self) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._max_failures:
            raise _Ended(Stop.GAVE_UP)

    def _dump_trajectory(self) -> None:
        """Harbor calls it while an error may be on its way, which one of its own would replace."""
        try:
            super()._dump_trajectory()
        except Exception:
            self.logger.warning("the trajectory could not be written", exc_info=True)
