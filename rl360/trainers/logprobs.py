"""Logprobs, entropies and the gradient of the output matrix, a few rows of [tokens, vocabulary] at a time.

In: hidden states of the positions that predict a trained token, the output matrix, targets, temperatures. Out: one
logprob and one entropy a trained token; with a token loss, also the gradients of hidden states and output matrix. Left
to others: which positions (packing.py), the loss (the algorithm).

The objective is a sum over tokens, so a chunk's loss and gradient are known as soon as its logits are: they are used in
the backward pass while they are held, and nothing is computed twice (the idea of fused linear cross-entropy, Hsu et al.
2024, "Liger Kernel", arXiv:2410.10989).

Axes: U predicting positions, C positions of one chunk, M trained tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl360.models.final_logits import final_logits
from rl360.models.linear import linear

# Rows of the output matrix whose gradient is computed at once on the CPU: 4096 x 576 fp32 values stay in the cache
# until they are added.
HEAD_BLOCK_ROWS = 4096

TokenLoss = Callable[[slice, Tensor], Tensor]
"""(slice of M, logprobs of these tokens) -> d loss / d logprob of each. Called once a chunk, in order."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """What is predicted from which position. Tensors on the model's device."""

    temperatures_U: Tensor  # fp32
    slots_M: Tensor  # int64, index into U, ascending
    targets_M: Tensor  # int64


@dataclass(frozen=True, slots=True)
class _Chunk:
    positions: slice  # of U
    tokens: slice  # of M
    logp_CV: Tensor  # log softmax of logits / temperature; fp32, or fp64 for an fp64 model
    spare_CV: Tensor  # a buffer of the same kind that the consumer may overwrite
    slots: Tensor  # of the chunk's tokens, index into C
    targets: Tensor


def _chunks(
    hidden_U: Tensor, head_weight: Tensor, predictions: Predictions, chunk_tokens: int, fp32_logits: bool
) -> Iterator[_Chunk]:
    num_positions = hidden_U.shape[0]
    starts = list(range(0, num_positions, chunk_tokens))
    bounds = torch.searchsorted(
        predictions.slots_M, torch.tensor([*starts, num_positions], device=hidden_U.device)
    ).tolist()
    # Blocks of this size come fresh from the system on the CPU, and touching them first costs as much as computing.
    buffer: Tensor | None = None
    tempered = bool((predictions.temperatures_U != 1.0).any())
    for i, start in enumerate(starts):
        positions = slice(start, min(start + chunk_tokens, num_positions))
        tokens = slice(bounds[i], bounds[i + 1])
        logits_CV = final_logits(hidden_U[positions], head_weight, fp32_logits)
        if logits_CV.dtype != torch.float64:
            logits_CV = logits_CV.float()
        if tempered:
            logits_CV /= predictions.temperatures_U[positions, None]
        if buffer is None:
            buffer = torch.empty_like(logits_CV)
        logp_CV = torch.log_softmax(logits_CV, dim=-1, out=buffer[: logits_CV.shape[0]])
        yield _Chunk(
            positions,
            tokens,
            logp_CV,
            logits_CV,
            predictions.slots_M[tokens] - start,
            predictions.targets_M[tokens],
        )


@torch.no_grad()
def token_logprobs(
    hidden_U: Tensor, head_weight: Tensor, predictions: Predictions, chunk_tokens: int, fp32_logits: bool = True
) -> Tensor:
    """Return the logprob of each trained token at its temperature, fp32 [M]; no gradient.

    fp32_logits: keep the logits of narrower weights in fp32; else they are rounded to the weights' dtype first.
    """
    chunks = _chunks(hidden_U, head_weight, predictions, chunk_tokens, fp32_logits)
    return torch.cat([chunk.logp_CV[chunk.slots, chunk.targets] for chunk in chunks])


@torch.no_grad()
def backward_through_head(
    hidden_U: Tensor,
    head_weight: Tensor,
    predictions: Predictions,
    chunk_tokens: int,
    token_loss: TokenLoss,
    head_grad: Tensor,
    fp32_logits: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute logprobs and, at once, the gradient of a token loss.

    Args:
        hidden_U: values only, [U, hidden]; the caller runs its backward pass with the returned gradient.
        token_loss: from logprobs to the gradient of the loss with respect to each.
        head_grad: [V, hidden], fp32 or the weight's dtype; the output matrix's gradient is added to it in place.
        fp32_logits: as in `token_logprobs`. The gradient's two products take the weights' dtype either way.

    Returns:
        hidden_grad_U in the dtype of hidden_U, and the sum of the tokens' entropies (nats, at their temperature).
    """
    hidden_grad_U = torch.empty_like(hidden_U)
    entropy_sum = hidden_U.new_zeros((), dtype=torch.float64)
    for chunk in _chunks(hidden_U, head_weight, predictions, chunk_tokens, fp32_logits):
        logp_CV = chunk.logp_CV
        grad_M = token_loss(chunk.tokens, logp_CV[chunk.slots, chunk.targets])
        probs_CV = torch.exp(logp_CV, out=chunk.spare_CV)
        # A dot product a row: the product of the two matrices is never held.
        entropy_C = -torch.bmm(probs_CV.unsqueeze(1), logp_CV.unsqueeze(2)).flatten()
        entropy_sum += entropy_C[chunk.slots].sum(dtype=torch.float64)
        # d logprob / d logits = (onehot(target) - probs) / temperature; a position may predict several tokens.
        scaled_M = grad_M.to(probs_CV.dtype) / predictions.temperatures_U[chunk.positions][chunk.slots]
        per_position_C = probs_CV.new_zeros(probs_CV.shape[0]).index_add_(0, chunk.slots, scaled_M)
        grad_logits_CV = probs_CV.mul_(-per_position_C[:, None])
        grad_logits_CV.index_put_((chunk.slots, chunk.targets), scaled_M, accumulate=True)
        grad_logits_CV = grad_logits_CV.to(hidden_U.dtype)
        hidden_grad_U[chunk.positions] = linear(grad_logits_CV, head_weight.t())
        _add_head_gradient(head_grad, grad_logits_CV, hidden_U[chunk.positions])
    return hidden_grad_U, entropy_sum


def _add_head_gradient(head_grad: Tensor, grad_logits_CV: Tensor, hidden_C: Tensor) -> None:
    """head_grad += grad_logits.T @ hidden, a block of the vocabulary at a time: no second [V, hidden]."""
    step = HEAD_BLOCK_ROWS if head_grad.device.type == "cpu" else head_grad.shape[0]
    for start in range(0, head_grad.shape[0], step):
        block = slice(start, start + step)
        head_grad[block] += linear(grad_logits_CV[:, block].t(), hidden_C.t())
