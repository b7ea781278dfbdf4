"""From a turn's text to an OpenAI message: reasoning, content and tool calls, one parser per model family.

In: the decoded text of one turn. Out: `ParsedTurn`. Left to others: ids (they are never derived from parsed text).
"""

from rl360.gateway.parsers.base import ParsedCall, ParsedTurn, ReasoningParser, ToolParser, TurnParser
from rl360.gateway.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, make_parser

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "ParsedCall",
    "ParsedTurn",
    "ReasoningParser",
    "ToolParser",
    "TurnParser",
    "make_parser",
]
