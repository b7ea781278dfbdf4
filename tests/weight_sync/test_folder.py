"""Weights by disk: engines are compared with the trainer's tensors, so a folder that is written wrong is noticed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl360.errors import EngineError
from rl360.models.weight_files import WEIGHTS_FILE
from rl360.serving.fleet import Fleet
from rl360.weight_sync.buckets import SHA256, Expectation, RankHashes, tensor_hash
from rl360.weight_sync.folder import folder_expectation, hashing
from rl360.weight_sync.sync import FixedSet, FleetSync
from rl360.weight_sync.transports import WAYS, DiskTransport
from tests.tiny_model import write_tiny_llama
from tests.weight_sync.kit import StubTrainer, embedded_fleet, make_engine, post

NAME = "model.layers.1.mlp.up_proj.weight"
WRONG = ("a flipped bit", "the last step's", "skipped")


class Spoiling(StubTrainer):
    """Writes NAME otherwise than it has it, once `how` says so."""

    how = ""

    def publish(self, folder: Path) -> Path:
        super().publish(folder)
        if self.how:
            spoil(folder, self.how, self.before)
        return folder

    def step(self, seed: int | None = None) -> int:
        self.before = dict(self.decoder.named_parameters())[NAME].detach().clone()
        return super().step(seed)


def spoil(folder: Path, how: str, before: torch.Tensor) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    if how == "skipped":
        del tensors[NAME]
    elif how == "the last step's":
        tensors[NAME] = before
    else:
        tensors[NAME].view(torch.uint8).view(-1)[103] ^= 0x80  # a sign, which no narrower dtype loses
    save_file(tensors, folder / WEIGHTS_FILE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = embedded_fleet(folder, tmp_path_factory.mktemp("logs"), 1)
    fleet.start()
    yield fleet
    fleet.close()


@pytest.mark.parametrize("dtype", ["float32", None])
@pytest.mark.parametrize("how", WRONG)
def test_a_folder_that_is_not_what_the_trainer_has_advances_no_version(
    how: str, dtype: str | None, fleet: Fleet, folder: Path, tmp_path: Path
) -> None:
    trainer = Spoiling(folder, seed=3)
    (url,) = fleet.urls()
    sync = FleetSync(FixedSet([url]), DiskTransport(tmp_path, dtype), make_engine, model_dir=folder)
    sync.sync(trainer, trainer.step())
    trainer.how = how
    with pytest.raises(EngineError, match=NAME.replace(".", r"\.")) as caught:
        sync.sync(trainer, trainer.step())
    if how != "skipped":  # such a folder the engine itself refuses
        assert tensor_hash(dict(trainer.tensors())[NAME]) in str(caught.value)
    assert post(url + "/model_info")["weight_version"] == "1"
    post(url + "/continue_generation", {})
    trainer.how = ""
    assert sync.sync(trainer, trainer.step()).confirmed == (url,)
    sync.close()


def test_nothing_is_read_back_from_a_folder_whose_tensors_were_hashed(folder: Path, tmp_path: Path) -> None:
    trainer, transport = StubTrainer(folder, seed=3), DiskTransport(tmp_path)
    asyncio.run(transport.prepare(trainer, 0, ()))
    (tmp_path / "version-0" / WEIGHTS_FILE).unlink()
    found = transport.expectation(SHA256)
    assert found is not None
    assert found.hashes == {name: tensor_hash(tensor) for name, tensor in trainer.tensors()}
    assert found.ways == WAYS


@pytest.mark.parametrize("how", WRONG)
def test_a_folder_that_has_to_be_read_is_compared_with_the_trainers_tensors_first(
    how: str, folder: Path, tmp_path: Path
) -> None:
    """As for engines whose hashes are of another kind, or whose ranks are more than anybody expected."""
    trainer = Spoiling(folder, seed=3)
    trainer.step()
    written = trainer.publish_hashed(tmp_path / "w", "bfloat16", (1,))
    whole = folder_expectation(tmp_path / "w", SHA256, "bfloat16", (1, 16), written)
    assert whole is not None
    assert whole.spoilt == []
    assert whole.hashes == written.hashes
    spoil(tmp_path / "w", how, trainer.before)
    found = folder_expectation(tmp_path / "w", SHA256, "bfloat16", (1, 16), written)
    assert found is not None
    (problem,) = found.problems([RankHashes(found.hashes)])  # an engine that holds just what is in the folder
    assert NAME in problem


def test_a_trainer_that_does_not_hash_is_told_of_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class OnlyWrites:
        version = 0

        def publish(self, to: Path) -> Path:
            return StubTrainer(folder, seed=3).publish(to)

    transport = DiskTransport(tmp_path)
    with caplog.at_level(logging.WARNING):
        for version in (0, 1):
            asyncio.run(transport.prepare(OnlyWrites(), version, ()))
            found = transport.expectation(SHA256)
            assert found is not None
            assert found.hashes == {name: tensor_hash(t) for name, t in StubTrainer(folder, seed=3).tensors()}
    assert [message for message in caplog.messages if "the trainer does not hash" in message] == caplog.messages[:1]


def test_hashing_hands_the_tensors_on_and_hashes_what_engines_hold() -> None:
    tensors = [("model.norm.weight", torch.tensor([1.00390625, 2.0])), ("a", torch.ones(3))]
    expectation = Expectation((1,))
    assert [tensor for _, tensor in hashing(iter(tensors), expectation, "bfloat16")] == [t for _, t in tensors]
    assert expectation.hashes == {name: tensor_hash(tensor.to(torch.bfloat16)) for name, tensor in tensors}
    assert list(hashing(iter(tensors), None, "bfloat16")) == tensors
