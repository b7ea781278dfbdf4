"""Weights from Megatron ranks, split over tensor and pipeline ranks, to a server process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from rl360.serving.fleet import Fleet
from rl360.weight_sync.buckets import tensor_hash
from rl360.weight_sync.sync import FleetSync
from rl360.weight_sync.transports import BroadcastTransport, HandleTransport
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
