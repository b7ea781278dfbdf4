"""What the processes of test_convert.py do: load a converted folder into real Megatron models; convert together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed

from rl360.models.hf_folder import Ranks
from rl360.models.loading import read_config
from rl360.models.megatron import convert
from rl360.models.megatron.hf_weights import load_hf
from rl360.models.megatron.layout import Layout
from tests.trainers.megatron.shim import install


def start(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def load_release(rank: int, size: int, store: str, folder: str, hf: str, tensor: int, pipeline: int) -> None:
    """Megatron's own `dist_checkpointing.load` of release/ gives what `load_hf` reads from the HF folder."""
    from megatron.core import dist_checkpointing, parallel_state

    from rl360.models.megatron.model import build_model
    from rl360.models.megatron.parallel import start_parallel

    start(rank, size, store)
    install()  # for the model, which moves tied embeddings to a GPU; converters do without
    config, layout = read_config(Path(hf)), Layout(tensor=tensor, pipeline=pipeline)
    start_parallel(layout)
    chunks = [build_model(config, layout, params_dtype=torch.float32)[0] for _ in range(2)]
    loaded, expected = chunks
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.fill_(torch.nan)
    load_hf([expected], config, layout, hf)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    wanted: Any = loaded
    state = dist_checkpointing.load(wanted.sharded_state_dict(metadata=metadata), folder)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) > 5
    missing, unexpected = loaded.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert all(name.endswith("_extra_state") for name in missing), missing
    for (name, got), (_, want) in zip(loaded.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(got, want), name
    distributed.destroy_process_group()


def load_stock(rank: int, size: int, store: str, folder: str, hf: str) -> None:
    """Megatron's stock layers, whose norms have the names of Transformer Engine's fused ones, load it too."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from rl360.models.megatron.model import transformer_config
    from rl360.models.megatron.parallel import start_parallel

    start(rank, size, store)
    config, layout = read_config(Path(hf)), Layout()
    start_parallel(layout)
    megatron = transformer_config(config, layout, torch.float32, torch.device("cpu"))
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
    model = GPTModel(
        megatron,
        spec,
        vocab_size=256,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = dist_checkpointing.load(model.sharded_state_dict(metadata=metadata), folder)
    missing, unexpected = model.load_state_dict(
        {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}, strict=False
    )
    assert not unexpected
    assert all(name.endswith("_extra_state") for name in missing), missing
    with torch.no_grad():
        for parameter in model.parameters():
            assert bool(torch.isfinite(parameter).all())
        got = model.state_dict()
        load_hf([model], config, layout, hf)
        for name, value in model.state_dict().items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(got[name], value), name
    distributed.destroy_process_group()


def convert_together(rank: int, size: int, store: str, hf: str, out: str) -> None:
    start(rank, size, store)
    ranks = Ranks(distributed.group.WORLD)
    convert.to_megatron(hf, f"{out}/megatron", ranks)
    convert.to_hf(f"{out}/megatron", f"{out}/back", ranks=ranks, max_shard_bytes=20_000)
    distributed.destroy_process_group()
