"""From a sampled turn to what its client is told.

In: ids and the plan of their prompt. Out: the assistant message, its comparable form, and what the engine said beyond
OpenAI's fields. Left to others: sessions (session.py), response shapes (openai_api.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from rl360.gateway.engine_pool import EnginePool, Generation
from rl360.gateway.json_text import read_json
from rl360.gateway.messages import CanonicalMessage, canonical, normalise
from rl360.gateway.openai_api import ChatRequest
from rl360.gateway.pace import Pace
from rl360.gateway.parsers import TurnParser
from rl360.gateway.templates import ChatTemplate
from rl360.gateway.tokenizer import TextTokenizer
from rl360.gateway.tokens import Plan

# Agents answer a truncated turn by asking again, uncounted (one made 316 calls); after this many the session ends.
MAX_TRUNCATED_TURNS = 4
CALL_ID_CHARS = 9  # the length that the strictest templates ask for
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Services:
    """What every session of a proxy shares."""

    tokenizer: TextTokenizer
    template: ChatTemplate
    parser: TurnParser
    pool: EnginePool
    executor: Executor
    max_truncated_turns: int = MAX_TRUNCATED_TURNS
    pace: Pace = field(default_factory=Pace)


def assistant_message(
    services: Services, request: ChatRequest, plan: Plan, generation: Generation, seed: tuple[int, int]
) -> tuple[dict[str, Any], CanonicalMessage]:
    """The message of a turn and its comparable form. `seed`: the attempt's and the turn, for the ids of tool calls."""
    text = services.tokenizer.decode_turn(generation.token_ids)
    parsed = services.parser.parse(text, plan.generation_prompt, request.tools if request.parse_tools else ())
    message: dict[str, Any] = {"role": "assistant", "content": _encodable(parsed.content)}
    if parsed.reasoning:
        message["reasoning_content"] = _encodable(parsed.reasoning)
    if parsed.calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": _call_id(*seed, index),
                "type": "function",
                "function": {"name": _encodable(call.name), "arguments": _arguments(call.arguments)},
            }
            for index, call in enumerate(parsed.calls)
        ]
    return message, canonical(normalise(message, "response"))


def engine_extra(generation: Generation) -> dict[str, Any]:
    """What the engine said that has no place in OpenAI's response."""
    return {
        "versions": [span.version for span in generation.version_spans],
        "interruptions": generation.interruptions,
        "engine": list(generation.engine_says),
    }


def _encodable(text: str) -> str:
    """A lone surrogate, which a JSON escape can make, is not UTF-8: what is stored must be what can be sent."""
    return text.encode("utf-8", "replace").decode()


def _arguments(text: str) -> str:
    """Arguments without lone surrogates, neither as characters nor as escapes: an agent decodes those."""
    if SURROGATE_ESCAPE.search(text):
        with contextlib.suppress(ValueError):  # no JSON: nobody decodes it
            text = json.dumps(read_json(text), ensure_ascii=False)
    return _encodable(text)


def _call_id(seed: int, turn: int, index: int) -> str:
    """Deterministic, unique in the session, letters and digits only."""
    return "c" + hashlib.blake2b(f"{seed},{turn},{index}".encode(), digest_size=8).hexdigest()[: CALL_ID_CHARS - 1]
