"""Buckets on their way from a GPU, without a server: by handles that SGLang's own code (which must be there) opens in
another process, and by NCCL; hashes of slices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from rl360.engine.engines import every_device
from rl360.trainers.offload import Offloader
from rl360.weight_sync.buckets import Expectation, RankHashes, bucketed, tensor_hash
from rl360.weight_sync.sources import TensorSource
from rl360.weight_sync.transports import free_port
from tests.gpus import gpu_of, needs_gpus
from tests.weight_sync.record_slices import CONFIGS, WAYS, weights_of
from tests.weight_sync.sliced_server import Rank

# What a scheduler does with /update_weights_from_tensor, and with /weights_checker afterwards.
READER = """
import json, sys
import torch
from sglang.srt.managers.mm_utils import tensor_hash
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

class Model:
    def load_weights(self, named):
        self.held = {name: tensor.to("cuda:0", copy=True) for name, tensor in named}

model = Model()
updater = WeightUpdater(
    tp_rank=0, device="cuda", gpu_id=0, model_config=None, custom_weight_loaders={}, get_model=lambda: model,
    update_model_fields=None, recapture_cuda_graph=None, get_model_runner=None,
)
for line in sys.stdin:
    monkey_patch_torch_reductions()
    done, message = updater.update_weights_from_tensor(
        MultiprocessingSerializer.deserialize(json.loads(line)), load_format="flattened_bucket"
    )
    assert done, message
    print("HELD", json.dumps({name: f"{tensor_hash(held):016x}" for name, held in model.held.items()}), flush=True)
"""


@pytest.mark.gpu
def test_sglang_opens_our_handles_and_hashes_as_we_do() -> None:
    pytest.importorskip("sglang")
    before = torch.cuda.memory_allocated()
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = {"a": (3, 5), "b": (1000, 513), "c": (7,), "d": (4096, 4096)}
    weights = {
        name: torch.randn(shape, generator=generator, device="cuda").bfloat16() for name, shape in shapes.items()
    }
    source = TensorSource(weights.items)
    # The GPUs of this process in another order, where there are several: a handle names the GPU, not its number.
    visible = ",".join(reversed(every_device()[: torch.cuda.device_count()]))
    reader = subprocess.Popen(
        [sys.executable, "-c", READER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    found: dict[str, str] = {}
    try:
        for _ in range(2):  # the second time over memory that was lent before
            source.begin(2**22, "bfloat16")
            while (spec := source.prepare()) is not None:
                (handle,) = source.export(spec.index, 1)
                reader.stdin.write(json.dumps(handle) + "\n")
                reader.stdin.flush()
                held = next(line for line in reader.stdout if line.startswith("HELD"))  # imports may say something
                found.update(json.loads(held.removeprefix("HELD")))
                source.release(spec.index)
            assert found == source.expectation().hashes == {name: tensor_hash(w) for name, w in weights.items()}
            weights["c"] += 1  # in place, as an optimizer does
        Offloader().offload(weights.values(), drop=[])
        assert torch.cuda.memory_allocated() <= before  # nothing that was lent is kept
        assert torch.cuda.memory_reserved() < before + 2**24
    finally:
        reader.stdin.close()
        reader.wait(timeout=60)
    assert reader.returncode == 0


# Takes broadcasts and says what came, as many as are asked for; then stands still.
RECEIVER = """
import os, signal, sys
import torch
import torch.distributed as dist
from rl360.weight_sync.groups import join_group

