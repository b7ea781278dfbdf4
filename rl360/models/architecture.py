"""The numbers of one architecture, read from a Hugging Face config.json. Needs no torch: `rl360 check` uses it.

In: a parsed config.json. Out: `DecoderConfig`, or everything that makes this no model of ours. Tensors are left to
rl360.models.weight_files, arithmetic to rl360.models.decoder.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rl360.errors import ConfigError

# Architectures whose tensors and arithmetic are reproduced here; anything else is refused, not guessed.
SUPPORTED_MODEL_TYPES = ("llama", "qwen3", "k2_horizon")
DEFAULT_ROPE_THETA = 10000.0  # transformers' own, for a Llama that says nothing
ROPE_KEYS = ("rope_parameters", "rope_scaling")  # transformers 5's and 4's; a folder may have both
PARTLY_ROTATED = "partial_rotary_factor"  # the share of a head's values that is rotated; some Llamas have it
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
WHOLE_NUMBERS = (
    *SIZES,
    "num_key_value_heads",
    "head_dim",
    "rope_head_dim",
    "layernorm_num_groups",
    "max_position_embeddings",
)
# Of each tensor of each layer there is a name to be made: far more layers than any model has would fill the memory.
MOST_LAYERS, MOST = 10_000, 2**31 - 1
NUMBERS = ("rope_theta", "rms_norm_eps", "initializer_range")
SWITCHES = ("tie_word_embeddings",)  # true or false; as text, "false" would be true
# A Llama's own, where config.json says nothing or null.
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "initializer_range": 0.02}
# Switches of these families that change the arithmetic, and are computed nowhere here.
REFUSED_WHEN_SET = {
    "attention_bias": "projections have no bias here",
    "mlp_bias": "projections have no bias here",
    "use_sliding_window": "attention sees the whole sequence here",
    "num_experts": "the feed-forward part is dense here",
    "num_shared_experts": "the feed-forward part is dense here",
    "mova_num_experts": "values have no experts here",
    "query_key_norm": "only qwen3 has norms on q and k here",
    "attention_gate_func": "attention has no output gate here",
}


# What says which weight is where: heads can be cut otherwise, and a vocabulary be shorter, with every shape in place.
DECIDE_WEIGHTS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "norm_groups",
    "tie_word_embeddings",
)
# And what is computed with them. The rest of a config, such as the longest context, may change under a run.
DECIDE_NUMBERS = (*DECIDE_WEIGHTS, "qk_norm", "rms_norm_eps", "rope_theta")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The numbers of one architecture, from a Hugging Face config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tie_word_embeddings: bool
    qk_norm: bool = False  # Qwen3: RMSNorm over each head of q and k
    norm_groups: int = 1  # K2 Horizon: the hidden values are normalised in this many contiguous groups
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
        """Read a parsed config.json. Raises `ConfigError` naming everything that this decoder cannot compute."""
        if problems := malformed(raw, where):
            raise ConfigError(problems)
        problems = sizes_missing(raw, where)
        if problems:
            raise ConfigError(problems)

        model_type = raw["model_type"]
        if model_type not in SUPPORTED_MODEL_TYPES:
            problems.append(f"{where}: model_type {model_type!r}; expected one of {', '.join(SUPPORTED_MODEL_TYPES)}")
        ropes = [raw.get(key) or {} for key in ROPE_KEYS]
        for rope_type in dict.fromkeys(rope.get("rope_type", rope.get("type", "default")) for rope in ropes):
            if rope_type != "default":
                problems.append(f"{where}: rope type {rope_type!r}; only 'default' (unscaled) is computed here")
        shares = (json.dumps(place.get(PARTLY_ROTATED)) for place in (raw, *ropes))
        problems += [
            f"{where}: {PARTLY_ROTATED} {share}; whole heads are rotated here"
            for share in dict.fromkeys(shares)
            if share not in ("null", "1", "1.0")
        ]
        if len(thetas := rope_thetas(raw)) > 1:
            problems.append(f"{where}: rope_theta is {thetas[0]:g}, rope_parameters say {thetas[1]:g}; expected one")
        if model_type == "k2_horizon" and not thetas:
            problems.append(f"{where}: no rope_theta; K2 Horizon's is 1e7, and nothing else would do")
        if model_type == "k2_horizon" and not raw.get("layernorm_num_groups"):
            problems.append(f"{where}: no layernorm_num_groups; a K2 Horizon says them, and the 7B has 4")
        numbers: dict[str, Any] = {
            key: raw[key] if raw.get(key) is not None else default for key, default in DEFAULTS.items()
        }
        problems += [
            f"{where}: {key} is {json.dumps(numbers[key])}; expected more than 0"
            for key in ("rms_norm_eps", "max_position_embeddings")
            if numbers[key] <= 0
        ]
        if numbers["initializer_range"] < 0:
            problems.append(f"{where}: initializer_range is {numbers['initializer_range']:g}; expected 0 or more")
        problems += [
            f"{where}: {key} is {json.dumps(raw[key])}; {why}"
            for key, why in REFUSED_WHEN_SET.items()
            if raw.get(key) and raw[key] != "none"
        ]
        problems += [
            f"{where}: {key} is {json.dumps(value)}; nothing is multiplied here"
            for key, value in raw.items()
            if key.endswith("_multiplier") and value not in (None, 1)
        ]
        if raw.get("hidden_act", "silu") != "silu":
            problems.append(f"{where}: hidden_act {raw['hidden_act']!r}; expected 'silu'")
        num_heads = raw["num_attention_heads"]
        num_kv_heads = raw.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            problems.append(f"{where}: {num_heads} heads do not divide into {num_kv_heads} key/value heads")
        norm_groups = raw.get("layernorm_num_groups") or 1
        if raw["hidden_size"] % norm_groups:
            problems.append(f"{where}: hidden_size {raw['hidden_size']} does not divide into {norm_groups} norm groups")
        head_dim = raw.get("head_dim") or raw["hidden_size"] // num_heads
        if head_dim < 2 or head_dim % 2:
            problems.append(
                f"{where}: heads of {head_dim} values; they are rotated in pairs, so expected an even number"
            )
        if (rotated := raw.get("rope_head_dim") or head_dim) != head_dim:
            problems.append(f"{where}: rope_head_dim {rotated} of head_dim {head_dim}; whole heads are rotated here")
        if problems:
            raise ConfigError(problems)

        eos = raw.get("eos_token_id")
        return cls(
            model_type=model_type,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=numbers["rms_norm_eps"],
            rope_theta=thetas[0] if thetas else DEFAULT_ROPE_THETA,
            max_positions=numbers["max_position_embeddings"],
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=model_type == "qwen3",
            norm_groups=norm_groups,
            initializer_range=numbers["initializer_range"],
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )


def identity(config: DecoderConfig) -> dict[str, Any]:
    """What a checkpoint says of the model that it was written for: plain values, by `DECIDE_NUMBERS`."""
    return {name: getattr(config, name) for name in DECIDE_NUMBERS}


def another_model(config: DecoderConfig, saved: Mapping[str, Any], names: Sequence[str] = DECIDE_NUMBERS) -> str | None:
    """The first of `names` that is not what `identity` said of a checkpoint's model; None when there is none."""
    for name in names:
        if name in saved and (found := getattr(config, name)) != saved[name]:
            return f"{name} is {found}; these weights were written for {saved[name]}"
    return None


