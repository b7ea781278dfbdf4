"""Logprobs, entropies and gradients of an output matrix whose rows lie on several ranks, some positions at a time.

In: hidden states of the positions that predict a trained token (the same on every rank of the tensor-parallel group),
this rank's rows of the output matrix, targets, temperatures. Out: one logprob a trained token, the entropies' sum and,
with a token loss, the gradients of hidden states and output matrix, computed while a chunk's logits are held. It is the
arithmetic of rl360/trainers/logprobs.py, with the softmax split over ranks. Left to others: which positions
(rl360/trainers/packing.py), the loss (the algorithm), the sum of the hidden states' gradients over ranks (the gather
that made them whole).

A chunk costs one product for the logits, one pass over them for maximum, sum and entropy, one small gather between the
ranks, one pass that turns them into their gradient, and the two products of the gradients. Products take the weight's
dtype; what they sum, and everything between, is in fp32 (fp64 for fp64 weights). Logits of bf16 weights are kept in
fp32, or rounded to bf16 where asked: then their gradient overwrites them. On CUDA nothing waits for the device.

Axes: U predicting positions, C positions of one chunk, M trained tokens, m those of one chunk, V columns of this rank,
R ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl360.models.final_logits import final_logits, logits_dtype
from rl360.trainers.logprobs import Predictions, TokenLoss

# Columns that a product takes at once: tensor cores want rows of a multiple of 16 bytes, 8 values of bf16.
COLUMN_MULTIPLE = 8

# The maximum of a rank without columns: below any logit, and finite, so that 0 * (it - maximum) is 0 and not NaN.
NO_MAXIMUM = -1.0e30

# Rows of the output matrix whose gradient is upcast at once where no product adds bf16 into fp32 (the CPU).
HEAD_BLOCK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class HeadPredictions(Predictions):
    """Predictions that also lie on the host, so that chunks are cut without asking the device."""

    host_slots_M: NDArray[np.int64]
    leaders_M: Tensor  # int64, index into M: the first token with the same position and target, mostly the token itself

    @classmethod
    def of(
        cls,
        temperatures_U: NDArray[np.float32],
        slots_M: NDArray[np.int64],
        targets_M: NDArray[np.int64],
        device: torch.device | str = "cpu",
    ) -> HeadPredictions:
        """Copy a micro-batch's arrays (`MicroBatch` names them alike) to the device.

        Raises:
            ValueError: `slots_M` is not ascending.
        """
        if (np.diff(slots_M) < 0).any():
            raise ValueError("slots_M must ascend: a chunk's tokens are a slice of it")
        device = torch.device(device)

        def tensor(array: NDArray[Any]) -> Tensor:
            host = torch.from_numpy(np.ascontiguousarray(array))
            return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)

        return cls(
            temperatures_U=tensor(temperatures_U),
            slots_M=tensor(slots_M),
            targets_M=tensor(targets_M),
            host_slots_M=slots_M,
            leaders_M=tensor(_leaders(slots_M, targets_M)),
        )

    @classmethod
    def from_device(cls, predictions: Predictions) -> HeadPredictions:
        """For tensors that lie on the device only: this waits for it."""
        if isinstance(predictions, HeadPredictions):
            return predictions
        return cls.of(
            predictions.temperatures_U.cpu().numpy(),
            predictions.slots_M.cpu().numpy(),
            predictions.targets_M.cpu().numpy(),
            device=predictions.slots_M.device,
        )


def _leaders(slots_M: NDArray[np.int64], targets_M: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first token with the same position and target, of each token."""
    itself = np.arange(slots_M.size)
    if (np.diff(slots_M) > 0).all():  # as where prompts are not shared: one token a position
        return itself
    order = np.lexsort((itself, targets_M, slots_M))
    slots, targets = slots_M[order], targets_M[order]
    is_first = np.ones(order.size, dtype=bool)
    is_first[1:] = (slots[1:] != slots[:-1]) | (targets[1:] != targets[:-1])
    leaders = np.empty_like(itself)
    leaders[order] = order[np.maximum.accumulate(np.where(is_first, itself, 0))]
    return leaders


