"""One /generate: the parameters that are sent, and a strict reading of what comes back.

In: `Sampling` and seeds, or a reply that the engine client has checked. Out: sampling parameters, or a `Reply`. Left to
others: HTTP (engine_client.py), which engine is asked (routes.py, smg_route.py), whole turns (engine_pool.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl360.errors import EngineError
from rl360.types import Sampling, VersionSpan

# Ends a turn once a fenced block closes: an opening fence with its language, any lines, three backquotes.
CODE_BLOCK_REGEX = r"```[^\n`]*\n[\s\S]*?```"
FENCE = "```"  # what every match of it ends with
# SGLang looks for strings in as many last tokens as the longest of them has, and one. The second, which no text holds
# without the first, makes that enough for a fence of several tokens.
FENCE_STOPS = (FENCE, "```\n```\n```")
# The expression is sent for turns of at most so many tokens (docs/decisions/0016-stop-at-a-code-block.md).
LONGEST_BY_EXPRESSION = 256
SEED_BITS = 31  # SGLang's sampling_seed is a positive int32


@dataclass(frozen=True, slots=True)
class Reply:
    """One checked reply of /generate."""

    token_ids: list[int]
    logprobs: list[float]
    version_spans: tuple[VersionSpan, ...]
    finish_type: str
    engine_says: Mapping[str, Any]  # everything else in it, untouched

    @property
    def ended_by_token(self) -> bool:
        """Whether the engine says that an id ended it, and no text."""
        return not isinstance(self.engine_says["meta_info"]["finish_reason"].get("matched"), str | None)


def read_reply(reply: Mapping[str, Any], url: str) -> Reply:
    """A reply that the engine client has checked, as a turn's record.

    Raises EngineError: `engine_reply` for a weight version that is no number or a reply without tokens,
    `engine_status_<code>` for a request that the engine refused to run.
    """
    meta = reply["meta_info"]
    rows = meta.get("output_token_logprobs") or []
    finish = meta["finish_reason"]
    if finish["type"] == "abort" and finish.get("status_code"):
        # SGLang reports a request that it will not run (too long, out of memory) as an abort with a status.
        raise EngineError(f"engine_status_{int(finish['status_code'])}", f"{url}: {finish.get('message')}")
    if not rows and finish["type"] != "abort":
        raise EngineError("engine_reply", f"{url}: output_ids is empty, and finish_reason is {finish['type']}")
    says = {key: value for key, value in reply.items() if key not in ("output_ids", "text", "meta_info")}
    says["meta_info"] = {key: value for key, value in meta.items() if key != "output_token_logprobs"}
    ids = [row[1] for row in rows]
    spans = _version_spans(meta, len(ids), url)
    return Reply(ids, [float(row[0]) for row in rows], spans, finish["type"], says)


def sampling_params(sampling: Sampling, max_new_tokens: int, seed: int, to_next_fence: bool = False) -> dict[str, Any]:
    """The engine's sampling parameters; what the agent asked for plays no part.

    to_next_fence: stop at any fence, in place of a whole code block.
    """
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "sampling_seed": seed,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop or to_next_fence:
        params["stop"] = [*sampling.stop, *(FENCE_STOPS if to_next_fence else ())]
    if sampling.stop_at_code_block and not to_next_fence:
        params["stop_regex"] = CODE_BLOCK_REGEX
    return params


def mix_seed(*parts: int) -> int:
    """A seed that depends on every part: the attempt's seed, the turn, the part of an interrupted turn."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> (64 - SEED_BITS)


def _version_spans(meta: Mapping[str, Any], num_tokens: int, url: str) -> tuple[VersionSpan, ...]:
    """SGLang from 0.5.20 reports spans; older ones stamp one version on the reply."""
    rows = meta.get("weight_versions") or [{"version": meta["weight_version"], "end": num_tokens}]
    spans = []
    start = 0
    for row in rows:
        try:
            span = VersionSpan(int(str(row["version"])), start, int(str(row["end"])))
        except (TypeError, KeyError, ValueError):
            version = row.get("version") if isinstance(row, Mapping) else row
            problem = f"meta_info.weight_version is {version!r}; expected a number"
            raise EngineError("engine_reply", f"{url}: {problem} (SGLang: --weight-version 0)") from None
        spans.append(span)
        start = span.end
    if start != num_tokens:
        raise EngineError("engine_reply", f"{url}: meta_info.weight_versions covers {start} of {num_tokens} tokens")
    return tuple(span for span in spans if span.end > span.start)
