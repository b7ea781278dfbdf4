"""A Llama-like decoder as megatron-core model chunks of one rank.

In: the architecture's numbers, a layout whose groups exist (parallel.py). Out: `Chunk`s, Megatron's GPTModel with the
layers of spec.py; the last stage gives hidden states after the final norm, from which the trainer's head computes. Left
to others: weights from files (hf_weights.py), gradients' reduction and schedules (Megatron, the trainer).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from rl360.errors import ConfigError
from rl360.models.decoder import DecoderConfig
from rl360.models.megatron.blocks import Setting, add_norm, embed
from rl360.models.megatron.hf_weights import named_parameters, parts
from rl360.models.megatron.layout import Layout
from rl360.models.megatron.packed import PackedTensors
from rl360.models.megatron.parallel import context_group, tensor_group
from rl360.models.megatron.pointwise import kernels, rotary_angles
from rl360.models.megatron.spec import Layer, NormGain, decoder_spec
from rl360.models.random_weights import drawn

RECOMPUTE = ("none", "core_attn", "full")


class Chunk(GPTModel):
    """The layers of one (virtual) pipeline stage."""

    setting: Setting
    inverse_frequencies_E: Tensor  # of the rotary embedding, fp32

    def forward(self, packed: PackedTensors) -> Tensor:
        """Hidden states of this rank's tokens, [N, 1, F] (Megatron's axes; N is the tensor rank's share of the context
        rank's tokens when sequence parallel): after the final norm on the last stage, the residual stream on others.

        The first stage reads token ids, others what `set_input_tensor` gave them.
        """
        setting = self.setting
        cos, sin = rotary_angles(packed.positions_L, self.inverse_frequencies_E)
        if self.pre_process:
            embedding = self.embedding.word_embeddings
            x = embed(packed.token_ids_L, embedding.weight, embedding.vocab_start_index, setting)
        else:
            x = self.decoder.input_tensor.squeeze(1)
        y: Tensor | None = None
        for layer in self.decoder.layers:
            x, y = layer(x, y, packed, cos, sin)
        assert y is not None, "a stage has at least one layer"
        if self.post_process:
            norm = self.decoder.final_layernorm
            if isinstance(norm, NormGain):
                return add_norm(x, y, norm.weight, setting).unsqueeze(1)
            return norm(x + y).unsqueeze(1)
        return (x + y).unsqueeze(1)

    @property
    def output_weight(self) -> Tensor:
        """The head's rows of this tensor rank, [padded vocabulary / tensor, hidden]; last stage only."""
        assert self.post_process, "only the last stage has a head"
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None
        return weight


def transformer_config(
    config: DecoderConfig, layout: Layout, params_dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """Megatron's description of the same model."""
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=config.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        gradient_accumulation_fusion=False,  # blocks.py adds to main_grad itself, te_spec.py turns it on where needed
        disable_parameter_transpose_cache=True,  # of Transformer Engine: always add to main_grad, never overwrite it
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence_parallel,
        # A batch's weights add up to 1 over everything, so gradients are sums and nothing is divided by a count.
        calculate_per_token_loss=True,
        # Micro-batches differ in length. (The dispatcher is one of experts, which there are none of.)
        variable_seq_lengths=layout.pipeline > 1,
        moe_token_dispatcher_type="alltoall",
        # Megatron's default flags give wrong gradients, without an error, when stages are interleaved.
        overlap_p2p_comm=layout.virtual_pipeline is not None,
        batch_p2p_comm=False,
    )