@dataclass(frozen=True, slots=True)
class _Chunk:
    positions: slice  # of U
    tokens: slice  # of M
    slots: Tensor  # of the chunk's tokens, index into C
    temperatures_C: Tensor
    logits_CV: Tensor  # not divided by the temperature; columns from `columns` on are padding
    grad_CV: Tensor  # where their gradient goes, of the weight's dtype: logits_CV itself when that has it
    spare_CV: Tensor  # grad_CV with one row more, which nobody reads
    columns: int  # real columns of this rank
    is_local: Tensor  # [m], whether this rank holds the target
    local_targets: Tensor  # [m], column of the target, 0 where another rank holds it
    logprobs: Tensor  # [m]
    logsumexp_C: Tensor  # over all ranks, of logits / temperature
    entropies_C: Tensor


@torch.no_grad()
def head_logprobs(
    hidden_U: Tensor,
    weight: Tensor,
    predictions: Predictions,
    chunk: int,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    compiled: bool = False,
    fp32_logits: bool = True,
) -> Tensor:
    """Return the logprob of each trained token at its temperature, fp32 [M], the same on every rank; no gradient.

    Arguments as in `head_loss`.
    """
    known = HeadPredictions.from_device(predictions)
    logits_type = logits_dtype(hidden_U.dtype, fp32_logits)
    chunks = _chunks(hidden_U, weight, known, chunk, group, vocab_start, vocab_size, compiled, logits_type, False)
    parts = [c.logprobs for c in chunks]
    return torch.cat(parts) if parts else known.temperatures_U.new_zeros(0)


