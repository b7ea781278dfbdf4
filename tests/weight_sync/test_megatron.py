"""Weights from Megatron ranks, split over tensor and pipeline ranks, to a server process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from rl360.errors import CheckpointError
from rl360.serving.fleet import Fleet
from rl360.weight_sync.buckets import tensor_hash
from rl360.weight_sync.sync import FixedSet, FleetSync
from rl360.weight_sync.transports import BroadcastTransport, DiskTransport, HandleTransport
from tests.trainers.helpers import random_batch, tiny_folder
from tests.trainers.megatron.group import Ranks
from tests.weight_sync.kit import embedded_fleet, make_engine, post

pytestmark = pytest.mark.slow
BUCKET_BYTES = 40_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "model", num_hidden_layers=4)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(2, folder)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = embedded_fleet(
        folder, tmp_path_factory.mktemp("logs"), 1, load_format="dummy", more=("--skip-tokenizer-init",)
    )
    fleet.start()
    yield fleet
    fleet.close()


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}], ids=["tensor", "pipeline"])
def test_a_server_holds_what_the_ranks_hold(
    layout: dict[str, int], kind: str, ranks: Ranks, fleet: Fleet, folder: Path
) -> None:
    trainer = ranks.again(layout=layout, model_dir=folder)
    trainer.step(random_batch(1))
    if kind == "ipc":
        transport = HandleTransport(BUCKET_BYTES, "float32")
    else:
        transport = BroadcastTransport(BUCKET_BYTES, "float32", "gloo")
    sync = FleetSync(fleet, transport, make_engine)
    (url,) = fleet.urls()
    for version in (1, 2):
        assert sync.sync(trainer, version).confirmed == (url,)
        assert post(url + "/model_info")["weight_version"] == str(version)
        (of_rank,) = post(url + "/weights_checker", {"action": "checksum"})["ranks"]
        assert of_rank["checksums"] == {name: tensor_hash(tensor) for name, tensor in ranks.weights().items()}
        trainer.step(random_batch(version + 1))
    sync.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["ipc", "disk"])
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}], ids=["tensor", "pipeline"])
def test_the_ranks_send_what_the_model_has(
    layout: dict[str, int], kind: str, tied: bool, ranks: Ranks, tmp_path: Path
) -> None:
    model = tiny_folder(tmp_path / "model", num_hidden_layers=4, tie_word_embeddings=tied)
    other = tiny_folder(tmp_path / "other", num_hidden_layers=4, tie_word_embeddings=not tied)
    trainer = ranks.again(layout=layout, model_dir=model)
    transport = HandleTransport(BUCKET_BYTES) if kind == "ipc" else DiskTransport(tmp_path / "weights")
    FleetSync(FixedSet([]), transport, make_engine, model_dir=model).check_names(trainer, 0)
    problem = "lm_head.weight not sent" if tied else "lm_head.weight not in a model"
    with pytest.raises(CheckpointError, match=f"MegatronTrainer publishes other weights.*: {problem}"):
        FleetSync(FixedSet([]), transport, make_engine, model_dir=other).check_names(trainer, 0)
