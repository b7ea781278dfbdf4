"""From a llama GGUF file to an ordinary Hugging Face checkpoint folder.

In: a GGUF of the llama architecture with a byte-level BPE tokenizer, quantised or not. Out: config.json,
generation_config.json, model.safetensors (float32), tokenizer.json, tokenizer_config.json and chat_template.jinja, as
transformers and older readers expect them. Deterministic: the same file gives the same bytes. Fetching the file, the
atomic folder and the check of the digests are left to rl360.models.fetch. torch is not needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rl360.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

WEIGHTS_FILE = "model.safetensors"

# GGUF names of one block, by their names in an HF Llama checkpoint.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# Token types of the GGUF format: 3 is "control", never produced by plain text.
_CONTROL_TOKEN = 3
# The only value of tokenizer.ggml.pre that this converter knows how to rebuild: single digits, then byte level.
_SMOLLM_PRE_TOKENIZER = "smollm"


def hf_name(gguf_name: str) -> str:
    """The HF name of a GGUF tensor. Raises `CheckpointError` for one that a Llama checkpoint does not have."""
    stem, _, suffix = gguf_name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        if part in _BLOCK_NAMES:
            return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{suffix}"
    elif stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    raise CheckpointError(f"{gguf_name}: not a tensor of a llama GGUF that can be converted")


def undo_rope_interleave(weight_OI: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of a q or k projection [out, in] from GGUF's order (rotary pairs side by side) to HF's (halves).

    Within a head of D rows, GGUF row 2i + j is HF row j * D/2 + i.
    """
    out_features, in_features = weight_OI.shape
    half = out_features // num_heads // 2
    return weight_OI.reshape(num_heads, half, 2, in_features).swapaxes(1, 2).reshape(out_features, in_features)


def convert(gguf_path: Path, folder: Path) -> None:
    """Write the checkpoint into an existing empty folder. Raises `CheckpointError` if the file is of another kind."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(str(gguf_path))
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{gguf_path.name}: architecture {architecture!r}; expected 'llama'")
    tensors = dict(_tensors(reader))
    _write_json(folder / "config.json", _config(reader, tied="lm_head.weight" not in tensors))
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **_special_ids(reader)})
    _write_tokenizer(reader, folder)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)  # safetensors makes it readable by its owner only


def weights_digest(folder: Path) -> str:
    """sha256 over (name, dtype, shape, bytes) of all tensors in name order: independent of the file's layout."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(folder / WEIGHTS_FILE, framework="numpy") as weights:
        for name in sorted(weights.keys()):
            tensor = np.ascontiguousarray(weights.get_tensor(name))
            digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
            digest.update(tensor.data)
    return digest.hexdigest()


def _tensors(reader: GGUFReader) -> Iterator[tuple[str, NDArray[np.float32]]]:
    from gguf.quants import dequantize

    num_heads = {
        "self_attn.q_proj": int(_value(reader, "llama.attention.head_count")),
        "self_attn.k_proj": int(_value(reader, "llama.attention.head_count_kv")),
    }
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        for projection, heads in num_heads.items():
            if f".{projection}." in name:
                weight = undo_rope_interleave(weight, heads)
        yield name, np.ascontiguousarray(weight)


def _config(reader: GGUFReader, *, tied: bool) -> dict[str, Any]:
    hidden = int(_value(reader, "llama.embedding_length"))
    heads = int(_value(reader, "llama.attention.head_count"))
    # The file keeps floats in 32 bits: the shortest decimal of 9.999999747e-06 is the 1e-05 that was meant.
    theta = float(str(np.float32(_value(reader, "llama.rope.freq_base"))))
    epsilon = float(str(np.float32(_value(reader, "llama.attention.layer_norm_rms_epsilon"))))
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_special_ids(reader),
        "dtype": "float32",
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": int(_value(reader, "llama.feed_forward_length")),
        "max_position_embeddings": int(_value(reader, "llama.context_length")),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(_value(reader, "llama.block_count")),
        "num_key_value_heads": int(_value(reader, "llama.attention.head_count_kv")),
        "rms_norm_eps": epsilon,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        # Transformers 4 and other readers know only the top-level key.
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": len(_value(reader, "tokenizer.ggml.tokens")),
    }


def _special_ids(reader: GGUFReader) -> dict[str, int]:
    return {
        "bos_token_id": int(_value(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_value(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_value(reader, "tokenizer.ggml.padding_token_id")),
    }


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """tokenizer.json and its config. Built here because transformers' own reading of a GGUF tokenizer takes the bos
    id for eos, sets no pad, and leaves out the split of digits into single characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pre = _value(reader, "tokenizer.ggml.pre")
    if pre != _SMOLLM_PRE_TOKENIZER:
        raise CheckpointError(f"tokenizer.ggml.pre is {pre!r}; only {_SMOLLM_PRE_TOKENIZER!r} can be converted")
    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    types: list[int] = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    unknown = tokens[int(_value(reader, "tokenizer.ggml.unknown_token_id"))]
    ids = _special_ids(reader)
    bos, eos, pad = (tokens[ids[key]] for key in ("bos_token_id", "eos_token_id", "pad_token_id"))

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))

    template = str(_value(reader, "tokenizer.chat_template"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(i): {
                    "content": token,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
                if kind == _CONTROL_TOKEN
            },
            "additional_special_tokens": sorted({bos, eos}),
            "bos_token": bos,
            "chat_template": template,
            "clean_up_tokenization_spaces": False,
            "eos_token": eos,
            "model_max_length": int(_value(reader, "llama.context_length")),
            "pad_token": pad,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": unknown,
        },
    )


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise CheckpointError(f"the GGUF file has no {key}")
    return field.contents()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
