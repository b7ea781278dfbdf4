"""`rl360 model tiny`: a tiny random model of each family as a complete Hugging Face folder, made without the internet.

In: a family, a folder, a seed, and the widths where the defaults do not do. Out: config.json, model.safetensors,
tokenizer.json, tokenizer_config.json and a chat template in the family's dialect; the same numbers give the same bytes.
For tests and for trying a whole path out: the policy writes noise. Made with numpy and tokenizers in about 20 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl360.errors import ConfigError
from rl360.models.architecture import DecoderConfig
from rl360.models.fetch import folder_lock, staging_folder
from rl360.models.prepare import write_configuration
from rl360.models.weight_files import expected_tensors

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

# Words that become one token, so that token ids and characters do not run in step.
_WORDS = ("Ġreturn", "Ġthe", "Ġa", "def", "python", "```", "Ġfunction", "user", "assistant", "system", "Ġcode", "ing")
_TEMPLATES = Path(__file__).with_name("tiny_templates")
# A wide last norm makes logits that differ clearly; the embeddings' own scale is that of every matrix.
LAST_NORM_SCALE = 4.0
NORM_SPREAD = 0.1


@dataclass(frozen=True, slots=True)
class Family:
    """What makes a tiny model one of its family: its tokens, its config.json keys, its defaults."""

    architecture: str
    special_tokens: tuple[str, ...]  # the first ids, in this order
    bos: str
    eos: tuple[str, ...]  # any of them ends a turn; the first is the tokenizer's
    pad: str | None
    unk: str | None
    markup: tuple[str, ...] = ()  # tags that are one token but no special one: they stay in decoded text
    defaults: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # config.json keys of this family alone


_CHATML = {
    "special_tokens": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "eos": ("<|im_end|>",),
    "unk": "<|endoftext|>",
}
_K2_TAGS = ["think", "think_fast", "think_faster", "tool_calls", "tool_call", "arg_key", "arg_type", "arg_value"]
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        **_CHATML,  # type: ignore[arg-type]
        bos="<|im_start|>",
        pad="<|im_end|>",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e4, "tied": True},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        **_CHATML,  # type: ignore[arg-type]
        bos="<|endoftext|>",
        pad="<|endoftext|>",
        markup=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        # Heads wider than hidden / heads, as several Qwen 3 models have them.
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tied": False, "head_dim": 16},
        extra={"sliding_window": None, "use_sliding_window": False},
    ),
    "k2_horizon": Family(
        "K2HorizonForCausalLM",
        special_tokens=("<|ifm|begin_of_text|>", "<|ifm|endoftext|>", "<|ifm|im_start|>", "<|ifm|im_end|>"),
        bos="<|ifm|begin_of_text|>",
        eos=("<|ifm|endoftext|>", "<|ifm|im_end|>"),
        pad=None,
        unk=None,
        markup=tuple(f"<{slash}ifm|{name}>" for name in _K2_TAGS for slash in ("", "/")),
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 1e7, "tied": False},
        extra={"layernorm_num_groups": 4, "num_experts": 0, "query_key_norm": False},
    ),
}


def write_tiny(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    hidden: int = 48,
    layers: int = 2,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 96,
    tied: bool | None = None,
    max_positions: int = 2048,
    weights: bool = True,
) -> Path:
    """Write the checkpoint and return its folder. None: the family's own. weights=False: for random_init models.

    The embeddings are small beside what the layers add, so that a tied head does not just repeat the last token.
    Raises `ConfigError` for a family or numbers that do not exist, before anything is written.
    """
    if family not in FAMILIES:
        raise ConfigError(f"family: {family!r}; expected one of {', '.join(FAMILIES)}")
    kind = FAMILIES[family]
    numbers = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 1 if head_dim is None else head_dim,
        "ffn": ffn,
        "max_positions": max_positions,
    }
    problems = [f"{name}: {number}; expected at least 1" for name, number in numbers.items() if number < 1]
    if seed < 0:
        problems.append(f"seed: {seed}; expected 0 or more")
    if problems:
        raise ConfigError(problems)
    tokenizer = _tokenizer(kind)
    ids = dict(tokenizer.get_vocab(with_added_tokens=True))
    head_dim = head_dim or kind.defaults.get("head_dim") or hidden // heads
    theta = kind.defaults["rope_theta"]
    config: dict[str, Any] = {
        "architectures": [kind.architecture],
        "attention_bias": False,
        "bos_token_id": ids[kind.bos],
        "dtype": "float32",
        "eos_token_id": ids[kind.eos[0]],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": max_positions,
        "mlp_bias": False,
        "model_type": family,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "pad_token_id": None if kind.pad is None else ids[kind.pad],
        "rms_norm_eps": kind.defaults["rms_norm_eps"],
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "tie_word_embeddings": kind.defaults["tied"] if tied is None else tied,
        "vocab_size": len(ids),
        **kind.extra,
    }
    if family == "k2_horizon":
        config |= {"mlp_only_layers": list(range(layers)), "rope_head_dim": head_dim}
    decoder = DecoderConfig.from_hf(config, "tiny model")
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, family, kind, tokenizer, max_positions)
    if family == "k2_horizon":
        config |= write_configuration(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = [ids[token] for token in kind.eos]
    generation = {
        "bos_token_id": ids[kind.bos],
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": config["pad_token_id"],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
    if weights:
        _write_weights(folder, decoder, seed)
    return folder


def _write_weights(folder: Path, config: DecoderConfig, seed: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    generator = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return (1.0 + NORM_SPREAD * generator.standard_normal(shape)).astype(np.float32)
        # Variance 1 / fan-in keeps activations near 1, so that every layer matters in a comparison.
        return (generator.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)

    shapes = expected_tensors(config)
    # Drawn in this order since the first tiny model: tests compare with what its weights say.
    first = ["model.embed_tokens.weight", "model.norm.weight"]
    tensors = {name: draw(shapes[name]) for name in (*first, *(name for name in shapes if name not in first))}
    tensors["model.norm.weight"] *= LAST_NORM_SCALE
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer(kind: Family) -> Tokenizer:
    """Byte-level BPE: the special tokens, the 256 bytes, a few words, the markup."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = kind.special_tokens
    vocab = {token: i for i, token in enumerate((*special, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
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
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in kind.markup])
    return tokenizer


def _write_tokenizer(folder: Path, family: str, kind: Family, tokenizer: Tokenizer, max_positions: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (_TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8").rstrip("\n")
    (folder / "chat_template.jinja").write_text(template)
    tokenizer_config = {
        "bos_token": kind.bos,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": kind.eos[0],
        "model_max_length": max_positions,
        "pad_token": kind.pad,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": kind.unk,
    }
    named = {key: value for key, value in tokenizer_config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """`rl360 model tiny`: write a tiny random model of a family."""
    from rl360.config.resolvers import models_folder

    parser = argparse.ArgumentParser(prog="rl360 model tiny", description=__doc__.split("\n\n")[0])
    parser.add_argument("--family", choices=FAMILIES, default="llama", help="default: llama")
    parser.add_argument("--out", type=Path, help="folder to make; default: <models>/tiny_<family>")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    for name, text in (
        ("hidden", "width of the hidden states"),
        ("layers", "number of layers"),
        ("heads", "query heads"),
        ("kv-heads", "key/value heads"),
        ("head-dim", "width of a head; default: the family's"),
        ("ffn", "width of the feed-forward part"),
        ("max-positions", "longest context"),
    ):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--force", action="store_true", help="replace the folder if it is there")
    parsed = parser.parse_args(arguments)
    folder = parsed.out or Path(models_folder()) / f"tiny_{parsed.family}"
    if os.path.lexists(folder):
        if not parsed.force:
            raise ConfigError(f"--out: {folder} is there already; expected a new folder, or --force to replace it")
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--out: {folder} holds no model; expected one to replace, or a new folder")
    names = ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_positions")
    numbers = {name: value for name in names if (value := getattr(parsed, name)) is not None}
    place = folder.resolve()  # a link is followed
    place.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock(place), staging_folder(place) as staging:
        write_tiny(staging, parsed.family, seed=parsed.seed, **numbers)
        if place.exists():  # only now: numbers that make no model must not cost the one that is there
            shutil.rmtree(place)
        staging.rename(place)
    path = shlex.quote(f"model.path={folder}")
    print(f"{folder}: a tiny random {parsed.family}; try: rl360 check model=tiny_{parsed.family} {path}")
    return 0
