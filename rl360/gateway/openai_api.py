"""OpenAI's chat completions, as far as agents use them: request, response, stream and error shapes.

In: the bytes of a request. Out: `ChatRequest`, and the dictionaries that answer it. Left to others: tokens, sessions.
Unknown request fields are ignored, as servers do; what the engine said beyond OpenAI's fields goes out under "rl360".
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl360.gateway.messages import CanonicalMessage, MessageError, canonical, digest, normalise

STREAM_PIECE_CHARS = 64  # clients show progress by pieces; the answer is complete before the first is sent
# Part of what makes two requests the same. An agent that wants another sample of one prompt says so with a seed.
IDENTITY_FIELDS = ("tool_choice", "response_format", "seed")


class RequestError(Exception):
    """Answered with an HTTP error in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None):
        self.status = status
        self.code = code
        self.param = param
        super().__init__(message)

    def payload(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat completion request. `key` is equal for a retry, also when it streams and the first did not."""

    messages: tuple[dict[str, Any], ...]  # normalised
    history: tuple[CanonicalMessage, ...]  # the same messages, comparable
    tools: tuple[dict[str, Any], ...]
    template_arguments: Mapping[str, Any]
    context_digest: bytes  # of what stands in every prompt beside the messages: tools and template arguments
    key: bytes
    parse_tools: bool
    model: str
    raw: tuple[dict[str, Any], ...] = field(default=(), repr=False, compare=False)  # the messages as they came


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How the client wants its answer; two retries may differ in it."""

    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool


@dataclass(frozen=True, slots=True)
class SampledToken:
    token: str
    logprob: float


def parse_request(body: bytes, before: ChatRequest | None = None) -> tuple[ChatRequest, ReplyOptions]:
    """Read a request. Raises RequestError 400 naming the field.

    `before`: the session's last request. A long history is mostly the same messages again; what came just so before is
    taken from there.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the request is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError(400, "expected a JSON object")
    if data.get("n") not in (None, 1):
        raise RequestError(400, "n: only n=1 is served; send one request per sample", param="n")
    raw = data.get("messages")
    if not isinstance(raw, list) or not raw or not all(isinstance(m, dict) for m in raw):
        raise RequestError(400, "messages: expected a list of at least one message", param="messages")
    messages, history = _messages(raw, before)
    tools = _tools(data.get("tools"))
    arguments = data.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise RequestError(400, "chat_template_kwargs: expected an object", param="chat_template_kwargs")
    context = digest([tools, arguments])
    request = ChatRequest(
        messages=messages,
        history=history,
        tools=tools,
        template_arguments=arguments,
        context_digest=context,
        key=_key(history, context, [data.get(field) for field in IDENTITY_FIELDS]),
        parse_tools=bool(tools) and data.get("tool_choice") != "none",
        model=str(data.get("model") or "policy"),
        raw=tuple(raw),
    )
    options = ReplyOptions(
        stream=bool(data.get("stream")),
        include_usage=bool((data.get("stream_options") or {}).get("include_usage")),
        logprobs=bool(data.get("logprobs")),
        token_ids=bool(data.get("return_token_ids")),
    )
    return request, options


def _messages(
    raw: Sequence[dict[str, Any]], before: ChatRequest | None
) -> tuple[tuple[dict[str, Any], ...], tuple[CanonicalMessage, ...]]:
    """Messages as templates expect them, and the same comparable."""
    same = 0
    if before is not None:
        for sent, known in zip(raw, before.raw, strict=False):
            if not _came_before(sent, known):
                break
            same += 1
    try:
        new = [normalise(message, f"messages[{same + i}]") for i, message in enumerate(raw[same:])]
    except MessageError as error:
        raise RequestError(400, str(error), param=error.param) from error
    if before is None or not same:
        return tuple(new), tuple(map(canonical, new))
    return (*before.messages[:same], *new), (*before.history[:same], *map(canonical, new))


def _came_before(sent: dict[str, Any], known: dict[str, Any]) -> bool:
    """Whether both are the same JSON. In Python alone 1, 1.0 and true are equal, and text is the rule."""
    if sent != known:
        return False
    for value in sent.values():  # for every message of the history, each turn: no generator
        if type(value) is not str:
            return json.dumps(sent) == json.dumps(known)
    return True


def completion(
    *,
    completion_id: str,
    model: str,
    message: Mapping[str, Any],
    finish_reason: str,
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """A chat.completion object. `extra`: what the engine and the session said beyond OpenAI's fields."""
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": dict(message), "finish_reason": finish_reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        },
        "rl360": dict(extra),
    }


def with_options(
    payload: Mapping[str, Any],
    options: ReplyOptions,
    tokens: Sequence[SampledToken],
    prompt_ids: Sequence[int],
    sampled_ids: Sequence[int],
) -> dict[str, Any]:
    """The completion with the optional fields that this client asked for (`return_token_ids` as in vLLM)."""
    choice = dict(payload["choices"][0])
    reply = {**payload, "choices": [choice]}
    if options.logprobs:
        choice["logprobs"] = {
            "content": [{"token": t.token, "logprob": t.logprob, "bytes": None, "top_logprobs": []} for t in tokens]
        }
    if options.token_ids:
        choice["token_ids"] = list(sampled_ids)
        reply["prompt_token_ids"] = list(prompt_ids)
    return reply


def stream_events(payload: Mapping[str, Any], include_usage: bool) -> Iterator[bytes]:
    """The same completion as server-sent events, `[DONE]` included."""
    choice = payload["choices"][0]
    message = choice["message"]
    head = {k: payload[k] for k in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def event(delta: Mapping[str, Any], finish: str | None = None, **extra: Any) -> bytes:
        body = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **extra}]}
        return _event(body)

    yield event({"role": "assistant", "content": ""})
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        for start in range(0, len(text), STREAM_PIECE_CHARS):
            yield event({name: text[start : start + STREAM_PIECE_CHARS]})
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield event({"tool_calls": [{"index": index, **call}]})
    extra = {k: choice[k] for k in ("logprobs", "token_ids") if choice.get(k) is not None}
    last = {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], **extra}]}
    last |= {k: payload[k] for k in ("rl360", "prompt_token_ids") if k in payload}
    yield _event(last)
    if include_usage:
        yield _event({**head, "choices": [], "usage": payload["usage"]})
    yield b"data: [DONE]\n\n"


def context_length_error(limit: str) -> RequestError:
    """OpenAI's context-length error: agents and their libraries know it, and do not retry it."""
    message = f"This model's maximum context length is reached: {limit}. Please reduce the length of the messages."
    return RequestError(400, message, code="context_length_exceeded", param="messages")


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


def _tools(tools: object) -> tuple[dict[str, Any], ...]:
    if not tools:
        return ()
    if not isinstance(tools, list):
        raise RequestError(400, "tools: expected a list", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            where = f"tools[{index}].function.name"
            raise RequestError(400, f"{where}: expected a string", param=where)
    return tuple(tools)


def _key(history: Sequence[CanonicalMessage], context: bytes, fields: Sequence[object]) -> bytes:
    state = hashlib.blake2b(context + digest(fields), digest_size=16)
    for message in history:
        state.update(message.digest + (message.reasoning or b"-"))
    return state.digest()
