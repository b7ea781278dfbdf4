"""How much memory each GPU of a Megatron trainer will need, from numbers alone, stage by stage and moment by moment.

In: a model's numbers, a layout, the tokens of a micro-batch and the trainer's switches. Out: for each pipeline stage
the bytes by what they are for, at each moment that can be the fullest. Pure Python: `rl360 check` runs it where neither
torch nor a GPU is. Left to others: whether it fits and what to change (rl360.config.gpu_memory).

The formulas follow what rl360/models/megatron keeps for the backward pass, which a test counts on a real layer. What a
formula cannot know has a named constant, which says where it comes from.

Letters: N tokens of a rank between products (its share when sequence parallel), T inside them, S of the whole stream
whose keys a rank gathers, h hidden size, t tensor ranks. Bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rl360.models.megatron.layout import Architecture, Layout

MIB = 1024**2

BF16, FP32 = 2, 4
MASTER_AND_MOMENTS = 3 * FP32  # fp32 master weight and Adam's two moments
# Without torch.compile a pass over a chunk's logits holds them in fp32 four times (scaled, shifted, exp, product), and
# the gradient of SwiGLU ten values of an intermediate one ([gate; up] and its gradient, two each; the incoming
# gradient; sigmoid; silu; products). Counted in head.py and pointwise.py.
EAGER_LOGIT_COPIES = 4
EAGER_SWIGLU_COPIES = 10

# Of one process, outside of PyTorch's allocator. Not computable; to be measured on the card (docs/guide/memory.md).
CUDA_CONTEXT_BYTES = 600 * MIB  # context, loaded kernels; 500-700 MiB are usual for torch on Hopper
NCCL_GROUP_BYTES = 250 * MIB  # buffers of one communicator within a host; 100-400 MiB are usual
CUBLAS_BYTES = 64 * MIB  # workspaces of two streams, 32 MiB each on Hopper (torch's default), inside the allocator
ALLOCATOR_SHARE = 0.04  # of what changes within a step: blocks that are rounded up or too small for what comes next


class Model(Architecture, Protocol):
    """What memory depends on; `rl360.models.decoder.DecoderConfig` and `rl360.config.forecast.ModelShape` have it."""

    @property
    def head_dim(self) -> int: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def norm_groups(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Work:
    """What a layout is asked to compute."""

    tokens: int  # of the largest micro-batch, over all context ranks, padded to the layout's multiple
    chunk: int  # rows of logits held at once
    recompute: str = "none"  # none | core_attn | full
    compiled: bool = True
    predicting_share: float = 1.0  # of the tokens, those from which a trained token is predicted; 1: the worst case
    fp32_logits: bool = True  # a chunk's logits in fp32, and their gradient beside them
    reference: bool = False  # a frozen reference model stays beside the policy
    transformer_engine: bool = False  # its layers keep the inputs of their products


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One GPU of one pipeline stage. `moments`: what lies beside `static` then, by what it is for."""

    pipeline_rank: int
    num_parameters: int
    static: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]
    outside: Mapping[str, int]  # not PyTorch's: the context, NCCL

    @property
    def fullest(self) -> str:
        """The moment at which most is needed."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def allocated(self) -> int:
        """What torch.cuda.max_memory_allocated would say."""
        return sum(self.static.values()) + sum(self.moments[self.fullest].values())

    @property
    def slack(self) -> int:
        """What the allocator holds beyond that."""
        return int(ALLOCATOR_SHARE * sum(self.moments[self.fullest].values()))

    @property
    def total(self) -> int:
        """What the card must have: allocated, the allocator's slack, and what is not PyTorch's."""
        return self.allocated + self.slack + sum(self.outside.values())

    @property
    def parts(self) -> dict[str, int]:
        """Everything that adds up to `total`, at the fullest moment."""
        return {**self.static, **self.moments[self.fullest], "allocator": self.slack, **self.outside}


def forecast_stages(model: Model, layout: Layout, work: Work) -> list[StageForecast]:
    """The forecast of every pipeline rank; the ranks of one stage need the same."""
    return [_stage(model, layout, work, rank) for rank in range(layout.pipeline)]


def fullest_stage(model: Model, layout: Layout, work: Work) -> StageForecast:
    return max(forecast_stages(model, layout, work), key=lambda stage: stage.total)


def padded_tokens(layout: Layout, tokens: int) -> int:
    """Tokens of a micro-batch with its padding."""
    multiple = layout.token_multiple
    return -(-tokens // multiple) * multiple


def stage_parameters(model: Model, layout: Layout, pipeline_rank: int) -> int:
    """Parameters of one rank of a stage: matrices split over tensor ranks, norms whole."""
    h, t = model.hidden_size, layout.tensor
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    matrices = (h * (2 * heads + 2 * kv_heads) + 3 * h * model.intermediate_size) // t
    norms = 2 * h + (2 * model.head_dim if model.qk_norm else 0)
    count = (model.num_layers // layout.pipeline) * (matrices + norms)
    rows = layout.padded_vocab(model.vocab_size) // t * h
    first, last = pipeline_rank == 0, pipeline_rank == layout.pipeline - 1
    if first:
        count += rows
    if last:
        count += h  # the last norm
        if not (model.tie_word_embeddings and first):
            count += rows  # a tied head of another stage than the embedding's is a second copy
    return count


def in_flight(layout: Layout, pipeline_rank: int) -> int:
    """Model chunks (of a rank's `layout.chunks`) whose activations a rank holds at most, one a micro-batch.

    One-forward-one-backward, plain (Narayanan et al. 2021, "Efficient large-scale language model training on GPU
    clusters", arXiv:2104.04473) and interleaved, as megatron.core.pipeline_parallel.schedules warms up.
    """
    behind = layout.pipeline - pipeline_rank - 1
    if layout.virtual_pipeline is None:
        return behind + 1
    return 2 * behind + (layout.chunks - 1) * layout.pipeline + 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """N, T and S of the module's legend."""

    between: int
    inside: int
    stream: int

    @classmethod
    def of(cls, layout: Layout, tokens: int) -> Tokens:
        inside = tokens // layout.context
        return cls(inside // layout.tensor if layout.sequence_parallel else inside, inside, tokens)


def layer_keeps(
    model: Model, layout: Layout, tokens: Tokens, recompute: str = "none", transformer_engine: bool = False
) -> dict[str, int]:
    """What one layer keeps for its backward pass, by what it is. The angles of the rotary embedding are not here."""
    h, t = model.hidden_size, layout.tensor
    residual = BF16 * h * tokens.between
    if recompute == "full":
        return {"residual stream": residual}
    q = BF16 * model.num_heads * model.head_dim // t * tokens.inside
    kv = 2 * BF16 * model.num_kv_heads * model.head_dim // t
    whole = layout.context > 1 and recompute == "none"  # the gathered keys and values stay for the attention
    keeps = {
        "residual stream": 2 * residual,
        "1 / rms": 2 * FP32 * model.norm_groups * tokens.between,
        "q": q,
        "k, v": kv * (tokens.stream if whole else tokens.inside),
        # Of several chunks the outputs are joined for the next product, and the attention keeps its own of each.
        "attention output": q * (2 if whole else 1),
        "gate, up": 2 * BF16 * model.intermediate_size // t * tokens.inside,
    }
    if recompute == "none":
        keeps["log-sum-exp"] = FP32 * model.num_heads // t * tokens.inside
    if model.qk_norm:
        keeps["qkv before its norms"] = q + kv * tokens.inside
    if transformer_engine:
        keeps["normalised inputs"] = 2 * residual
        keeps["activated input"] = BF16 * model.intermediate_size // t * tokens.inside
    return keeps


def chunk_keeps(
    model: Model, layout: Layout, tokens: Tokens, recompute: str, last: bool, transformer_engine: bool = False
) -> int:
    """What one model chunk keeps of one micro-batch. last: it has the final norm, whose output the head takes."""
    layers = model.num_layers // layout.num_stages
    keeps = layers * sum(layer_keeps(model, layout, tokens, recompute, transformer_engine).values())
    keeps += FP32 * model.head_dim * tokens.inside  # the angles' cosines and sines, shared by the layers
    if last:
        keeps += (BF16 * model.hidden_size + FP32 * model.norm_groups) * tokens.between
    return keeps


def _mlp_backward(model: Model, layout: Layout, tokens: Tokens, compiled: bool) -> int:
    """At the end of the gradient of SwiGLU: its gradient in, [gate; up]'s gradient, the activation computed again."""
    values = model.intermediate_size // layout.tensor * tokens.inside
    rows = BF16 * model.hidden_size
    gathered = rows * tokens.inside if layout.sequence_parallel else 0
    passing = 4 * BF16 * values + (0 if compiled else EAGER_SWIGLU_COPIES * FP32 * values)
    return passing + gathered + 2 * rows * tokens.between


def _attention_backward(model: Model, layout: Layout, tokens: Tokens) -> int:
    """Within the gradient of the attention, less what the layer's MLP no longer keeps by then. May be negative."""
    t = layout.tensor
    q = BF16 * model.num_heads * model.head_dim // t * tokens.inside
    one = BF16 * model.num_kv_heads * model.head_dim // t  # k or v, a token
    rows = BF16 * model.hidden_size * tokens.between
    freed = 2 * BF16 * model.intermediate_size // t * tokens.inside + rows
    if layout.context == 1:
        # q's gradient is summed in fp32 (FlashAttention); dq, dk, dv; the gradient that comes in.
        needs = 2 * q + q + 2 * one * tokens.inside + q
    else:
        # One of two chunks: its own dk, dv, and both chunks' dk, dv laid into the whole stream; sums in fp32.
        needs = q + q + 6 * one * tokens.stream + q + 2 * 2 * one * tokens.stream
    return needs + 2 * rows - freed


def _head(model: Model, layout: Layout, work: Work, tokens: Tokens) -> int:
    """At a chunk of the head (the hidden states that predict, their gradient, the chunk's logits), or just behind the
    last one, when that gradient is laid into all positions."""
    row = BF16 * model.hidden_size
    predicting = int(work.predicting_share * tokens.inside)
    columns = layout.padded_vocab(model.vocab_size) // layout.tensor
    chunk = min(work.chunk, max(1, predicting))
    logits = (BF16 + (FP32 if work.fp32_logits else 0)) * (chunk + 1) * columns
    if not work.compiled:
        logits += EAGER_LOGIT_COPIES * FP32 * chunk * columns
    return row * (tokens.between + 2 * predicting) + max(logits, row * tokens.inside)


def _stage(model: Model, layout: Layout, work: Work, rank: int) -> StageForecast:
    tokens = Tokens.of(layout, work.tokens)
    parameters = stage_parameters(model, layout, rank)
    shards = layout.data * layout.context
    static = {
        "weights": BF16 * parameters,
        "gradients": FP32 * parameters,
        "optimizer": MASTER_AND_MOMENTS * -(-parameters // shards),
    }
    if work.reference:
        static["reference"] = BF16 * parameters

    row = BF16 * model.hidden_size * tokens.between
    last = rank == layout.pipeline - 1
    chunks = in_flight(layout, rank)
    engine = work.transformer_engine
    layer = sum(layer_keeps(model, layout, tokens, work.recompute, engine).values())
    activations = (chunks - last) * chunk_keeps(model, layout, tokens, work.recompute, False, engine)
    if last:
        activations += chunk_keeps(model, layout, tokens, work.recompute, True, engine)
    if layout.pipeline > 1:
        # A stage keeps what it sent (deallocate_pipeline_outputs is off), and receives one each way.
        activations += (chunks + 2) * row
    again = 0
    if work.recompute == "full":
        plain = layer_keeps(model, layout, tokens, "none", engine)
        again = sum(plain.values()) - row  # the layer's own input is kept already
    elif work.recompute == "core_attn":
        plain = layer_keeps(model, layout, tokens, "none", engine)
        again = sum(plain.values()) - layer
    mlp = _mlp_backward(model, layout, tokens, work.compiled) + (again if work.recompute == "full" else 0)
    attention = again + _attention_backward(model, layout, tokens)
    moments: dict[str, dict[str, int]] = {
        "backward pass of the last layer": {
            "activations": activations,
            "one layer's backward": max(mlp, attention, 0),
        },
        "optimizer step": {},  # the fused AdamW works in place
    }
    if last:
        moments["head"] = {"activations": activations, "head": _head(model, layout, work, tokens)}
    for moment in moments.values():
        moment["cuBLAS"] = CUBLAS_BYTES
    return StageForecast(rank, parameters, static, moments, _outside(layout))


def _outside(layout: Layout) -> dict[str, int]:
    # A communicator for each kind of group that has more than one rank; the optimizer's is over data and context.
    kinds = (
        layout.tensor,
        layout.context,
        layout.data,
        layout.pipeline,
        layout.data * layout.context,
        layout.world_size,
    )
    return {
        "CUDA": CUDA_CONTEXT_BYTES,
        "NCCL": NCCL_GROUP_BYTES * sum(size > 1 for size in kinds),
    }
