"""Which slice of which Hugging Face tensor is which slice of which Megatron parameter, for any tensor-parallel size.

In: a `DecoderConfig`, a parameter's name as `GPTModel` names it (with the layer counted over the whole model), a tensor
rank and size. Out: `Part`s, pure index arithmetic; on top of it `load_hf`, which fills a rank's model from an HF folder
reading only its slices, and `hf_tensors`, which gives the model's tensors back under their HF names. Left to others:
files of Megatron's own format (convert.py), training state (rl360.trainers.megatron.checkpoint).

Megatron keeps q, k, v as one matrix in which each key/value group has its rows together, [q of the group, k, v], and
gate and up as one, [gate; up], of which a tensor rank has a share of each half. The vocabulary is padded with zero rows
to a multiple of 128 x the tensor-parallel size. Every slice is along one axis, the same on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl360.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from rl360.models.decoder import DecoderConfig
    from rl360.models.megatron.layout import Layout

VOCAB_MULTIPLE = 128  # Megatron's --make-vocab-size-divisible-by: kind to matrix products, and what its tools expect

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
LAYERS = "decoder.layers."

# The parts of one layer, in the order of the forward pass.
INPUT_NORM = "input_layernorm.weight"
QKV = "self_attention.linear_qkv.weight"
Q_NORM = "self_attention.q_layernorm.weight"
K_NORM = "self_attention.k_layernorm.weight"
ATTENTION_OUT = "self_attention.linear_proj.weight"
MLP_NORM = "pre_mlp_layernorm.weight"
GATE_UP = "mlp.linear_fc1.weight"
MLP_OUT = "mlp.linear_fc2.weight"

_WHOLE_LAYER_TENSORS = {
    INPUT_NORM: "input_layernorm.weight",
    Q_NORM: "self_attn.q_norm.weight",
    K_NORM: "self_attn.k_norm.weight",
    MLP_NORM: "post_attention_layernorm.weight",
}

# What Megatron's stock layer specs call these in a checkpoint (sharded_state_dict_keys_map in its gpt_layer_specs.py).
FUSED_NAMES = {
    INPUT_NORM: "self_attention.linear_qkv.layer_norm_weight",
    MLP_NORM: "mlp.linear_fc1.layer_norm_weight",
}


_OWN_NAMES = {fused: own for own, fused in FUSED_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """[start, start + length) along `axis` of an HF tensor is [at, at + length) of the parameter on the same axis."""

    hf_name: str
    axis: int
    start: int
    length: int
    at: int


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """Rows of the embedding over all tensor ranks: the next multiple of 128 x `tensor_size`."""
    multiple = VOCAB_MULTIPLE * tensor_size
    return -(-vocab_size // multiple) * multiple


def layer_parameters(config: DecoderConfig) -> list[str]:
    """Names of one layer's parameters, without the `decoder.layers.N.` before them."""
    norms = [Q_NORM, K_NORM] if config.qk_norm else []
    return [INPUT_NORM, QKV, *norms, ATTENTION_OUT, MLP_NORM, GATE_UP, MLP_OUT]


def parameter_names(config: DecoderConfig) -> list[str]:
    """Every parameter of the whole model, layers counted from 0. A tied head is the embedding and has no name."""
    names = [EMBEDDING]
    names += [f"{LAYERS}{layer}.{name}" for layer in range(config.num_layers) for name in layer_parameters(config)]
    names.append(FINAL_NORM)
    return names if config.tie_word_embeddings else [*names, HEAD]