def build_model(
    config: DecoderConfig,
    layout: Layout,
    *,
    params_dtype: torch.dtype,
    device: torch.device | str = "cpu",
    recompute: str = "none",
    compiled: bool = False,
    transformer_engine: bool = False,
    random_init_seed: int | None = None,
) -> list[nn.Module]:
    """This rank's model chunks, one a virtual stage, on `device`.

    Args:
        recompute: what the backward pass computes again: nothing, the attention (with context parallelism its gathered
            keys and values are then not kept), or whole layers.
        compiled: run the elementwise parts through torch.compile.
        transformer_engine: layers of Transformer Engine's modules (te_spec.py). Weights have the same names in
            `named_parameters`, so checkpoints of either kind of layers fit the other.
        random_init_seed: None leaves the matrices as the allocator gave them, for a checkpoint to fill. A number gives
            random weights, the same for every layout: those that `rl360.models.loading.load_decoder` gives on this kind
            of device.

    Raises:
        ConfigError: the layout does not divide the model; recompute is none of these; Transformer Engine is asked for
            and cannot be imported.
    """
    problems = layout.misfits(config)
    if recompute not in RECOMPUTE:
        problems.append(f"trainer.recompute: {recompute!r}; expected one of {', '.join(RECOMPUTE)}")
    if problems:
        raise ConfigError(problems)
    spec = decoder_spec
    if transformer_engine:
        from rl360.models.megatron.te_spec import keep_in_main_grad, require_transformer_engine, te_decoder_spec

        require_transformer_engine()
        spec = te_decoder_spec
    device = torch.device(device)
    megatron = transformer_config(config, layout, params_dtype, device)
    setting = Setting(
        kernels(compiled), config.rms_norm_eps, config.norm_groups, tensor_group(layout), layout.sequence_parallel
    )
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = (config.rope_theta**-exponents).to(device)
    chunks: list[nn.Module] = []
    quiet = logging.getLogger("megatron.core.models.gpt.gpt_model")
    before = quiet.level
    quiet.setLevel(logging.ERROR)  # it advertises its successor each time
    try:
        for index in range(layout.chunks):
            stage = None if layout.virtual_pipeline is None else index
            chunk = _build_chunk(config, layout, megatron, spec(megatron, config.norm_groups, stage), stage)
            chunk.setting, chunk.inverse_frequencies_E = setting, frequencies
            for layer in chunk.decoder.layers:
                assert isinstance(layer, Layer)
                layer.setting, layer.context_group, layer.recompute = setting, context_group(layout), recompute
            if transformer_engine:
                keep_in_main_grad(chunk)
            chunks.append(chunk)
    finally:
        quiet.setLevel(before)
    if random_init_seed is not None:
        fill_random(chunks, config, layout, random_init_seed)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # where whole matrices were drawn
    return chunks


def _build_chunk(
    config: DecoderConfig,
    layout: Layout,
    megatron: TransformerConfig,
    spec: TransformerBlockSubmodules,
    stage: int | None,
) -> Chunk:
    where: dict[str, Any] = {"ignore_virtual": stage is None, "vp_stage": stage}
    return Chunk(
        megatron,
        spec,
        vocab_size=layout.padded_vocab(config.vocab_size),
        max_sequence_length=config.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="none",  # the angles are computed from each token's position
        vp_stage=stage,
    )


@torch.no_grad()
def fill_random(chunks: list[nn.Module], config: DecoderConfig, layout: Layout, seed: int) -> None:
    """Fill with `drawn` matrices, and ones as gains. Every rank draws all tensors, in turn, and keeps its slices."""
    from rl360.models.decoder import Decoder

    rank = parallel_state.get_tensor_model_parallel_rank() if layout.tensor > 1 else 0
    wanted: dict[str, list[tuple[Tensor, Any]]] = {}
    for name, parameter in named_parameters(chunks):
        parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        for part in parts(name, config, rank, layout.tensor):
            wanted.setdefault(part.hf_name, []).append((parameter, part))
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Decoder(config).named_parameters()}
    matrices = {name: shape for name, shape in shapes.items() if not name.endswith("norm.weight")}
    device = next(chunks[0].parameters()).device
    for name, whole in drawn(matrices, config.initializer_range, seed, device):
        for parameter, part in wanted.get(name, []):
            piece = whole.narrow(part.axis, part.start, part.length)
            parameter.narrow(part.axis, part.at, part.length).copy_(piece)
