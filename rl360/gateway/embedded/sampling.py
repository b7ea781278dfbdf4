"""How the next token is drawn: SGLang's sampling parameters, checked, and the sampler for a whole batch.

In: `sampling_params` of a request, later logits [B, V] with one `SamplingParams` a row. Out: token ids and their exact
logprobs. Every draw is a pure function of the row's logits, its seed and the token's position in the sequence, so it
does not depend on what else is in the batch, nor on an interruption. When to stop is left to .stops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Below this temperature SGLang takes the most likely token (and reports logprobs at temperature 1); so do we.
GREEDY_BELOW = 1e-6
# SGLang's default when a request sends none.
DEFAULT_MAX_NEW_TOKENS = 128
# Vocabulary entries that are summed in fp32 before the cumulative sum goes on in fp64: exact enough to tell tokens of
# probability 1e-9 apart, at the price of one pass over the probabilities.
CDF_BLOCK = 256

# Parameters of SGLang that this engine does not compute, with the value at which they do nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "n": (None, 1),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
    "custom_params": (None,),
}
# Parameters that change only how SGLang renders or streams text.
_WITHOUT_EFFECT = {"spaces_between_special_tokens", "stream_interval"}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's `sampling_params`, by SGLang's names."""

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS  # None: up to the context limit
    min_new_tokens: int = 0  # no end or stop token is drawn before
    temperature: float = 1.0  # 0: the most likely token
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # true: neither end tokens nor stop_token_ids end the request
    skip_special_tokens: bool = True  # in `text`
    no_stop_trim: bool = False  # keep the matched stop string in `text`; ids always keep it
    sampling_seed: int | None = None  # None: the engine gives each request its own

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SamplingParams:
        """Check and convert. null means the default. Raises `ValueError` saying what is wrong and what was expected."""
        known = {field.name for field in fields(cls)}
        chosen: dict[str, Any] = {}
        for key, value in raw.items():
            if key in known:
                if value is not None or key == "max_new_tokens":
                    chosen[key] = value
            elif key in _UNSUPPORTED:
                if value not in _UNSUPPORTED[key]:
                    raise ValueError(f"{key}={value!r} is not supported by the embedded engine.")
            elif key not in _WITHOUT_EFFECT:
                raise ValueError(f"Unknown sampling parameter {key!r}; known: {', '.join(sorted(known))}.")
        for key in ("stop", "stop_regex"):
            if key in chosen:
                chosen[key] = (chosen[key],) if isinstance(chosen[key], str) else tuple(chosen[key])
        if "stop_token_ids" in chosen:
            chosen["stop_token_ids"] = tuple(chosen["stop_token_ids"])
        params = cls(**chosen)
        _check(params)
        return params

    def with_limits(self, seed: int, max_new_tokens: int) -> SamplingParams:
        """With a seed if the request brought none, and at most `max_new_tokens`."""
        wanted = max_new_tokens if self.max_new_tokens is None else min(self.max_new_tokens, max_new_tokens)
        own_seed = seed if self.sampling_seed is None else self.sampling_seed
        return replace(self, max_new_tokens=wanted, sampling_seed=own_seed)


