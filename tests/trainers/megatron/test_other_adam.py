"""Where Transformer Engine or Apex is installed Megatron would take their Adam, which clips nothing here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.megatron.processes import run_ranks
from tests.models.megatron.ranks import start
from tests.trainers.helpers import tiny_folder
from tests.trainers.megatron.shim import install


class OtherAdam:
    def __init__(self, *_: object, **__: object) -> None:
        raise AssertionError("Megatron's choice was taken")


def step_beside_another_adam(rank: int, size: int, store: str, folder: str) -> None:
    from megatron.core import optimizer as megatron_optimizer

    from rl360.models.loading import read_config
    from rl360.models.megatron.layout import Layout
    from rl360.models.megatron.model import build_model
    from rl360.models.megatron.parallel import start_parallel
    from rl360.trainers.megatron.buffers import with_buffers
    from rl360.trainers.megatron.optim import ShardedOptimizer

    start(rank, size, store)
    install()
    layout = Layout()
    start_parallel(layout)
    chunks = build_model(read_config(Path(folder)), layout, params_dtype=torch.float32, random_init_seed=3)
    wrapped = with_buffers(chunks, False)
    megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = OtherAdam, False
    optimizer = ShardedOptimizer(
        wrapped, 1e-2, 0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, max_grad_norm=0.5, params_dtype=torch.float32
    )
    assert (megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER) == (OtherAdam, False)
    count = 0
    for parameter in chunks[0].parameters():
        parameter.main_grad.fill_(2.0)
        count += parameter.numel()
    norm, _ = optimizer.step()
    assert norm == pytest.approx(2.0 * count**0.5)
    (adam,) = optimizer.adams()
    assert type(adam) is torch.optim.AdamW
    for state in adam.state.values():
        torch.testing.assert_close(state["exp_avg"], torch.full_like(state["exp_avg"], 0.1 * 2.0 * 0.5 / norm))
    torch.distributed.destroy_process_group()


def test_torchs_adamw_is_taken_all_the_same_and_clips(tmp_path):
    run_ranks(step_beside_another_adam, 1, tmp_path, str(tiny_folder(tmp_path / "model")))
