"""The driver: what it takes, what a rank's death, silence or error becomes, memory given back and taken again."""

import inspect
import re
import time
from dataclasses import MISSING, fields

import pytest
import torch

from rl360.algorithms.grpo import GRPO
from rl360.config.schemas import MegatronTrainerConfig
from rl360.errors import ConfigError, InfrastructureError, RL360Error
from rl360.models.megatron.layout import Layout
from rl360.trainers.megatron.trainer import MegatronTrainer
from tests.trainers.helpers import random_batch, tiny_folder
from tests.trainers.megatron.group import make_trainer


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path / "model", num_hidden_layers=4)


def test_constructor_takes_exactly_the_fields_of_its_config_with_their_defaults():
    parameters = inspect.signature(MegatronTrainer).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    own["betas"] = list(own["betas"])
    config = {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(MegatronTrainerConfig)
        if f.name != "_target_"
    }
    del own["learning_rate"], config["learning_rate"]
    assert own == config


def test_a_layout_that_does_not_fit_the_model_is_refused_before_any_process_starts(folder):
    trainer = make_trainer(folder, num_gpus=4, tensor_parallel_size=4, worker_group_factory=None)
    with pytest.raises(ConfigError, match="4 does not divide the model's 6 attention heads"):
        trainer.start()


@pytest.mark.parametrize("address", ["file:///tmp/x", "tcp://", "localhost:1"])
def test_a_meeting_point_that_is_none_is_refused(folder, address):
    with pytest.raises(ConfigError, match="init_method"):
        make_trainer(folder, init_method=address).start()


@pytest.mark.parametrize("max_tokens", [1, 16, 100, 130, 250, 2400, 3904, 4095, 16384])
@pytest.mark.parametrize("sizes", [{}, {"tensor": 8}, {"context": 8}, {"tensor": 8, "context": 8}])
def test_a_micro_batch_is_padded_by_a_64th_of_its_budget_or_by_what_the_layout_needs(folder, max_tokens, sizes):
    trainer = make_trainer(folder, max_tokens_per_gpu=max_tokens)
    trainer.layout = Layout.of(64, **sizes)
    multiple = trainer._pad_multiple()
    assert multiple % trainer.layout.token_multiple == 0
    assert multiple <= max(trainer.layout.token_multiple, max_tokens * trainer.layout.context / 64)


def test_a_step_before_the_start_is_an_error(folder):
    with pytest.raises(RL360Error, match="not started"):
        make_trainer(folder).step(random_batch(0))


def test_offload_and_onload_change_nothing_but_where_the_memory_is(ranks, folder):
    batches = [random_batch(seed) for seed in (1, 2)]
    trainer = ranks.again(layout={"tensor": 2}, model_dir=folder, algorithm=GRPO(kl_coef=0.1))
    expected = [trainer.step(batch).metrics["train/grad_norm"] for batch in batches]
    weights = ranks.weights()
    trainer = ranks.again(layout={"tensor": 2}, model_dir=folder, algorithm=GRPO(kl_coef=0.1))
    found = []
    for batch in batches:
        found.append(trainer.step(batch).metrics["train/grad_norm"])
        trainer.trim()
        trainer.offload()
        assert set(trainer._call_all("bytes_held")) == {0}
        trainer.onload()
    assert found == expected
    assert all(torch.equal(weights[name], value) for name, value in ranks.weights().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "cause", "text"),
    [
        ("kill", "trainer_rank_died", "rank 1 of 2.*SIGKILL"),
        ("hang", "trainer_timeout", "no answer after 5 s from rank 0, rank 1"),
        ("raise", "trainer_rank_failed", "rank 1 of 2: .*comes first"),
    ],
)
def test_a_rank_that_fails_ends_all_of_them_and_is_named(folder, how, cause, text):
    """Rank 0 waits for rank 1 in a collective, and would for ever."""
    trainer = make_trainer(folder, num_gpus=2, step_timeout_s=60.0)
    try:
        trainer.start()
        trainer.step(random_batch(0))
        workers = trainer._workers
        pids = [workers.pid(rank) for rank in range(2)]
        if how == "kill":
            import os
            import signal

            os.kill(pids[1], signal.SIGKILL)
        else:
            import asyncio

            asyncio.run(workers.call(1, "fail", how))
        if how == "hang":
            trainer._step_timeout_s = 5.0
        began = time.monotonic()
        with pytest.raises(InfrastructureError, match=re.compile(text, re.DOTALL)) as caught:
            trainer.step(random_batch(1))
        assert caught.value.cause == cause
        assert time.monotonic() - began < 30.0
        assert not any(_is_running(pid) for pid in pids)
        with pytest.raises(RL360Error, match="its ranks have ended"):
            trainer.step(random_batch(1))
    finally:
        trainer.close()


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