def _check(params: SamplingParams) -> None:
    def number(
        name: str,
        kind: tuple[type[int], ...] | tuple[type[int], type[float]],
        low: float,
        high: float,
        optional: bool = False,
    ) -> None:
        value: Any = getattr(params, name)
        if optional and value is None:
            return
        if (
            isinstance(value, bool)
            or not isinstance(value, kind)
            or not math.isfinite(value)
            or not low <= value <= high
        ):
            raise ValueError(f"{name} must be in [{low}, {high}], got {value!r}.")

    number("temperature", (int, float), 0.0, 1e6)
    number("top_p", (int, float), 0.0, 1.0)
    number("top_k", (int,), -1, 1 << 30)
    number("max_new_tokens", (int,), 0, 1 << 30, optional=True)
    number("min_new_tokens", (int,), 0, 1 << 30)
    number("sampling_seed", (int,), -(1 << 63), (1 << 64) - 1, optional=True)
    if params.top_p == 0.0:
        raise ValueError("top_p must be in (0, 1], got 0.0.")
    if params.top_k == 0:
        raise ValueError("top_k must be -1 (disable) or at least 1, got 0.")
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        raise ValueError(
            f"min_new_tokens must be in [0, max_new_tokens({params.max_new_tokens})], got {params.min_new_tokens}."
        )
    for name in ("stop", "stop_regex"):
        for text in getattr(params, name):
            if not isinstance(text, str) or not text:
                raise ValueError(f"{name} must be a non-empty string or a list of them, got {text!r}.")
    for token in params.stop_token_ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"stop_token_ids must be a list of integers, got {token!r}.")
    for pattern in params.stop_regex:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"stop_regex {pattern!r} is not a regular expression: {error}.") from None


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) for each (seed, position), fp64 with 53 random bits.

    Counter-based: SplitMix64's finaliser (Steele, Lea and Flood 2014) over the seed, then over seed and position.
    """
    seeds_B = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    positions_B = np.array(positions, dtype=np.uint64)
    mixed_B = _mix(_mix(seeds_B) + positions_B * np.uint64(0x9E3779B97F4A7C15))
    return (mixed_B >> np.uint64(11)) * 2.0**-53


def _mix(values: np.ndarray) -> np.ndarray:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample(
    logits_BV: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    forbidden: Mapping[int, Sequence[int]] | None = None,
) -> tuple[list[int], list[float]]:
    """Draw one token a row.

    `positions` are the places of the new tokens in their whole sequences; `forbidden` maps a row to token ids that it
    may not draw. Returns ids and logprobs after temperature, before top-p and top-k (as SGLang reports them; with
    `forbidden`, after it). The logits, fp32, are overwritten.
    """
    logits_BV = logits_BV.float()
    for row, tokens in (forbidden or {}).items():
        logits_BV[row, list(tokens)] = -math.inf
    temperatures = [1.0 if p.temperature < GREEDY_BELOW else p.temperature for p in params]
    if any(temperature != 1.0 for temperature in temperatures):
        logits_BV.div_(torch.tensor(temperatures, device=logits_BV.device).unsqueeze(1))
    probs_BV = torch.softmax(logits_BV, dim=-1)

    greedy = [p.greedy for p in params]
    if all(greedy):
        ids_B = probs_BV.argmax(dim=-1)
    else:
        cut = [row for row, p in enumerate(params) if not p.greedy and (p.top_p < 1.0 or p.top_k != -1)]
        draw_BV = probs_BV if not cut else _truncated(probs_BV, cut, params)
        seeds = [p.sampling_seed or 0 for p in params]
        ids_B = _inverse_cdf(draw_BV, torch.from_numpy(uniforms(seeds, positions)).to(logits_BV.device))
        if any(greedy):
            ids_B = torch.where(torch.tensor(greedy, device=ids_B.device), probs_BV.argmax(dim=-1), ids_B)
    logprobs_B = probs_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1).log()
    return ids_B.tolist(), logprobs_B.tolist()


def _truncated(probs_BV: Tensor, rows: Sequence[int], params: Sequence[SamplingParams]) -> Tensor:
    """Zero what top-k and top-p leave out, jointly: fewer than k likelier tokens, and less than p of mass on them."""
    probs_BV = probs_BV.clone()
    for row in rows:
        ordered_V, order_V = probs_BV[row].sort(descending=True, stable=True)
        mass_before_V = ordered_V.double().cumsum(0) - ordered_V
        dropped_V = mass_before_V >= params[row].top_p
        if params[row].top_k != -1:
            dropped_V[params[row].top_k :] = True
        dropped_V[0] = False
        probs_BV[row, order_V[dropped_V]] = 0.0
    return probs_BV


def _inverse_cdf(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds u times the total; first by block, then inside it."""
    batch, vocab = probs_BV.shape
    if vocab % CDF_BLOCK:
        probs_BV = torch.nn.functional.pad(probs_BV, (0, CDF_BLOCK - vocab % CDF_BLOCK))
    blocks_BNK = probs_BV.view(batch, -1, CDF_BLOCK)
    cumulative_BN = blocks_BNK.sum(dim=-1).double().cumsum(dim=-1)
    target_B1 = uniforms_B.unsqueeze(1) * cumulative_BN[:, -1:]
    block_B1 = torch.searchsorted(cumulative_BN, target_B1, right=True).clamp_(max=cumulative_BN.shape[1] - 1)
    before_B1 = torch.where(block_B1 > 0, cumulative_BN.gather(1, (block_B1 - 1).clamp_(min=0)), 0.0)
    inside_BK = blocks_BNK[torch.arange(batch, device=probs_BV.device), block_B1.squeeze(1)].double()
    within_BK = inside_BK.cumsum(dim=-1)
    # fp32 block sums and fp64 sums of their members differ in the last bits: stay below the block's own total, so that
    # a token of probability zero is never taken.
    remainder_B1 = torch.minimum(target_B1 - before_B1, within_BK[:, -1:] * (1 - 1e-12))
    within_B1 = torch.searchsorted(within_BK, remainder_B1, right=True).clamp_(max=CDF_BLOCK - 1)
    return (block_B1 * CDF_BLOCK + within_B1).squeeze(1)