port, size, gpu, takes = map(int, sys.argv[1:])
torch.cuda.set_device(gpu)
group = join_group("127.0.0.1", port, 1, 2, "g", "nccl", 60.0)
flat = torch.empty(size, dtype=torch.uint8, device="cuda")
for _ in range(takes):
    dist.broadcast(flat, src=0, group=group)
    print("TOOK", int(flat.min()), int(flat.max()), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def receiver(port: int, size: int, takes: int) -> subprocess.Popen[str]:
    arguments = map(str, (port, size, gpu_of(1), takes))
    return subprocess.Popen([sys.executable, "-c", RECEIVER, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["handle", "broadcast"])
def test_what_the_gathering_stream_has_yet_to_write_is_waited_for(way: str) -> None:
    """A bucket is lent or sent from another thread and stream; here the gathering one is a quarter of a second late."""
    needs_gpus(1 if way == "handle" else 2)
    size = 2**22

    def late() -> Iterator[tuple[str, torch.Tensor]]:
        for value in (1, 2, 3):
            tensor = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
            torch.cuda._sleep(500_000_000)  # cycles
            yield f"w{value}", tensor.fill_(value)

    source = TensorSource(late, hashing=False)  # a hash would wait
    source.begin(size, None)
    if way == "handle":
        torch.cuda._sleep(1)  # compiled before it counts
        for value in (1, 2, 3):
            spec = source.prepare()
            assert spec is not None
            waited = run_in_thread(lambda index=spec.index: source.export(index, 1))
            assert waited
            elsewhere = torch.cuda.Stream()
            with torch.cuda.stream(elsewhere):  # as a reader: by no stream of the writer's
                assert int(source._buckets[spec.index][0].flat_B.min()) == value
            source.release(spec.index)
        return
    port = free_port("127.0.0.1")
    reader = receiver(port, size, 3)
    try:
        source.join("g", port, 2, "nccl")
        for value in (1, 2, 3):
            spec = source.prepare()
            assert spec is not None
            run_in_thread(lambda index=spec.index: source.broadcast(index, "g"))
            source.release(spec.index)
            assert reader.stdout is not None
            assert next(line for line in reader.stdout if line.startswith("TOOK")) == f"TOOK {value} {value}\n"
        source.leave("g", broken=True)
    finally:
        reader.kill()
        reader.wait()


def run_in_thread(call: Callable[[], object]) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60.0)
    return not thread.is_alive()


@pytest.mark.gpu
def test_a_broadcast_that_nobody_takes_holds_nothing_up_and_is_cut_off() -> None:
    """The next bucket is gathered meanwhile; leaving ends it: see BroadcastTransport._broadcast."""
    needs_gpus(2)
    size = 2**30  # more than what a rank sends ahead: over NVLink 64 MiB went through to a receiver that stood still
    weights = {name: torch.ones(size, dtype=torch.uint8, device="cuda:0") for name in "abc"}
    source, port = TensorSource(weights.items), free_port("127.0.0.1")
    source.begin(size, None)
    reader = receiver(port, size, takes=1)
    try:
        source.join("g", port, 2, "nccl")
        for index in (0, 1):
            assert source.prepare() is not None
            sending = threading.Thread(target=source.broadcast, args=(index, "g"), daemon=True)
            sending.start()
            sending.join(60.0 if index == 0 else 3.0)
            assert sending.is_alive() == (index == 1)
        gathered = []
        assert run_in_thread(lambda: gathered.append(source.prepare()))
        assert gathered[0] is not None
        assert gathered[0].index == 2
        assert sending.is_alive()
        began = time.monotonic()
        source.leave("g", broken=True)
        sending.join(10.0)
        assert not sending.is_alive()
        assert time.monotonic() - began < 10.0
        assert torch.equal(torch.ones(3, device="cuda:0").cpu(), torch.ones(3))  # the device goes on
    finally:
        reader.kill()
        reader.wait()


@pytest.mark.gpu
@pytest.mark.parametrize("family", CONFIGS)
def test_slices_on_a_gpu_are_those_of_the_recording(family: str) -> None:
    """The stand-in's ranks hold what SGLang's models hold (test_shards.py); here they are hashed by SGLang's kernel."""
    pytest.importorskip("sglang")
    kv_heads = CONFIGS[family]["num_key_value_heads"]
    weights = [(name, tensor.cuda()) for name, tensor in weights_of(family)]
    expectation = Expectation(WAYS, kv_heads)
    for bucket in bucketed(weights, 2000):
        expectation.add(bucket)
    for ways in WAYS:
        found = []
        for rank in range(ways):
            holder = Rank(rank, ways, kv_heads)
            for name, tensor in weights:
                holder.load(name, tensor)
            hashes = {name: tensor_hash(held) or "" for name, held in holder.held.items()}
            assert "" not in hashes.values()
            assert hashes == {name: of[rank] for name, of in expectation.slices[ways].items()}
            found.append(RankHashes(hashes, rank, ways))
        assert expectation.problems(found) == []
        assert expectation.limit(found) is None
