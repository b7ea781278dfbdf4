"""Which parsers there are, by the names that `model.tool_parser` and `model.reasoning_parser` take."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from rl360.errors import ConfigError
from rl360.gateway.parsers.base import ReasoningParser, ToolParser, TurnParser
from rl360.gateway.parsers.hermes import HermesTools
from rl360.gateway.parsers.k2_horizon import K2HorizonReasoning, K2HorizonTools
from rl360.gateway.parsers.none import NoReasoning, NoTools
from rl360.gateway.parsers.qwen3 import Qwen3Reasoning

# "qwen25" is what SGLang calls the Hermes format; both names are accepted.
TOOL_PARSERS: Mapping[str, Callable[[], ToolParser]] = {
    "none": NoTools,
    "hermes": HermesTools,
    "qwen25": HermesTools,
    "k2_horizon": K2HorizonTools,
}
REASONING_PARSERS: Mapping[str, Callable[[], ReasoningParser]] = {
    "none": NoReasoning,
    "qwen3": Qwen3Reasoning,
    "k2_horizon": K2HorizonReasoning,
}


def make_parser(tool_parser: str, reasoning_parser: str) -> TurnParser:
    """The parser of a model family. Raises ConfigError listing the valid names, both problems at once."""
    problems = [
        *_unknown("model.tool_parser", tool_parser, TOOL_PARSERS),
        *_unknown("model.reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ]
    if problems:
        raise ConfigError(problems)
    return TurnParser(REASONING_PARSERS[reasoning_parser](), TOOL_PARSERS[tool_parser]())


def _unknown(key: str, name: str, known: Mapping[str, Any]) -> list[str]:
    if name in known:
        return []
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return [f"{key}: unknown parser {name!r}; expected one of {', '.join(known)}{hint}"]
