"""Checkpoints in and out: a Hugging Face folder to a `Decoder`, and a `Decoder` back to a folder.

In: a folder with config.json and *.safetensors (one file, or shards with an index), or only config.json and a seed.
Out: a filled `Decoder`, or a folder that transformers and SGLang load. Optimizer state and versions are left to the
trainer; fetching a model is left to rl360.models.fetch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl360.errors import CheckpointError, ConfigError
from rl360.models.decoder import Decoder, DecoderConfig
from rl360.models.hf_folder import replacing_folder
from rl360.models.random_weights import drawn
from rl360.models.weight_files import HEAD, WEIGHTS_FILE, locate_tensors, refuse_another_head

CONFIG_FILE = "config.json"
# Everything beside the weights that a reader of the folder needs; copied as it is when present.
COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "configuration_k2_horizon.py",
)


def read_config(folder: Path) -> DecoderConfig:
    """The architecture of an HF folder. Raises `ConfigError` when config.json is missing, unreadable or unsupported."""
    path = Path(folder) / CONFIG_FILE
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; expected a Hugging Face model folder (rl360 model fetch)") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a model folder's") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    return DecoderConfig.from_hf(raw, str(path))


def load_decoder(
    folder: Path | str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    random_init_seed: int | None = None,
) -> Decoder:
    """A `Decoder` from an HF folder, weights converted to `dtype`.

    With `random_init_seed` the folder needs no weights: every matrix is normal(0, initializer_range), every norm is 1,
    and the same seed gives the same weights on every machine; of a large model a GPU draws others than a CPU does
    (rl360.models.random_weights). Raises `ConfigError` for a bad config and
    `CheckpointError`, naming the first tensor and its file, when the weights do not fit it.
    """
    folder = Path(folder)
    decoder = _allocate(read_config(folder), torch.device(device), dtype)
    if random_init_seed is None:
        load_weights(decoder, folder)
    else:
        _fill_random(decoder, random_init_seed)
        if decoder.device.type == "cuda":
            torch.cuda.empty_cache()  # where whole matrices were drawn
    return decoder


def _allocate(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    # Built where it will live, so that no second copy exists even for a moment.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Decoder(config)
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def _fill_random(decoder: Decoder, seed: int) -> None:
    parameters = dict(decoder.named_parameters())
    for name in [name for name in parameters if name.endswith("norm.weight")]:
        parameters.pop(name).fill_(1.0)
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    for name, whole in drawn(shapes, decoder.config.initializer_range, seed, decoder.device):
        parameters[name].copy_(whole)


@torch.no_grad()
def load_weights(decoder: Decoder, folder: Path | str) -> None:
    """Copy a checkpoint's tensors into an existing decoder, in place: whoever shares it sees the new weights.

    Names and shapes of all files are compared before the first value is copied, so a misfit leaves the decoder as it
    was. Raises `CheckpointError` naming the first misfit and its file.
    """
    folder = Path(folder)
    parameters = dict(decoder.named_parameters())
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    located = locate_tensors(folder, expected, decoder.config.tie_word_embeddings, decoder.config.model_type)
    refuse_another_head(folder, decoder.config.tie_word_embeddings)
    for file in sorted(set(located.values())):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                if located.get(name) == file:
                    parameters[name].copy_(tensors.get_tensor(name))


@torch.no_grad()
def copy_tensors(decoder: Decoder, named: Sequence[tuple[str, Tensor]]) -> None:
    """Copy some tensors under their checkpoint's names into a decoder, in place; a tied head is skipped.

    Raises `CheckpointError` for a name or a shape that the decoder has not, before anything is copied.
    """
    parameters = dict(decoder.named_parameters())
    tied = decoder.config.tie_word_embeddings
    wanted = [(name, tensor) for name, tensor in named if not (tied and name == HEAD)]
    for name, tensor in wanted:
        if name not in parameters:
            raise CheckpointError(f"tensor {name} is not in this decoder")
        if tensor.shape != parameters[name].shape:
            expected = list(parameters[name].shape)
            raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, the decoder's is {expected}")
    for name, tensor in wanted:
        parameters[name].copy_(tensor)


def save_hf(decoder: Decoder, folder: Path | str, source: Path | str) -> Path:
    """Write the weights as an HF folder that transformers loads, whole or not at all.

    config.json, generation config and tokenizer files come from `source` (the folder that the decoder was loaded from);
    only torch_dtype follows the decoder's dtype. The folder is written beside its place and renamed; an existing one is
    replaced. Returns `folder`.
    """
    folder, source = Path(folder), Path(source)
    with replacing_folder(folder) as staging:
        copy_companions(source, staging, decoder.dtype)
        save_file(_checkpoint_tensors(decoder), str(staging / WEIGHTS_FILE), metadata={"format": "pt"})
    return folder


def _checkpoint_tensors(decoder: Decoder) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def copy_companions(source: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """What a reader of `folder` needs beside the weights, from `source`: config.json, tokenizer, and what those name.

    With `dtype`, config.json says that one, under whichever of its names it has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = json.loads((source / CONFIG_FILE).read_text())
    if dtype is not None:
        for key in [name for name in ("dtype", "torch_dtype") if name in raw] or ["torch_dtype"]:
            raw[key] = str(dtype).removeprefix("torch.")
    (folder / CONFIG_FILE).write_text(json.dumps(raw, indent=2) + "\n")
    named = raw.get("auto_map")
    modules = {f"{str(name).partition('.')[0]}.py" for name in named.values()} if isinstance(named, dict) else set()
    for name in (*COMPANION_FILES, *sorted(modules)):
        if Path(name).name == name and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
