"""Attention of one engine step, over the rows of the KV cache.

In: queries, keys and values of the step's packed tokens. Out: attention output for each, with the new keys and values
written to their places. Tokens come in the order: one of each decoding row 0..B-1, then the prompt pieces of the rows
after them. Axes: N packed tokens, B decoding rows, H query heads, K key/value heads, G = H / K, L tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


class StepAttention:
    """An `attend` callable for rl360.models.decoder.Decoder, good for one step.

    `layers[i]` is [2, rows, K, places, D]; `spans[r]` says that row r computes its tokens [start, end) in this step,
    which is the one token end - 1 for the first `num_decoding` rows. Everything that layers share is made once, here.
    """

    def __init__(
        self, layers: Sequence[Tensor], num_decoding: int, spans: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        self._layers = layers
        self._num_decoding = num_decoding
        self._pieces = [(row, *spans[row]) for row in range(num_decoding, len(spans))]
        if num_decoding:
            _, _, num_kv_heads, places, _ = layers[0].shape
            ends_B = torch.tensor([end for _, end in spans[:num_decoding]], device=device)
            self._longest = max(end for _, end in spans[:num_decoding])
            rows_B = torch.arange(num_decoding, device=device)
            heads_K = torch.arange(num_kv_heads, device=device)
            # Where the new keys go when a layer's keys are seen as [rows * K * places, D].
            first_BK = (rows_B.unsqueeze(1) * num_kv_heads + heads_K) * places
            self._places = (first_BK + ends_B.unsqueeze(1) - 1).flatten()
            future_BL = torch.arange(self._longest, device=device) >= ends_B.unsqueeze(1)
            mask_dtype = torch.promote_types(layers[0].dtype, torch.float32)
            self._mask_B11L = torch.zeros(future_BL.shape, device=device, dtype=mask_dtype)
            self._mask_B11L = self._mask_B11L.masked_fill_(future_BL, -torch.inf)[:, None, None]

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        keys, values = self._layers[layer]
        split = self._num_decoding
        if not self._pieces:
            return self._decode(keys, values, q_NHD, k_NKD, v_NKD)
        out_NHD = torch.empty_like(q_NHD, memory_format=torch.contiguous_format)
        if split:
            out_NHD[:split] = self._decode(keys, values, q_NHD[:split], k_NKD[:split], v_NKD[:split])
        at = split
        for row, start, end in self._pieces:
            piece = slice(at, at + end - start)
            keys[row, :, start:end] = k_NKD[piece].transpose(0, 1)
            values[row, :, start:end] = v_NKD[piece].transpose(0, 1)
            out_NHD[piece] = _prefill(q_NHD[piece], keys[row, :, :end], values[row, :, :end])
            at += end - start
        return out_NHD

    def _decode(self, keys_RKWD: Tensor, values_RKWD: Tensor, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
        """One query a row. The G heads that share a key head are rows of one small product, keys on its left: each
        key is then read once, in order, which is all that decoding is about."""
        batch, num_heads, width = q_BHD.shape
        rows, num_kv_heads, places, _ = keys_RKWD.shape
        keys_RKWD.view(-1, width).index_copy_(0, self._places, k_BKD.reshape(-1, width))
        values_RKWD.view(-1, width).index_copy_(0, self._places, v_BKD.reshape(-1, width))
        group = num_heads // num_kv_heads
        pairs = batch * num_kv_heads
        keys = keys_RKWD.view(rows * num_kv_heads, places, width)[:pairs, : self._longest]
        values = values_RKWD.view(rows * num_kv_heads, places, width)[:pairs, : self._longest]
        scores = _scores(keys, q_BHD.reshape(pairs, group, width))
        scores = scores.reshape(batch, num_kv_heads, group, self._longest).add_(self._mask_B11L)
        weights = torch.softmax(scores, dim=-1).view(pairs, group, self._longest).to(values.dtype)
        return torch.bmm(weights, values).view(batch, num_heads, width)


def _scores(keys_PLD: Tensor, queries_PGD: Tensor) -> Tensor:
    """Scaled scores [P, G, L] of P pairs of row and key head; fp32 for a narrower dtype, as flash attention has them.

    In bf16 a score of 8 is off by up to 0.03 and its weight by 3 %, which doubles the error of the output.
    """
    scale = queries_PGD.shape[-1] ** -0.5
    if keys_PLD.dtype.itemsize < torch.float32.itemsize:
        return torch.bmm(keys_PLD.float(), queries_PGD.float().transpose(1, 2)).transpose(1, 2) * scale
    return torch.bmm(keys_PLD, (queries_PGD * scale).transpose(1, 2)).transpose(1, 2)


def _prefill(q_NHD: Tensor, keys_KLD: Tensor, values_KLD: Tensor) -> Tensor:
    """The last N of L tokens of one row attend to all before them."""
    num_new, length = q_NHD.shape[0], keys_KLD.shape[1]
    mask = None
    if num_new < length:
        mask = torch.ones(num_new, length, dtype=torch.bool, device=q_NHD.device).tril_(length - num_new)
    out = functional.scaled_dot_product_attention(
        q_NHD.transpose(0, 1).unsqueeze(0),
        keys_KLD.unsqueeze(0),
        values_KLD.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)