def head_loss(
    hidden_U: Tensor,
    weight: Tensor,
    predictions: Predictions,
    chunk: int,
    token_loss: TokenLoss,
    head_grad: Tensor,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    compiled: bool = False,
    fp32_logits: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute logprobs and, at once, the gradient of a token loss.

    Args:
        hidden_U: [U, hidden], whole on every rank; U may be 0. It may carry a graph.
        weight: [V, hidden], this rank's rows with their padding. Padded rows take no part, whatever finite values they
            hold.
        predictions: several tokens may be predicted from one position. `HeadPredictions` lets the device run on;
            a plain `Predictions` makes the host wait for it once.
        chunk: positions computed at once. Costs chunk x V values of the weight's dtype, and as many of fp32 where
            logits are wider than it; on CUDA every chunk also reads and writes the whole of `head_grad`, so few large
            chunks are faster.
        token_loss: from a chunk's logprobs (fp32, the same on every rank) to the gradient of the loss with respect to
            each. Called once a chunk, in order; never for an empty chunk.
        head_grad: [V, hidden], fp32 or the weight's dtype; this rank's gradient is added to it in place, now, so a
            later scale of the returned loss does not reach it.
        group: the tensor-parallel ranks; None: this process holds the whole vocabulary.
        vocab_start: the first token id of this rank's rows.
        vocab_size: token ids of the model, without padding; None: every row of `weight` is one.
        compiled: torch.compile the passes over the logits.
        fp32_logits: keep the logits of narrower weights in fp32; else they are rounded to the weights' dtype. Their
            gradient is rounded to it either way, for the products that take it on.

    Returns:
        A scalar whose value is 0 and whose backward pass hands `hidden_U` its gradient (times what arrives): of this
        rank's rows only, to be summed over the group. The loss itself is the token loss's to keep. And the sum of the
        tokens' entropies, nats at their temperature, fp64, the same on every rank.
    """
    known = HeadPredictions.from_device(predictions)
    with torch.no_grad():
        values_U = hidden_U.detach()
        hidden_grad_U = torch.empty_like(values_U)
        entropy_sum = hidden_U.new_zeros((), dtype=torch.float64)
        logits_type = logits_dtype(values_U.dtype, fp32_logits)
        chunks = _chunks(values_U, weight, known, chunk, group, vocab_start, vocab_size, compiled, logits_type, True)
        for part in chunks:
            entropy_sum += part.entropies_C[part.slots].sum(dtype=torch.float64)
            grad_logits_CV = _logit_gradient(part, token_loss(part.tokens, part.logprobs), known, compiled)
            rows = slice(0, grad_logits_CV.shape[1])
            torch.mm(grad_logits_CV, weight[rows], out=hidden_grad_U[part.positions])
            _add_product(head_grad[rows], grad_logits_CV, values_U[part.positions])
    return _HandBack.apply(hidden_U, hidden_grad_U), entropy_sum


class _HandBack(torch.autograd.Function):
    """Zero in the forward pass; in the backward pass the gradient that is known already."""

    @staticmethod
    def forward(ctx: Any, hidden_U: Tensor, hidden_grad_U: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_grad_U)
        return hidden_U.new_zeros((), dtype=torch.promote_types(hidden_U.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (hidden_grad_U,) = ctx.saved_tensors
        return (hidden_grad_U * grad).to(hidden_grad_U.dtype), None


def _chunks(
    hidden_U: Tensor,
    weight: Tensor,
    predictions: HeadPredictions,
    chunk: int,
    group: dist.ProcessGroup | None,
    vocab_start: int,
    vocab_size: int | None,
    compiled: bool,
    logits_type: torch.dtype,
    with_gradient: bool,
) -> Iterator[_Chunk]:
    num_positions = hidden_U.shape[0]
    num_rows = weight.shape[0]
    columns = num_rows if vocab_size is None else max(0, min(num_rows, vocab_size - vocab_start))
    width = min(num_rows, -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE)
    starts = range(0, num_positions, chunk)
    bounds = np.searchsorted(predictions.host_slots_M, [*starts, num_positions]).tolist()
    statistics = _fused(_row_statistics) if compiled else _row_statistics
    exact = torch.float64 if hidden_U.dtype == torch.float64 else torch.float32
    temperatures_U = predictions.temperatures_U.to(exact)
    # On CUDA as large for every micro-batch: the allocator then finds the block of the last one.
    num_held = chunk if hidden_U.device.type == "cuda" else min(chunk, num_positions)
    buffer = torch.empty(num_held + 1, width, dtype=logits_type, device=hidden_U.device)
    grad_buffer = buffer
    if with_gradient and logits_type != hidden_U.dtype:
        grad_buffer = torch.empty(num_held + 1, width, dtype=hidden_U.dtype, device=hidden_U.device)
    for i, start in enumerate(starts):
        positions = slice(start, min(start + chunk, num_positions))
        tokens = slice(bounds[i], bounds[i + 1])
        size = positions.stop - start
        logits_CV = final_logits(
            hidden_U[positions], weight[:width], logits_type != hidden_U.dtype, out_NV=buffer[:size]
        )

        temperatures_C = temperatures_U[positions]
        slots = predictions.slots_M[tokens] - start
        targets = predictions.targets_M[tokens] - vocab_start
        is_local = (targets >= 0) & (targets < columns)
        targets = torch.where(is_local, targets, 0)
        if columns:
            statistics_3C = statistics(logits_CV[:, :columns], temperatures_C)
            target_logits = logits_CV[slots, targets].to(exact) / temperatures_C[slots]
            target_logits = torch.where(is_local, target_logits, 0.0)
        else:
            statistics_3C = temperatures_C.new_zeros(3, size)
            statistics_3C[0] = NO_MAXIMUM
            target_logits = temperatures_C.new_zeros(slots.shape)
        maximum_C, log_sum_C, entropies_C, target_logits = _over_ranks(statistics_3C, target_logits, group)
        yield _Chunk(
            positions=positions,
            tokens=tokens,
            slots=slots,
            temperatures_C=temperatures_C,
            logits_CV=logits_CV,
            grad_CV=grad_buffer[:size],
            spare_CV=grad_buffer[: size + 1],
            columns=columns,
            is_local=is_local,
            local_targets=targets,
            # In this order: logit and maximum are near each other, and their difference loses nothing.
            logprobs=(target_logits - maximum_C[slots]) - log_sum_C[slots],
            logsumexp_C=maximum_C + log_sum_C,
            entropies_C=entropies_C,
        )


def _row_statistics(logits_CV: Tensor, temperatures_C: Tensor) -> Tensor:
    """[3, C]: of x = logits / temperature the maximum, the sum of e = exp(x - maximum), the sum of e (x - maximum)."""
    scaled_CV = logits_CV.to(temperatures_C.dtype) / temperatures_C[:, None]
    maximum_C = scaled_CV.amax(dim=-1)
    shifted_CV = scaled_CV - maximum_C[:, None]
    exp_CV = shifted_CV.exp()
    return torch.stack((maximum_C, exp_CV.sum(dim=-1), (exp_CV * shifted_CV).sum(dim=-1)))


def _over_ranks(
    statistics_3C: Tensor, target_logits: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maximum, log of the sum, entropy of each position, and the targets' logits: of the whole vocabulary.

    One gather a chunk, after which every rank adds the same numbers in the same order and gets the same bits.
    """
    size = statistics_3C.shape[1]
    num_ranks = 1 if group is None else dist.get_world_size(group)
    own = torch.cat((statistics_3C.flatten(), target_logits))
    if num_ranks == 1:
        all_R = own[None]
    else:
        flat = own.new_empty(num_ranks * own.numel())
        dist.all_gather_into_tensor(flat, own, group=group)
        all_R = flat.view(num_ranks, -1)
    maximum_RC, sum_RC, product_RC = all_R[:, : 3 * size].view(num_ranks, 3, size).unbind(dim=1)
    maximum_C = maximum_RC.amax(dim=0)
    below_RC = maximum_RC - maximum_C
    scale_RC = below_RC.exp()
    sum_C = (sum_RC * scale_RC).sum(dim=0)
    product_C = ((product_RC + sum_RC * below_RC) * scale_RC).sum(dim=0)
    log_sum_C = sum_C.log()
    # All ranks but the target's own contribute zero.
    return maximum_C, log_sum_C, log_sum_C - product_C / sum_C, all_R[:, 3 * size :].sum(dim=0)


def _logit_gradient(part: _Chunk, grad_m: Tensor, predictions: HeadPredictions, compiled: bool) -> Tensor:
    """Write the gradient of the loss with respect to a chunk's logits to its place, and return it.

    d logprob / d logits = (onehot(target) - p) / temperature. A position's tokens share the second term; the element of
    a target is computed in fp32 and rounded once, because near p = 1 its two terms all but cancel.
    """
    scaled_m = grad_m.to(part.temperatures_C.dtype) / part.temperatures_C[part.slots]
    per_position_C = torch.zeros_like(part.temperatures_C).index_add_(0, part.slots, scaled_m)
    if part.columns:
        real, factors = slice(0, part.columns), (part.temperatures_C, part.logsumexp_C, per_position_C)
        if part.grad_CV.dtype == part.logits_CV.dtype:
            passes = _fused(_overwrite_by_gradient) if compiled else _overwrite_by_gradient
            passes(part.logits_CV[:, real], *factors)
        else:
            passes = _fused(_write_gradient) if compiled else _write_gradient
            passes(part.grad_CV[:, real], part.logits_CV[:, real], *factors)
    part.grad_CV[:, part.columns :] = 0
    if part.columns:
        leaders = predictions.leaders_M[part.tokens] - part.tokens.start
        same_target_m = torch.zeros_like(scaled_m).index_add_(0, leaders, scaled_m)[leaders]
        at_target_m = same_target_m - per_position_C[part.slots] * part.logprobs.exp()
        # What another rank holds is written to the row that nobody reads: a choice by mask would wait for the device.
        rows = torch.where(part.is_local, part.slots, part.grad_CV.shape[0])
        part.spare_CV.index_put_((rows, part.local_targets), at_target_m.to(part.spare_CV.dtype))
    return part.grad_CV


def _write_gradient(
    grad_CV: Tensor, logits_CV: Tensor, temperatures_C: Tensor, logsumexp_C: Tensor, per_position_C: Tensor
) -> None:
    """grad <- -per_position x p."""
    scaled_CV = logits_CV.to(temperatures_C.dtype) / temperatures_C[:, None]
    grad_CV.copy_((scaled_CV - logsumexp_C[:, None]).exp() * -per_position_C[:, None])


def _overwrite_by_gradient(
    logits_CV: Tensor, temperatures_C: Tensor, logsumexp_C: Tensor, per_position_C: Tensor
) -> None:
    """The same in place: a compiled pass with one tensor in two arguments would be another one."""
    _write_gradient(logits_CV, logits_CV, temperatures_C, logsumexp_C, per_position_C)


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _add_product(head_grad_V: Tensor, grad_logits_CV: Tensor, hidden_C: Tensor) -> None:
    """head_grad += grad_logits.T @ hidden, the sum in head_grad's dtype."""
    if head_grad_V.dtype == grad_logits_CV.dtype:
        head_grad_V.addmm_(grad_logits_CV.t(), hidden_C)
    elif head_grad_V.device.type == "cuda" and head_grad_V.dtype == torch.float32:
        # The product's fp32 sums go to the buffer without a rounding to bf16 and without a second [V, hidden].
        torch.addmm(head_grad_V, grad_logits_CV.t(), hidden_C, out_dtype=torch.float32, out=head_grad_V)
    else:
        hidden_C = hidden_C.to(head_grad_V.dtype)
        for start in range(0, head_grad_V.shape[0], HEAD_BLOCK_ROWS):
            block = slice(start, start + HEAD_BLOCK_ROWS)
            head_grad_V[block].addmm_(grad_logits_CV[:, block].t().to(head_grad_V.dtype), hidden_C)