def parameter_shape(name: str, config: DecoderConfig, tensor_size: int = 1) -> tuple[int, ...]:
    """Shape of the parameter on one tensor rank."""
    if name in (EMBEDDING, HEAD):
        return (padded_vocab_size(config.vocab_size, tensor_size) // tensor_size, config.hidden_size)
    if name == FINAL_NORM:
        return (config.hidden_size,)
    _, part = _split(name)
    query = config.num_heads * config.head_dim
    if part == QKV:
        return ((query + 2 * config.num_kv_heads * config.head_dim) // tensor_size, config.hidden_size)
    if part == ATTENTION_OUT:
        return (config.hidden_size, query // tensor_size)
    if part == GATE_UP:
        return (2 * config.intermediate_size // tensor_size, config.hidden_size)
    if part == MLP_OUT:
        return (config.hidden_size, config.intermediate_size // tensor_size)
    return (config.head_dim,) if part in (Q_NORM, K_NORM) else (config.hidden_size,)


def stacked_keys(name: str) -> tuple[list[str], int | None]:
    """How a checkpoint names the parameter, and its layer there: the layers of one kind are stacked in one tensor.

    The norms before the two halves of a layer have two names: their own, and the one that Megatron's stock layers give
    them because Transformer Engine fuses them into the matrix that follows.
    """
    if not name.startswith(LAYERS):
        return [name], None
    layer, part = _split(name)
    found = [f"{LAYERS}{part}"]
    if part in FUSED_NAMES:
        found.append(f"{LAYERS}{FUSED_NAMES[part]}")
    return found, layer


@dataclass(frozen=True, slots=True)
class Piece:
    """[at, at + rows x columns) of a rank's flattened parameter is this box of the whole, unpadded-by-rank tensor."""

    at: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def pieces(name: str, config: DecoderConfig, tensor_rank: int, tensor_size: int, start: int, end: int) -> list[Piece]:
    """Where [start, end) of a tensor rank's flattened parameter lies in the whole parameter (tensor-parallel size 1).

    A range of a matrix is at most a piece of a row, whole rows, and a piece of a row. `at` counts from `start`. Padding
    that the whole parameter does not have is in no piece: its size depends on the number of ranks.
    """
    shape = parameter_shape(name, config, tensor_size)
    if len(shape) == 1:
        return [Piece(0, (start,), (end - start,))] if end > start else []
    columns = shape[1]
    whole_rows = parameter_shape(name, config)[0]
    column_offset, spans = 0, [(0, shape[0], 0)]  # (first row here, rows, first row of the whole)
    if name in (EMBEDDING, HEAD):
        first = tensor_rank * shape[0]
        spans = [(0, min(shape[0], whole_rows - first), first)]
    elif _split(name)[1] == GATE_UP:
        half = shape[0] // 2
        spans = [(0, half, tensor_rank * half), (half, half, config.intermediate_size + tensor_rank * half)]
    elif _split(name)[1] == QKV:
        spans = [(0, shape[0], tensor_rank * shape[0])]
    else:
        column_offset = tensor_rank * columns
    found = []
    for row, rows, column, width in _rectangles(start, end, columns):
        for here, count, there in spans:
            low, high = max(row, here), min(row + rows, here + count)
            if low < high:
                at = low * columns + column - start
                found.append(Piece(at, (there + low - here, column_offset + column), (high - low, width)))
    return found


def _rectangles(start: int, end: int, columns: int) -> list[tuple[int, int, int, int]]:
    """[start, end) of a row-major matrix as (row, rows, column, columns) each."""
    found = []
    if start < end and start % columns:
        stop = min(end, start - start % columns + columns)
        found.append((start // columns, 1, start % columns, stop - start))
        start = stop
    if rows := (end - start) // columns:
        found.append((start // columns, rows, 0, columns))
        start += rows * columns
    if start < end:
        found.append((start // columns, 1, 0, end - start))
    return found


def is_replicated(name: str) -> bool:
    """Whether every tensor rank holds the whole parameter: the norms do."""
    return name.endswith("norm.weight")


def parts(name: str, config: DecoderConfig, tensor_rank: int = 0, tensor_size: int = 1) -> list[Part]:
    """What a tensor rank's parameter is made of; what no part covers are the zero rows of the padded vocabulary.

    Raises `CheckpointError` for a name that is no parameter of this architecture.
    """
    if name in (EMBEDDING, HEAD):
        hf_name = "model.embed_tokens.weight" if name == EMBEDDING or config.tie_word_embeddings else "lm_head.weight"
        rows = padded_vocab_size(config.vocab_size, tensor_size) // tensor_size
        start = tensor_rank * rows
        length = min(config.vocab_size - start, rows)
        return [Part(hf_name, 0, start, length, 0)] if length > 0 else []
    if name == FINAL_NORM:
        return [Part("model.norm.weight", 0, 0, config.hidden_size, 0)]
    layer, part = _split(name)
    if part not in layer_parameters(config) or not 0 <= layer < config.num_layers:
        raise CheckpointError(f"{name}: not a parameter of a {config.model_type} of this config")
    prefix = f"model.layers.{layer}."
    if part == QKV:
        return _qkv(prefix, config, tensor_rank, tensor_size)
    if part == GATE_UP:
        width = config.intermediate_size // tensor_size
        start = tensor_rank * width
        return [
            Part(f"{prefix}mlp.gate_proj.weight", 0, start, width, 0),
            Part(f"{prefix}mlp.up_proj.weight", 0, start, width, width),
        ]
    if part == ATTENTION_OUT:
        width = config.num_heads * config.head_dim // tensor_size
        return [Part(f"{prefix}self_attn.o_proj.weight", 1, tensor_rank * width, width, 0)]
    if part == MLP_OUT:
        width = config.intermediate_size // tensor_size
        return [Part(f"{prefix}mlp.down_proj.weight", 1, tensor_rank * width, width, 0)]
    length = config.head_dim if part in (Q_NORM, K_NORM) else config.hidden_size
    return [Part(f"{prefix}{_WHOLE_LAYER_TENSORS[part]}", 0, 0, length, 0)]


def _qkv(prefix: str, config: DecoderConfig, tensor_rank: int, tensor_size: int) -> list[Part]:
    groups, width = config.num_kv_heads // tensor_size, config.head_dim
    query = config.num_heads // config.num_kv_heads * width  # rows of q that share one k and v
    found = []
    for local in range(groups):
        group, at = tensor_rank * groups + local, local * (query + 2 * width)
        found += [
            Part(f"{prefix}self_attn.q_proj.weight", 0, group * query, query, at),
            Part(f"{prefix}self_attn.k_proj.weight", 0, group * width, width, at + query),
            Part(f"{prefix}self_attn.v_proj.weight", 0, group * width, width, at + query + width),
        ]
    return found


def _split(name: str) -> tuple[int, str]:
    """(layer, name inside the layer)."""
    number, _, part = name.removeprefix(LAYERS).partition(".")
    if not name.startswith(LAYERS) or not number.isdigit():
        raise CheckpointError(f"{name}: not a parameter of a Llama-like Megatron model")
    return int(number), part


# ---- models


def named_parameters(chunks: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """(name with the layer counted over the whole model, parameter) of a rank's model chunks, wrapped or not.

    A norm that Transformer Engine fuses with the product behind it has the name that it has of its own.
    """
    for wrapped in chunks:
        chunk: Any = wrapped
        while not hasattr(chunk, "decoder") and hasattr(chunk, "module"):
            chunk = chunk.module
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]  # Megatron counts layers from 1
        for name, parameter in chunk.named_parameters():
            if name.startswith(LAYERS):
                local, part = _split(name)
                name = f"{LAYERS}{numbers[local]}.{_OWN_NAMES.get(part, part)}"
            yield name, parameter


def load_hf(chunks: Sequence[nn.Module], config: DecoderConfig, layout: Layout, folder: Path | str) -> None:
    """Fill a rank's model chunks from an HF folder, reading only this rank's slices; padding rows become zero.

    Values are converted to the parameters' dtype and device. Raises `CheckpointError`, before anything is copied,
    naming the first tensor (and its file) whose name or shape does not fit the config.
    """
    import torch

    from rl360.models.weight_files import WeightFiles

    rank, size, _ = _tensor_group(layout)
    with WeightFiles(folder, config) as files, torch.no_grad():
        for name, parameter in named_parameters(chunks):
            _check_shape(name, parameter, config, size)
            pieces = parts(name, config, rank, size)
            if sum(piece.length for piece in pieces) < parameter.shape[pieces[0].axis if pieces else 0]:
                parameter.zero_()
            for piece in pieces:
                value = files.read(piece.hf_name, piece.axis, piece.start, piece.start + piece.length)
                parameter.narrow(piece.axis, piece.at, piece.length).copy_(value)


def hf_tensors(chunks: Sequence[nn.Module], config: DecoderConfig, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of everything that this pipeline stage holds, in the parameters' dtype, on their device.

    A collective over the tensor-parallel group: all its ranks must run the iterator to the end; all of them get the
    tensors. A tied head is yielded once, as the embedding of the first stage. Tensors are new memory.
    """
    import torch

    from rl360.models.weight_files import expected_tensors

    _, size, group = _tensor_group(layout)
    shapes = expected_tensors(config)
    for name, parameter in named_parameters(chunks):
        if name == HEAD and config.tie_word_embeddings:
            continue
        _check_shape(name, parameter, config, size)
        shares = _gather(parameter.detach(), 1 if is_replicated(name) else size, group)
        whole: dict[str, Tensor] = {}
        for rank, share in enumerate(shares):
            for piece in parts(name, config, rank, len(shares)):
                if piece.hf_name not in whole:
                    whole[piece.hf_name] = torch.empty(shapes[piece.hf_name], dtype=share.dtype, device=share.device)
                target = whole[piece.hf_name].narrow(piece.axis, piece.start, piece.length)
                target.copy_(share.narrow(piece.axis, piece.at, piece.length))
        del shares
        yield from whole.items()


def hf_names(chunks: Sequence[nn.Module], config: DecoderConfig, layout: Layout) -> Iterator[str]:
    """Names of what `hf_tensors` yields. No collective, and no value is read: one rank of the stage knows them."""
    for name, _ in named_parameters(chunks):
        if name == HEAD and config.tie_word_embeddings:
            continue
        size = 1 if is_replicated(name) else layout.tensor
        yield from dict.fromkeys(p.hf_name for rank in range(size) for p in parts(name, config, rank, size))


def _gather(share: Tensor, size: int, group: ProcessGroup | None) -> list[Tensor]:
    import torch

    if size == 1:
        return [share]
    shares = [torch.empty_like(share) for _ in range(size)]
    torch.distributed.all_gather(shares, share.contiguous(), group=group)
    return shares


def _tensor_group(layout: Layout) -> tuple[int, int, ProcessGroup | None]:
    """(rank, size, group) of tensor parallelism; without it no process group is needed."""
    if layout.tensor == 1:
        return 0, 1, None
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    return group.rank(), group.size(), group


def _check_shape(name: str, parameter: Tensor, config: DecoderConfig, tensor_size: int) -> None:
    expected = parameter_shape(name, config, tensor_size)
    if tuple(parameter.shape) != expected:
        raise CheckpointError(
            f"{name}: the model has shape {list(parameter.shape)}, the config gives {list(expected)} at "
            f"tensor-parallel size {tensor_size}"
        )
