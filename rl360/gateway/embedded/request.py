"""One request inside the engine: its tokens so far and how it ends, and the reply in SGLang's shape.

In: ids and sampling parameters (`new_request`). Out: the record that scheduler and server both look at, and `reply`.
When it runs is left to the engine. Only the engine's thread changes a request; others may read the append-only lists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl360.gateway.embedded.sampling import SamplingParams
from rl360.gateway.embedded.stops import Decodes, StopWatch, final_text


@dataclass(slots=True, eq=False)
class Request:
    rid: str
    params: SamplingParams
    prompt_tokens: int
    tokens: NDArray[np.int64]  # room for prompt and output; the first `length` are set
    length: int  # prompt and output so far
    watch: StopWatch | None
    end_tokens: frozenset[int]  # ids that end it
    on_finish: Callable[[], None]
    on_token: Callable[[], None] | None = None
    computed: int = 0  # tokens whose keys and values are in the cache
    cached_tokens: int = 0  # prompt tokens that were not computed for this request, at its first start
    started: bool = False
    after_pause: bool = False  # it came during a pause that has not ended: only then is it in the scheduler's hands
    retractions: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_starts: list[tuple[int, int]] = field(default_factory=list)  # (version, first output index under it)
    finish_reason: dict[str, Any] | None = None
    created_s: float = field(default_factory=time.perf_counter)

    @property
    def reserve(self) -> int:
        """The most tokens that it can come to have."""
        return self.tokens.size

    @property
    def decoding(self) -> bool:
        """True when all but the last token are in the cache, so that one step gives the next."""
        return self.computed == self.length - 1

    def append(self, token: int, logprob: float, version: int) -> None:
        """Take a sampled token, and set `finish_reason` if it ends the request.

        A stop takes precedence over the length cap when one token reaches both (SGLang 0.5.16 reports the cap).
        """
        if not self.version_starts or self.version_starts[-1][0] != version:
            self.version_starts.append((version, len(self.output_ids)))
        self.tokens[self.length] = token
        self.length += 1
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.end_tokens:
            self.finish_reason = {"type": "stop", "matched": token}
        elif self.watch is not None and (matched := self.watch.add(self.output_ids)) is not None:
            self.finish_reason = {"type": "stop", "matched": matched}
        elif len(self.output_ids) >= (self.params.max_new_tokens or 0):
            self.finish_reason = {"type": "length", "length": len(self.output_ids)}

    def forbidden(self) -> tuple[int, ...]:
        """Ids that it may not draw next: its end tokens, while `min_new_tokens` are not reached."""
        return tuple(self.end_tokens) if len(self.output_ids) < self.params.min_new_tokens else ()

    def version_spans(self) -> list[dict[str, int]]:
        """[{version, start, end}] over the output tokens, as SGLang 0.5.20 reports `weight_versions`."""
        if not self.version_starts:
            return []  # it ended before its first token
        ends = [start for _, start in self.version_starts[1:]] + [len(self.output_ids)]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.version_starts, ends, strict=True)
        ]

    def reply(self, version: int, tokenizer: Decodes | None, return_logprob: bool) -> dict[str, Any]:
        """The body of /generate, now: complete when `finish_reason` is set, else what there is so far.

        `weight_version` is the current one as text, as in SGLang; `weight_versions` says which token had which.
        """
        num_tokens = len(self.logprobs)  # appended last
        ids, logprobs = self.output_ids[:num_tokens], self.logprobs[:num_tokens]
        matched = (self.finish_reason or {}).get("matched")
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "weight_version": str(version),
            "weight_versions": self.version_spans(),
            "num_retractions": self.retractions,
            "completion_tokens": num_tokens,
            "cached_tokens": self.cached_tokens,
            "e2e_latency": time.perf_counter() - self.created_s,
        }
        if return_logprob:
            meta["output_token_logprobs"] = [
                [logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)
            ]
        text = "" if tokenizer is None else final_text(tokenizer, ids, self.params, matched)
        return {"text": text, "output_ids": ids, "meta_info": meta}


def new_request(
    input_ids: Sequence[int],
    params: SamplingParams,
    rid: str,
    on_finish: Callable[[], None],
    on_token: Callable[[], None] | None = None,
    *,
    own_seed: Callable[[], int],
    vocab_size: int,
    max_tokens: int,
    end_tokens: frozenset[int],
    tokenizer: Decodes | None,
) -> Request:
    """A request that an engine with these limits can run.

    Args:
        own_seed: where `params` have none; called once it is clear that the request can run.
        max_tokens: of prompt and output together.
        end_tokens: the model's own.
        tokenizer: None: no strings to stop at.

    Raises `ValueError` for one that can never run; the text is for the client.
    """
    tokens = np.asarray(input_ids, dtype=np.int64)
    if tokens.ndim != 1 or not tokens.size:
        raise ValueError("input_ids must be a non-empty list of token ids.")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"input_ids must be in [0, {vocab_size}), got {tokens.min()} to {tokens.max()}.")
    if tokens.size >= max_tokens:
        raise ValueError(
            f"The input ({tokens.size} tokens) is longer than the model's context length ({max_tokens} tokens)."
        )
    watched = bool(params.stop or params.stop_regex)
    if watched and tokenizer is None:
        raise ValueError("stop and stop_regex need a tokenizer, and this engine has none.")
    params = params.with_limits(own_seed(), max_tokens - tokens.size)
    room = np.empty(tokens.size + (params.max_new_tokens or 0), dtype=np.int64)
    room[: tokens.size] = tokens
    return Request(
        rid=rid,
        params=params,
        prompt_tokens=tokens.size,
        tokens=room,
        length=tokens.size,
        watch=StopWatch(tokenizer, params) if watched and tokenizer is not None else None,
        end_tokens=frozenset() if params.ignore_eos else end_tokens.union(params.stop_token_ids),
        on_finish=on_finish,
        on_token=on_token,
    )
