"""A layer whose products, norms and attention are Transformer Engine's: the option `trainer.transformer_engine`.

In: what spec.py's layer gets; megatron-core's wrappers of Transformer Engine. Out: the same layer interface, the same
weights under the names of hf_weights.py (which knows that a fused norm's gain is named after the product), fp32
gradients in `main_grad`. Left to others: Transformer Engine itself, which needs a CUDA GPU.

Transformer Engine's: the norm before a product fused with it (`TELayerNormColumnParallelLinear`), the products behind
it (`TERowParallelLinear`), with their tensor-parallel communication, the last norm (`TENorm`), and the attention of
packed sequences (`TEDotProductAttention`: cuDNN's, or FlashAttention where that is installed).

Ours stay: the embedding; the split of qkv with norms of q and k and rotary embedding, one pass from each token's own
position; SwiGLU; grouped RMSNorm, which Transformer Engine does not have (the product behind it is then
`TEColumnParallelLinear`); with context parallelism the attention, whose keys are gathered in the order of the stream.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rl360.errors import ConfigError
from rl360.models.megatron import wgrad
from rl360.models.megatron.attention import attend
from rl360.models.megatron.blocks import Setting, split_rotate
from rl360.models.megatron.layout import TE_INSTALL
from rl360.models.megatron.packed import PackedTensors
from rl360.models.megatron.spec import Layer, NoModule, NormGain, block_spec


def require_transformer_engine() -> None:
    """Import it. Raises `ConfigError` that says what to install, or why what is there cannot be loaded."""
    try:
        import transformer_engine.pytorch
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # the last ones: its own checks of versions
        raise ConfigError(
            f"trainer.transformer_engine: true, and Transformer Engine cannot be imported ({error}); expected it built "
            f"for torch {torch.__version__}, try {TE_INSTALL} (it compiles, and needs nvcc), or false"
        ) from error
    if not torch.cuda.is_available():
        raise ConfigError("trainer.transformer_engine: true; Transformer Engine needs a CUDA GPU, expected false")
    from megatron.core.extensions import transformer_engine

    if not transformer_engine.HAVE_TE:  # it caught an ImportError of a part that it needs
        raise ConfigError(
            "trainer.transformer_engine: true; megatron-core cannot use the Transformer Engine that is installed: "
            f"expected one that has transformer_engine.pytorch.fp8, try {TE_INSTALL}, or false"
        )


class TELayer(Layer):
    """As `Layer`, computed by Transformer Engine's modules."""

    def _compute(
        self, x: Tensor, y: Tensor | None, packed: PackedTensors, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        attention, setting = self.self_attention, self.setting
        x, qkv = _norm_column(x, y, self.input_layernorm, attention.linear_qkv, setting)
        gains = None
        if self.config.qk_layernorm:
            gains = (attention.q_layernorm.weight, attention.k_layernorm.weight)
        groups, width = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        q, k, v = split_rotate(qkv, gains, cos, sin, width, groups, setting)
        if self.recompute == "core_attn" and torch.is_grad_enabled():
            out = checkpoint(self._attend, q, k, v, packed, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self._attend(q, k, v, packed)
        assert isinstance(out, Tensor)
        y = linear(attention.linear_proj, out.flatten(1))
        x, gate_up = _norm_column(x, y, self.pre_mlp_layernorm, self.mlp.linear_fc1, setting)
        return x, linear(self.mlp.linear_fc2, _SwiGLU.apply(gate_up, setting))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedTensors) -> Tensor:
        """[T, H, D] or [T, H D]."""
        if self.context_group is not None:
            return attend(q, k, v, packed, self.context_group)
        (span,) = packed.spans  # without context parallelism a rank has the whole stream
        sequences = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=span.cu_q,
            cu_seqlens_kv=span.cu_k,
            max_seqlen_q=span.bounds.max_q,
            max_seqlen_kv=span.bounds.max_k,
            pad_between_seqs=False,
        )
        core: Any = self.self_attention.core_attention
        return core(q, k, v, None, AttnMaskType.causal, packed_seq_params=sequences)


