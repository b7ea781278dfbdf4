"""Process groups of a layout, made by megatron-core.

In: a `Layout` and an initialised torch.distributed. Out: megatron.core.parallel_state set up for it, once a process.
Left to others: starting torch.distributed (the trainer's rank, torchrun), devices.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed

from rl360.models.megatron.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def start_parallel(layout: Layout, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Make Megatron's groups for `layout`, whose world size must be that of torch.distributed.

    `timeout` is of their collectives, counted in whole minutes and rounded up.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    assert distributed.get_world_size() == layout.world_size, (
        f"{distributed.get_world_size()} ranks, the layout has {layout.world_size}"
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        create_gloo_process_groups=False,  # a second set, for checkpoints of formats that we do not write
        distributed_timeout_minutes=-(-timeout // timedelta(minutes=1)),
    )
    # Nothing here draws random numbers in a step. Megatron enters its tracker anyway, and the default one needs CUDA.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def stop_parallel() -> None:
    """Forget the groups; a later `start_parallel` may use another layout."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def tensor_group(layout: Layout) -> ProcessGroup | None:
    """The tensor-parallel group of this rank; None: it is alone in it."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group() if layout.tensor > 1 else None


def context_group(layout: Layout) -> ProcessGroup | None:
    """The context-parallel group of this rank; None: it is alone in it."""
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group() if layout.context > 1 else None


def this_device() -> torch.device:
    """The GPU that this process has chosen, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
