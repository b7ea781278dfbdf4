"""A tiny random Llama as a complete Hugging Face folder, for tests that need a model but not a good one.

In: a folder and a seed. Out: config.json, model.safetensors, tokenizer.json, tokenizer_config.json and a ChatML
template; the same seed gives the same bytes. Made with numpy and tokenizers only, in about 20 ms.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2

# Words that become one token, so that token ids and characters do not run in step.
_WORDS = ("Ġreturn", "Ġthe", "Ġa", "def", "python", "```", "Ġfunction", "user", "assistant", "system", "Ġcode", "ing")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 48,
    layers: int = 2,
    heads: int = 6,
    kv_heads: int = 2,
    ffn: int = 96,
    tied: bool = True,
    max_positions: int = 2048,
    weights: bool = True,
) -> Path:
    """Write the checkpoint and return its folder. weights=False leaves the weights out (random_init models).

    The embeddings are small beside what the layers add, so that a tied head does not just repeat the last token, and
    the last norm is wide, so that logits differ clearly.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = _write_tokenizer(folder, max_positions)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": IM_START_ID,
        "dtype": "float32",
        "eos_token_id": IM_END_ID,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": max_positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "pad_token_id": IM_END_ID,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "vocab_size": vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = {"bos_token_id": IM_START_ID, "eos_token_id": IM_END_ID, "pad_token_id": IM_END_ID}
    (folder / "generation_config.json").write_text(json.dumps(ids) + "\n")
    if weights:
        _write_weights(folder, config, seed)
    return folder


def _write_weights(folder: Path, config: dict[str, object], seed: int) -> None:
    from safetensors.numpy import save_file

    generator = np.random.default_rng(seed)
    hidden, ffn, vocab = (int(str(config[k])) for k in ("hidden_size", "intermediate_size", "vocab_size"))
    head_dim = int(str(config["head_dim"]))
    q_out = int(str(config["num_attention_heads"])) * head_dim
    kv_out = int(str(config["num_key_value_heads"])) * head_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        # Variance 1 / fan-in keeps activations near 1, so that every layer matters in a comparison.
        return (generator.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1.0 + 0.1 * generator.standard_normal(hidden)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": norm() * 4.0}
    for layer in range(int(str(config["num_hidden_layers"]))):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": norm(),
            prefix + "self_attn.q_proj.weight": matrix(q_out, hidden),
            prefix + "self_attn.k_proj.weight": matrix(kv_out, hidden),
            prefix + "self_attn.v_proj.weight": matrix(kv_out, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, q_out),
            prefix + "post_attention_layernorm.weight": norm(),
            prefix + "mlp.gate_proj.weight": matrix(ffn, hidden),
            prefix + "mlp.up_proj.weight": matrix(ffn, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, ffn),
        }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path, max_positions: int) -> int:
    """Byte-level BPE: three special tokens, the 256 bytes, and a few words. Returns the vocabulary size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            pair = (word[: end - 1], word[end - 1])
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer_config = {
        "bos_token": SPECIAL_TOKENS[IM_START_ID],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL_TOKENS[IM_END_ID],
        "model_max_length": max_positions,
        "pad_token": SPECIAL_TOKENS[IM_END_ID],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIAL_TOKENS[ENDOFTEXT_ID],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    return len(vocab)