def linear(module: Any, x: Tensor) -> Tensor:
    """A product of Transformer Engine's; in the backward pass it adds its weight's gradient to `main_grad` itself.

    Of a weight without such a buffer autograd gets the gradient. `on_gradient` is told of the weight behind the
    product's backward pass, as wgrad.py has it.
    """
    weight = module.weight
    module.fuse_wgrad_accumulation = getattr(weight, "main_grad", None) is not None
    if module.fuse_wgrad_accumulation:
        # With this mark, which Megatron's buffers set each step, autograd would get (and copy) a stand-in of the
        # gradient, for the hooks that Megatron waits for.
        if hasattr(weight, "grad_added_to_main_grad"):
            del weight.grad_added_to_main_grad
        if torch.is_grad_enabled() and x.requires_grad and hasattr(weight, "on_gradient"):
            x = wgrad.complete_in_backward(x, weight)
    out, _ = module(x)
    assert isinstance(out, Tensor)
    return out


def _norm_column(x: Tensor, y: Tensor | None, norm: nn.Module, product: nn.Module, setting: Setting) -> Any:
    """(x + y, norm(x + y) @ weight.T): as `blocks.norm_column`, the norm being the product's own or, grouped, ours."""
    if isinstance(norm, NormGain):
        x, normed = _Norm.apply(x, y, norm.weight, setting)
        return x, linear(product, normed)
    x = x if y is None else x + y
    return x, linear(product, x)


class _Norm(torch.autograd.Function):
    """(x + y, norm(x + y)); y None counts as zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, gain: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
        kernels = setting.kernels
        if y is None:
            normed, rstd = kernels.norm(x, gain, setting.eps, setting.norm_groups)
        else:
            x, normed, rstd = kernels.add_norm(x, y, gain, setting.eps, setting.norm_groups)
        ctx.save_for_backward(x, rstd)
        ctx.gain, ctx.setting, ctx.added = gain, setting, y is not None
        return x if ctx.added else x.view_as(x), normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, skip: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd = ctx.saved_tensors
        setting = ctx.setting
        grad_x, grad_gain = setting.kernels.norm_backward(grad, skip, x, rstd, ctx.gain, setting.norm_groups)
        return (
            grad_x,
            grad_x if ctx.added else None,
            wgrad.add(ctx.gain, grad_gain) if ctx.needs_input_grad[2] else None,
            None,
        )


class _SwiGLU(torch.autograd.Function):
    """silu(gate) x up of [gate, up]."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, setting: Setting) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.setting = setting
        return setting.kernels.swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        grad_gate_up, _ = ctx.setting.kernels.swiglu_backward(grad, gate_up)
        return grad_gate_up, None


def keep_in_main_grad(chunk: nn.Module) -> None:
    """What autograd gives to a parameter of Transformer Engine's (norms' gains, in the weights' dtype) goes to its
    `main_grad`, where it has one. Parameters of ours never get a gradient from autograd then."""
    for module in chunk.modules():
        if type(module).__module__.startswith(("transformer_engine.", "megatron.core.extensions.transformer_engine")):
            for parameter in module.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(_move)


def _move(parameter: Any) -> None:
    if parameter.grad is None or getattr(parameter, "main_grad", None) is None:
        return  # autograd calls this also where it was given nothing: of weights that `linear` has seen to
    parameter.main_grad += parameter.grad
    parameter.grad = None
    wgrad.tell_complete(parameter)


def te_decoder_spec(config: TransformerConfig, norm_groups: int, chunk: int | None) -> TransformerBlockSubmodules:
    """As `spec.decoder_spec`, of Transformer Engine's modules where it has them."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TEDotProductAttention,
        TELayerNormColumnParallelLinear,
        TENorm,
        TERowParallelLinear,
    )

    grouped = norm_groups > 1
    return block_spec(
        config,
        chunk,
        TELayer,
        column=TEColumnParallelLinear if grouped else TELayerNormColumnParallelLinear,
        row=TERowParallelLinear,
        core=NoModule if config.context_parallel_size > 1 else TEDotProductAttention,
        norm=NormGain if grouped else IdentityOp,
        last_norm=NormGain if grouped else TENorm,
    )
