"""A try's own model endpoint, as agents of ours talk to it.

In: messages and tools. Out: a `Reply`, or `Spent` when the session is at a cap. Left to others: what a reply means (the
agents), tokens and caps (the session proxy).

Errors carry the names of Harbor's error table, because the rollout's failure table is keyed by class name. A cap is not
an error: an agent that meets one returns, so that the verifier runs on what it has done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from rl360.types import Stop

_MAX_ERROR_CHARS = 500
_RETRIED = frozenset({500, 502, 503})  # not 504: the call already had all of its time
_FIRST_PAUSE_S = 0.5  # before the first retry; doubled for each further one
_CAP_CODE = "context_length_exceeded"
_TURNS_USED = "turns are used up"  # how the session proxy words the turn cap


class InternalServerError(RuntimeError):
    """The model endpoint answered 5xx. The name is one of Harbor's error table."""


class BadRequestError(RuntimeError):
    """The model endpoint refused the request. The name is one of Harbor's error table."""


class APIConnectionError(RuntimeError):
    """The model endpoint did not answer, or not in time. The name is one of Harbor's error table."""


ENDPOINT_ERRORS = (InternalServerError, BadRequestError, APIConnectionError)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. `message` goes back into the history exactly as it is."""

    message: Mapping[str, Any]
    finish_reason: str  # stop | length | tool_calls
    prompt_tokens: int | None
    completion_tokens: int | None

    @property
    def text(self) -> str:
        return self.message.get("content") or ""

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        return self.message.get("tool_calls") or ()

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Spent:
    """The session answers no more: its turns or its tokens are used up."""

    stop: Stop  # TURNS | LENGTH


class Endpoint:
    """An async context manager around one HTTP connection pool.

    Args:
        base_url: of the try's session, ending in /v1.
        model: what requests call the model.
        timeout_s: of one request.
        retries: how often a request that failed with 5xx or a lost connection is made again. The session proxy knows
            an identical request, so a retry samples no second answer to one that was given.
    """

    def __init__(self, base_url: str | None, model: str | None, *, timeout_s: float, retries: int = 0):
        self._url = f"{base_url}/chat/completions"
        self._model = model or "policy"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._retries = retries
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Endpoint:
        self._http = aiohttp.ClientSession(timeout=self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Reply | Spent:
        """One model call. Raises InternalServerError, BadRequestError or APIConnectionError."""
        body: dict[str, Any] = {"model": self._model, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        pause_s = _FIRST_PAUSE_S
        for retries_left in range(self._retries, -1, -1):
            try:
                status, answer = await self._post(body)
            except aiohttp.ClientConnectionError as error:
                if not retries_left:
                    raise APIConnectionError(f"POST {self._url}: {type(error).__name__}: {error}") from error
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                raise APIConnectionError(f"POST {self._url}: {type(error).__name__}: {error}") from error
            else:
                if not (status in _RETRIED and retries_left):
                    return self._read(status, answer)
            await asyncio.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        assert self._http is not None, "use it as a context manager"
        async with self._http.post(self._url, json=body) as response:
            if response.status == 200:
                return 200, await response.json()
            return response.status, await response.text()

    def _read(self, status: int, answer: Any) -> Reply | Spent:
        if status == 200:
            try:
                choice, usage = answer["choices"][0], answer.get("usage") or {}
                finish = choice.get("finish_reason") or "stop"
                return Reply(choice["message"], finish, usage.get("prompt_tokens"), usage.get("completion_tokens"))
            except (LookupError, TypeError, AttributeError) as error:
                raise APIConnectionError(f"POST {self._url}: no chat completion came back") from error
        if status == 400 and _CAP_CODE in answer:
            return Spent(Stop.TURNS if _TURNS_USED in answer else Stop.LENGTH)
        kind = InternalServerError if status >= 500 else BadRequestError
        raise kind(f"POST {self._url}: {status}: {answer[:_MAX_ERROR_CHARS]}")
