"""One rank of the count that test_memory.py makes: what the real layers keep for their backward pass, in bytes.

In: cases. Out: of each the bytes of all floating-point storages that autograd saved in one forward pass, parameters
aside, and how Megatron's schedule warms up. The attention is replaced by one that keeps what FlashAttention keeps on
CUDA: q, k, v, its output and the log-sum-exp.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from rl360.models.decoder import DecoderConfig
from rl360.models.megatron import attention
from rl360.models.megatron.layout import Layout
from rl360.models.megatron.model import build_model
from rl360.models.megatron.packed import DeviceSpan, PackedInputs, PackedTensors
from rl360.models.megatron.parallel import start_parallel, stop_parallel


class _KeepsLikeFlash(torch.autograd.Function):
    """Shapes of FlashAttention; the values are of no interest here."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, log_sum_exp = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _flash_like(q: Tensor, k: Tensor, v: Tensor, span: DeviceSpan) -> Tensor:
    return _KeepsLikeFlash.apply(q, k, v)


def saved_bytes(config: DecoderConfig, layout: Layout, num_tokens: int, recompute: str, rank: int) -> int:
    """Bytes of the distinct storages that the forward passes of this rank's chunks save, each of one micro-batch."""
    attention._attend_span = _flash_like
    chunks = build_model(config, layout, params_dtype=torch.bfloat16, recompute=recompute, random_init_seed=0)  # type: ignore[arg-type]
    lengths = [num_tokens // 2, num_tokens - num_tokens // 2]
    positions = np.concatenate([np.arange(length) for length in lengths])
    ids = np.arange(num_tokens) % config.vocab_size
    inputs = PackedInputs.of(ids, positions, lengths, layout.context, layout.place(rank).context)
    found = 0
    for chunk in chunks:
        own = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
        kept: dict[int, Tensor] = {}  # the tensors stay alive, so that no address is used twice

        def pack(x: Tensor, own: set[int] = own, kept: dict[int, Tensor] = kept) -> Tensor:
            address = x.untyped_storage().data_ptr()
            if x.is_floating_point() and address not in own:
                kept.setdefault(address, x)
            return x

        if not chunk.pre_process:
            rows = num_tokens // layout.context // (layout.tensor if layout.sequence_parallel else 1)
            shape = (rows, 1, config.hidden_size)
            chunk.set_input_tensor([torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            hidden = chunk(PackedTensors.of(inputs, torch.device("cpu")))
        found += sum(x.untyped_storage().nbytes() for x in kept.values())
        hidden.sum().backward()  # the graph is a real one
        assert all(parameter.grad is not None for parameter in chunk.decoder.parameters())
    return found


def warm_up(layout: Layout) -> int:
    """Model chunks whose forward pass Megatron's schedule runs on this rank before the first backward pass."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    return int(get_pp_rank_microbatches(8, layout.chunks, layout.pipeline)[2])


def main(rank: int, world: int, meeting: str, cases: str, out: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    found = []
    layout: Layout | None = None
    for case in json.loads(cases):
        if layout != (layout := Layout(**case["layout"])):
            stop_parallel()
            start_parallel(layout)
        config = DecoderConfig(**case["model"])
        num_bytes = saved_bytes(config, layout, case["tokens"], case["recompute"], rank)
        found.append({"bytes": num_bytes, "warm_up": warm_up(layout)})
    Path(out).with_suffix(f".{rank}").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
