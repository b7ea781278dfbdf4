"""What a trainer sends against what the model has, before any engine is paused: hashes do not miss a head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl360.algorithms.grpo import GRPO
from rl360.errors import CheckpointError, ConfigError
from rl360.models.weight_files import WEIGHTS_FILE
from rl360.trainers.torch_trainer import TorchTrainer
from rl360.weight_sync.engine import WeightEngine
from rl360.weight_sync.names import name_problem
from rl360.weight_sync.sources import TensorSource
from rl360.weight_sync.sync import FixedSet, FleetSync
from rl360.weight_sync.transports import BroadcastTransport, DiskTransport, HandleTransport, Transport
from tests.tiny_model import write_tiny_llama
from tests.weight_sync.kit import BUCKET_BYTES, StubTrainer

HEAD = "lm_head.weight"
IN_A_LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
TIED = {f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in IN_A_LAYER} | {
    "model.embed_tokens.weight",
    "model.norm.weight",
}
TRANSPORTS: dict[str, Callable[[Path], Transport]] = {
    "disk": DiskTransport,
    "ipc": lambda folder: HandleTransport(BUCKET_BYTES),
    "nccl": lambda folder: BroadcastTransport(BUCKET_BYTES, backend="gloo"),
}


class Tampering(StubTrainer):
    """Publishes without `left_out`, and `more` besides, whichever way."""

    def __init__(self, folder: Path, left_out: str = "", more: str = "") -> None:
        self.left_out, self.more = left_out, more
        super().__init__(folder, seed=1)
        assert not left_out or left_out in dict(super().tensors())

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        yield from ((name, tensor) for name, tensor in super().tensors() if name != self.left_out)
        if self.more:
            yield self.more, torch.zeros(2)

    def publish(self, folder: Path) -> Path:
        file = super().publish(folder) / WEIGHTS_FILE
        held = {name: tensor for name, tensor in load_file(file).items() if name != self.left_out}
        save_file(held | ({self.more: torch.zeros(2)} if self.more else {}), file)
        return folder


class Untouched(WeightEngine):
    async def exchange(self, *args: Any, **more: Any) -> Any:
        raise AssertionError("an engine was asked")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return write_tiny_llama(folder, layers=2, tied=request.param), request.param


def sync_of(kind: str, folder: Path, tmp_path: Path) -> FleetSync:
    return FleetSync(FixedSet(["http://nowhere"]), TRANSPORTS[kind](tmp_path / "w"), Untouched, model_dir=folder)


def test_names_by_hand(model: tuple[Path, bool]) -> None:
    folder, tied = model
    whole = TIED if tied else TIED | {HEAD}
    assert name_problem(whole, folder) is None
    assert name_problem(whole | {"model.layers.0.self_attn.rotary_emb.inv_freq"}, folder) is None
    said = str(folder / "config.json")
    assert name_problem(whole - {"model.norm.weight"} | {"model.layers.2.mlp.router.weight"}, folder) == (
        "model.norm.weight not sent; model.layers.2.mlp.router.weight not in a model of this config "
        f"({said}: llama, tie_word_embeddings {str(tied).lower()})"
    )
    many = name_problem(whole - {name for name in TIED if ".layers.1." in name}, folder)
    assert many is not None
    assert "model.layers.1.self_attn.o_proj.weight and 4 more not sent" in many
    flipped = name_problem(TIED ^ {HEAD} if tied else TIED, folder)
    assert flipped is not None
    assert flipped.startswith(f"{HEAD} not in a model" if tied else f"{HEAD} not sent (")


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_missing_or_an_extra_name_is_named_before_an_engine_is_asked(
    kind: str, model: tuple[Path, bool], tmp_path: Path
) -> None:
    folder, tied = model
    wrong = Tampering(folder, more=HEAD) if tied else Tampering(folder, left_out=HEAD)
    sync = sync_of(kind, folder, tmp_path)
    problem = f"{HEAD} not in a model" if tied else rf"Tampering publishes other weights.*: {HEAD} not sent"
    with pytest.raises(CheckpointError, match=problem):
        sync.sync(wrong, 0)
    with pytest.raises(AssertionError, match="an engine was asked"):
        sync.sync(Tampering(folder), 1)
    sync.check_names(wrong, 2)  # names of a trainer do not change: they are compared once


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_the_torch_trainer_sends_what_its_model_has(kind: str, model: tuple[Path, bool], tmp_path: Path) -> None:
    folder, tied = model
    trainer = TorchTrainer(1e-3, device="cpu", num_threads=1, model_dir=folder, random_init_seed=1, algorithm=GRPO())
    trainer.start()
    sync_of(kind, folder, tmp_path).check_names(trainer, 0)
    if not tied:
        del trainer.decoder.lm_head
        with pytest.raises(CheckpointError, match=f"TorchTrainer publishes other weights.*: {HEAD} not sent"):
            sync_of(kind, folder, tmp_path / "again").check_names(trainer, 0)
    trainer.close()


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_a_trainer_with_nothing_to_send_from_is_named(kind: str, model: tuple[Path, bool], tmp_path: Path) -> None:
    class OnlyFolders:
        version = 0

    with pytest.raises(ConfigError, match=r"rollout\.sync: OnlyFolders has neither .* try rollout\.sync=disk"):
        sync_of(kind, model[0], tmp_path).check_names(OnlyFolders(), 0)  # type: ignore[arg-type]


def test_names_that_are_known_need_no_pass() -> None:
    def gather() -> Iterable[tuple[str, Tensor]]:
        raise AssertionError("a collective over all ranks")

    assert TensorSource(gather, names=lambda: ["a", "b"]).names() == ["a", "b"]
    assert TensorSource(lambda: iter([("a", torch.zeros(1))])).names() == ["a"]
