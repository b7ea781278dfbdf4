"""What SGLang 0.5.16 itself holds on each tensor-parallel rank, as hashes: `recordings/sglang-0.5.16-slices.json`.

    python -m tests.weight_sync.record_slices        where sglang is importable; a CPU is enough

In: tiny configs, and weights that are a formula of their names. SGLang's own models are built as each rank of each
size builds them, its own loaders fill them, and its own weight checker hashes them (SHA-256: the CPU's kind). Out: the
file that test_shards.py compares rl360.weight_sync.shards with. Tests import the configs and the formula from here.
"""

from __future__ import annotations

import json
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rl360.models.architecture import DecoderConfig
from rl360.models.weight_files import expected_tensors

RECORDING = Path(__file__).parent / "recordings" / "sglang-0.5.16-slices.json"
COMMON = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
# 2 key/value heads of 8: replicated on 4 and 8 ranks. Vocabularies that are filled up: the llama's on the last rank
# only, the qwen3's so far that the last ranks of 4 and 8 hold nothing else. The K2 Horizon's needs none.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "vocab_size": 250, "intermediate_size": 48, "num_key_value_heads": 2},
    "qwen3": {
        "model_type": "qwen3",
        "vocab_size": 66,
        "intermediate_size": 56,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "tie_word_embeddings": True,
    },
    "k2_horizon": {
        "model_type": "k2_horizon",
        "vocab_size": 128,
        "intermediate_size": 40,
        "num_key_value_heads": 4,
        "layernorm_num_groups": 4,
    },
}
WAYS = (1, 2, 4, 8)


def raw_config(family: str) -> dict[str, Any]:
    return {"tie_word_embeddings": False, **COMMON, **CONFIGS[family]}


def weights_of(family: str) -> list[tuple[str, Tensor]]:
    """Every tensor of a family's checkpoint, bf16: a formula, so that no generator's version matters."""
    config = DecoderConfig.from_hf(raw_config(family))
    return [(name, formula(name, shape)) for name, shape in expected_tensors(config).items()]


def formula(name: str, shape: tuple[int, ...]) -> Tensor:
    numbers = torch.arange(torch.Size(shape).numel()) * 7919 + zlib.crc32(name.encode())
    return ((numbers % 509 - 254) / 256).to(torch.bfloat16).reshape(shape)


def main() -> None:
    kernels = ModuleType("vllm._custom_ops")  # without CUDA a rotary kernel is imported from there, and not called here
    kernels.rotary_embedding = None  # type: ignore[attr-defined]
    sys.modules.update({"vllm": ModuleType("vllm"), "vllm._custom_ops": kernels})
    found = {
        family: {str(ways): [_rank(family, rank, ways) for rank in range(ways)] for ways in WAYS} for family in CONFIGS
    }
    RECORDING.parent.mkdir(exist_ok=True)
    RECORDING.write_text(json.dumps(found, indent=0) + "\n")
    print(RECORDING, RECORDING.stat().st_size, "bytes")


def _rank(family: str, rank: int, ways: int) -> dict[str, str]:
    """The checker's reply of one rank, after its model has loaded everything."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.utils.weight_checker import WeightChecker
    from transformers import AutoConfig, PretrainedConfig

    if family == "k2_horizon":
        from rl360.models.sglang_external.k2_horizon import EntryClass

        config_class = type("K2HorizonConfig", (PretrainedConfig,), {"model_type": family})
        config = config_class(**raw_config(family), head_dim=4, pad_token_id=None)
    else:
        from sglang.srt.models.llama import LlamaForCausalLM
        from sglang.srt.models.qwen3 import Qwen3ForCausalLM

        EntryClass = LlamaForCausalLM if family == "llama" else Qwen3ForCausalLM
        config = AutoConfig.for_model(**raw_config(family))
    only = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0)
    me = {"tp_size": ways, "tp_rank": rank, "attn_tp_size": ways, "attn_tp_rank": rank}
    alone = ("pp", "attn_dp", "attn_cp", "moe_dp", "moe_ep", "dcp", "attn_dcp")
    me |= {f"{kind}_size": 1 for kind in alone} | {f"{kind}_rank": 0 for kind in alone}
    with ExitStack() as stack:
        stack.enter_context(get_parallel().override(**me))
        for group in ("_PP", "_TP", "_MOE_DP", "_MOE_EP", "_MOE_TP", "_ATTN_TP", "_ATTN_CP"):
            setattr(parallel_state, group, only)
        stack.enter_context(torch.no_grad())
        get_context().set_server_args(_server_args())
        torch.set_default_dtype(torch.bfloat16)
        stack.callback(torch.set_default_dtype, torch.float32)
        model = EntryClass(config)
        for parameter in model.parameters():
            parameter.fill_(77)  # what no loader writes shows
        model.load_weights(weights_of(family))
        synchronize, torch.cuda.synchronize = torch.cuda.synchronize, lambda: None
        stack.callback(setattr, torch.cuda, "synchronize", synchronize)
        place = SimpleNamespace(tp_rank=rank, tp_size=ways, dp_rank=0, attn_dp_size=1, pp_rank=0, pp_size=1)
        reply = WeightChecker(get_model=lambda: model, ps=place).handle("checksum")
    checksums: dict[str, str] = reply["checksums"]
    return checksums


def _server_args() -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(model_path="dummy", device="cpu")


if __name__ == "__main__":
    main()
