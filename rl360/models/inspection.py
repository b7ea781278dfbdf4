"""Does a checkpoint folder hold the model that was chosen? Answered from config.json and the files' headers, no torch.

In: a folder, and what the chosen model's YAML says (`model.expect`). Out: problems, each with
its file; of the tensors only the first, since one wrong width shows in all of them. Whether the files are whole is left
to rl360.models.fetch, loading to rl360.models.loading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from rl360.errors import CheckpointError, ConfigError
from rl360.models.architecture import DecoderConfig, malformed, rope_thetas
from rl360.models.weight_files import expected_tensors, locate_tensors

CONFIG_FILE = "config.json"
NUM_PARAMETERS = "num_parameters"  # the one expectation that no key of config.json states


def read_raw_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json. Raises `ConfigError` when it is missing, not a JSON object, or has text for numbers."""
    path = folder / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; expected a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    if problems := malformed(raw, str(path)):
        raise ConfigError(problems)
    return dict(raw)


def config_differences(raw: Mapping[str, Any], expect: Mapping[str, Any], where: str) -> list[str]:
    """What config.json says otherwise than `expect`, key by key. Numbers compare as numbers, absent keys as null."""
    problems = []
    for key, wanted in expect.items():
        if key == NUM_PARAMETERS:
            continue
        found = raw.get(key)
        if key == "rope_theta":
            found = next(iter(rope_thetas(raw)), None)
        if key == "head_dim" and found is None and raw.get("hidden_size") and raw.get("num_attention_heads"):
            found = raw["hidden_size"] // raw["num_attention_heads"]
        if found != wanted:
            problems.append(f"{where}: {key} is {json.dumps(found)}; expected {json.dumps(wanted)}")
    return problems


def num_parameters(config: DecoderConfig) -> int:
    """Every value of every tensor; a tied head counts once."""
    return sum(prod(shape) for shape in expected_tensors(config).values())


def checkpoint_differences(
    folder: Path | str,
    expect: Mapping[str, Any] | None = None,
    weights: bool = True,
) -> list[str]:
    """Why this folder is not the chosen model; empty when it is.

    First config.json against `expect`, then against what RL360 can compute, then the tensors' names and shapes against
    config.json (unless `weights` is false), and the number of parameters. Later questions are asked only when the
    earlier ones have good answers: a tensor of the wrong width is no news after a wrong config.
    """
    folder = Path(folder)
    where = str(folder / CONFIG_FILE)
    try:
        raw = read_raw_config(folder)
        if problems := config_differences(raw, expect or {}, where):
            return problems
        config = DecoderConfig.from_hf(raw, where)
    except ConfigError as error:
        return error.problems
    found, wanted = num_parameters(config), (expect or {}).get(NUM_PARAMETERS)
    if wanted is not None and found != wanted:
        return [f"{where}: gives a model of {found:,} parameters; expected {wanted:,}"]
    if weights:
        try:
            locate_tensors(folder, expected_tensors(config), config.tie_word_embeddings, config.model_type)
        except CheckpointError as error:
            return [str(error)]
    return []