def sizes_missing(raw: Mapping[str, Any], where: str, only: Collection[str] | None = None) -> list[str]:
    """The keys without which there is no model, absent, null or 0. only: keys that are looked at; None: all of them."""
    return [
        f"{where}: {key} is missing; a Llama-like config.json has it"
        for key in ("model_type", *SIZES)
        if not raw.get(key) and (only is None or key in only)
    ]


def malformed(raw: object, where: str) -> list[str]:
    """What of a parsed config.json is not even of its kind, so that nothing can be computed from it. Null is absent."""
    if not isinstance(raw, Mapping):
        return [f"{where}: a {type(raw).__name__}; expected a JSON object"]
    problems = [
        f"{where}: {key} is {json.dumps(raw[key])}; expected a whole number, 0 or more"
        for key in WHOLE_NUMBERS
        if raw.get(key) is not None and not (type(raw[key]) is int and raw[key] >= 0)
    ]
    problems += [
        f"{where}: {key} is {raw[key]:,}; expected at most {most:,}"
        for key in WHOLE_NUMBERS
        for most in [MOST_LAYERS if key == "num_hidden_layers" else MOST]
        if type(raw.get(key)) is int and raw[key] > most
    ]
    places = [(where, raw)]
    for key in ROPE_KEYS:
        if isinstance(raw.get(key), Mapping):
            places.append((f"{where}: {key}", raw[key]))
        elif raw.get(key) is not None:
            problems.append(f"{where}: {key} is {json.dumps(raw[key])}; expected an object")
    problems += [
        f"{place}: {key} is {json.dumps(values[key])}; expected a number"
        for place, values in places
        for key in NUMBERS
        if values.get(key) is not None and not (type(values[key]) in (int, float) and isfinite(values[key]))
    ]
    problems += [
        f"{where}: {key} is {json.dumps(raw[key])}; expected true or false"
        for key in SWITCHES
        if raw.get(key) is not None and type(raw[key]) is not bool
    ]
    return problems


def rope_thetas(raw: Mapping[str, Any]) -> list[float]:
    """The different values that a config.json gives for the rotary base: older files at the top, newer ones inside."""
    inside = [raw.get(key) or {} for key in ROPE_KEYS]
    found = [float(place["rope_theta"]) for place in (raw, *inside) if place.get("rope_theta")]
    return list(dict.fromkeys(found))
