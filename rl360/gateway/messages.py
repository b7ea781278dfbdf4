"""What a chat message is, for the question "is this the same message as before?".

In: messages as a client sent them, or as the proxy returned them. Out: normalised dictionaries that a chat template can
render, and `CanonicalMessage`s that can be compared. Left to others: rendering (templates.py), what equality leads to
(tokens.py).

Clients rewrite what they were given without changing it: they re-serialise tool-call arguments, turn a null content
into an empty string or a list of parts, drop tool-call ids, and often drop the reasoning. None of this is an edit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl360.gateway.json_text import read_json

DIGEST_BYTES = 16  # collisions within one session are out of reach, and a long history stays small
_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))  # json.dumps makes one a call
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # the names that servers and clients use for it


class MessageError(ValueError):
    """A message that no chat template could render. `param` says where, as OpenAI's errors do."""

    def __init__(self, param: str, problem: str):
        self.param = param
        super().__init__(f"{param}: {problem}")


@dataclass(frozen=True, slots=True)
class CanonicalMessage:
    """Equal digests: the same message, whatever its serialisation. Reasoning is apart, because it may be absent."""

    role: str
    digest: bytes  # of everything but the reasoning
    reasoning: bytes | None  # digest of the reasoning; None: there is none

    def continues(self, returned: CanonicalMessage, sampled: bool) -> bool:
        """Whether this message, sent by a client, is `returned`. `sampled`: the policy wrote `returned`."""
        if self.digest != returned.digest:
            return False
        return self.reasoning == returned.reasoning or (sampled and self.reasoning is None)


def digest(value: object) -> bytes:
    """Digest of any JSON value; the order of keys and the white space of its source do not matter."""
    text = _ENCODER.encode(value)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def normalise(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message as templates expect it: text content, arguments as an object, no null fields.

    Raises MessageError naming the field, under `where` ("messages[3]").
    """
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise MessageError(f"{where}.role", "expected system, user, assistant or tool")
    normal = {key: value for key, value in message.items() if value is not None}
    normal["content"] = _text(message.get("content"), f"{where}.content")
    calls = normal.pop("tool_calls", None)
    if calls:
        normal["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return normal


def canonical(normal: Mapping[str, Any]) -> CanonicalMessage:
    """The comparable form of a normalised message."""
    reasoning = reasoning_of(normal)
    if normal["role"] == "assistant":
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in normal.get("tool_calls", ())]
        body: object = ("assistant", normal["content"], calls, normal.get("name"))
    else:
        body = {key: value for key, value in normal.items() if key not in REASONING_KEYS}
    return CanonicalMessage(normal["role"], digest(body), digest(reasoning) if reasoning else None)


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """The message's reasoning under whichever name it came; None when absent or empty."""
    for key in REASONING_KEYS:
        if message.get(key):
            return str(message[key])
    return None


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = []
        for index, part in enumerate(content):
            text = part.get("text") if isinstance(part, Mapping) and part.get("type") in ("text", "refusal") else part
            if not isinstance(text, str):
                raise MessageError(f"{where}[{index}]", "only text parts can be sent to this model")
            parts.append(text)
        return "\n".join(parts)
    raise MessageError(where, "expected a string, a list of text parts or null")


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise MessageError(where, "expected a list of tool calls")
    normal = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise MessageError(f"{where}[{index}].function.name", "expected a string")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # what the model wrote is not JSON: it stays the text that it is
                arguments = read_json(arguments) if arguments.strip() else {}
        normal.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return normal
