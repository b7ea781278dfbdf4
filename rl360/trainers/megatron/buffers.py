"""Model chunks in Megatron's data parallelism: buffers of weights and fp32 gradients, exchanged while others compute.

In: model chunks. Out: the chunks in `DistributedDataParallel`, whose buffers the distributed optimizer shards. Left to
others: adding to the gradients (rl360.models.megatron.wgrad), when a step ends (training.py).

Megatron's own wrapper learns from autograd that a weight has its gradient. Ours never go through autograd, so each
weight tells its bucket itself: in the backward pass, on the thread that runs it, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

# Megatron's: large enough that a ring of the ranks is bound by bandwidth and not by latency.
MIN_BUCKET_ELEMENTS = 40_000_000
BUCKET_ELEMENTS_PER_RANK = 1_000_000


class Buffers(DistributedDataParallel):
    """One chunk with its buffers. `module` is the chunk."""

    def _make_backward_post_hook(self, param: nn.Parameter) -> Any:
        def nothing(*_: Any) -> None:
            """Autograd has no gradient of this weight."""

        return nothing


def with_buffers(chunks: Sequence[nn.Module], overlap: bool) -> list[Buffers]:
    """The chunks of one rank, wrapped. overlap: exchange a bucket's gradients as soon as it has all of them."""
    from megatron.core import parallel_state

    size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    bucket_size = max(MIN_BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * size)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        bucket_size=bucket_size,
    )
    wrapped = []
    for index, chunk in enumerate(chunks):
        config: Any = chunk.config
        # One bucket where nothing overlaps: on later pipeline stages, whose exchange nobody waits for, and for chunks
        # after the first.
        alone = not overlap or index > 0 or not parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        layout = DistributedOptimizer.compute_full_param_layout(
            [p for p in chunk.parameters() if p.requires_grad], None if alone else bucket_size, size, settings
        )
        buffers = Buffers(config, settings, chunk, disable_bucketing=index > 0, full_param_layout=layout)
        if overlap:
            for parameter in chunk.parameters():
                bucket = buffers.param_to_bucket_group[parameter]
                parameter.on_gradient = partial(bucket.register_grad_ready, parameter)  # type: ignore[attr-defined]
        wrapped.append(buffers)
    return wrapped
