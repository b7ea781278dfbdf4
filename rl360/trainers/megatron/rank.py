"""One training rank: a process of its own with one GPU, driven by the trainer through a `WorkerGroup`.

In: what to train and where the other ranks are; then the calls of the driver, the same ones on every rank. Out: their
results, mostly on the ranks that have them. Left to others: the step (training.py), files (publish.py, checkpoint.py),
what a dead or silent rank means (trainer.py).

All of it runs on one thread beside the process's event loop, so that the process hears its driver, and dies with it,
while a collective waits for a rank that is gone. What sends a bucket to engines has another one, beside the gathering
of the next.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl360.errors import ConfigError
from rl360.trainers.megatron.settings import TrainingSettings
from rl360.trainers.packing import MicroBatch

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from rl360.trainers.megatron.checkpoint import RankCheckpoint
    from rl360.trainers.megatron.publish import Written
    from rl360.trainers.megatron.training import Training
    from rl360.trainers.megatron.weights import RankWeights


# Of a rank that is idle; the driver gives a worker 5 s in all.
LEAVE_TIMEOUT_S = 3.0


class MegatronRank:
    """Rank `rank` of the trainer.

    Args:
        settings: the same on every rank.
        timeout_s: of a collective; a rank that waits longer for another ends its process.
    """

    def __init__(self, settings: TrainingSettings, timeout_s: float, rank: int):
        self.rank = rank
        self.settings = settings
        self._timeout = timedelta(seconds=timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank")
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="sending")
        self._store: Any = None
        self._address = "127.0.0.1"
        self._training: Training | None = None
        self._saver_of_training: RankCheckpoint | None = None
        self._weights: RankWeights | None = None
        self._weights_of: Training | None = None

    @property
    def training(self) -> Training:
        assert self._training is not None, "MegatronRank.join() comes first"
        return self._training

    # ---- called by the driver

    async def listen(self, host: str, port: int) -> int:
        """Rank 0 only: open the meeting point of all ranks; returns its port. Port 0: a free one."""
        return await self._run(self._listen, host, port)

    async def join(self, host: str, port: int) -> None:
        """Meet the other ranks, make the groups, load the weights."""
        self._address = host
        await self._run(self._join, host, port)

    async def step(self, micro_batches: SequenceABC[MicroBatch], num_trained_tokens: int) -> dict[str, float]:
        """See `Training.step`."""
        return await self._run(lambda: self.training.step(micro_batches, num_trained_tokens))

    async def logprobs(self, micro_batches: SequenceABC[MicroBatch]) -> list[NDArray[np.float32]] | None:
        """See `Training.logprobs`."""
        return await self._run(lambda: self.training.logprobs(micro_batches))

    async def publish(self, folder: Path, engine_dtype: str | None = None, ways: SequenceABC[int] = ()) -> Written:
        """Write this stage's weights into `folder`; see `publish.write_stage`."""
        from rl360.trainers.megatron.publish import write_stage

        return await self._run(lambda: write_stage(self.training, folder, engine_dtype=engine_dtype, ways=ways))

    async def send_weights(self, method: str, args: tuple[Any, ...]) -> Any:
        """One call of a `StageSource` (weights.py). The next bucket is gathered while one is broadcast, and a broken
        group is cut off while a broadcast waits in it."""
        if method in ("broadcast", "export", "leave", "release"):
            assert self._weights is not None, "no weights were gathered yet"
            function = getattr(self._weights.source, method)
            if method == "leave":
                return await asyncio.to_thread(function, *args)
            return await asyncio.get_running_loop().run_in_executor(self._sending, function, *args)
        return await self._run(self._send_weights, method, args)

    async def begin_save(self, folder: Path, version: int) -> None:
        """Copy weights and optimizer, and write them in the background; see `RankCheckpoint.begin`."""
        await self._run(lambda: self._saver().begin(folder, version))

    async def finish_save(self) -> None:
        """Wait until that write is complete. The rank may be in a step meanwhile."""
        saver = self._saver_of_training
        if saver is not None and saver.writing is not None:
            await asyncio.wait([asyncio.wrap_future(saver.writing)])
            saver.finish()

    async def restore(self, folder: Path) -> int:
        """See `RankCheckpoint.restore`."""
        return await self._run(lambda: self._saver().restore(folder))

    async def offload(self) -> None:
        """Move weights and optimizer state to host memory, give the GPU's back; until `onload` nothing runs."""
        await self._run(lambda: self.training.offload())

    async def onload(self) -> None:
        await self._run(lambda: self.training.onload())

    async def trim(self) -> None:
        """See `Training.trim`."""
        await self._run(lambda: self.training.trim())

    async def close(self) -> None:
        """Leave the groups. A rank whose thread is busy (a hung collective) is left to be killed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._run(self._leave), LEAVE_TIMEOUT_S)
        for thread in (self._thread, self._sending):
            thread.shutdown(wait=False, cancel_futures=True)

    # ---- on the rank's own thread

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _saver(self) -> RankCheckpoint:
        from rl360.trainers.megatron.checkpoint import RankCheckpoint

        if self._saver_of_training is None or self._saver_of_training.training is not self.training:
            self._saver_of_training = RankCheckpoint(self.training)
        return self._saver_of_training

    def _send_weights(self, method: str, args: tuple[Any, ...]) -> Any:
        from rl360.trainers.megatron.weights import RankWeights

        if self._weights is None or self._weights_of is not self.training:
            self._weights = RankWeights(self.training, self._address, self._timeout.total_seconds())
            self._weights_of = self.training
        return self._weights.prepare() if method == "prepare" else getattr(self._weights.source, method)(*args)

    def _listen(self, host: str, port: int) -> int:
        from torch.distributed import TCPStore

        self._store = TCPStore(
            host, port, self.settings.layout.world_size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        return int(self._store.port)

    def _leave(self) -> None:
        from torch import distributed

        if self._training is not None:
            self._training.close()
        self._training = None
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _join(self, host: str, port: int) -> None:
        import torch
        from torch import distributed

        from rl360.weight_sync.groups import agree_with_engines

        # megatron-core warns, from many places, that Transformer Engine and Apex are not there.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        size = self.settings.layout.world_size
        if self._store is None:
            self._store = distributed.TCPStore(
                host, port, size, is_master=False, timeout=self._timeout, wait_for_workers=False
            )
        agree_with_engines()
        device, dtype, backend = self._hardware()
        torch.manual_seed(self.settings.seed)
        distributed.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=size, timeout=self._timeout
        )
        self._training = self._train(device, dtype)

    def _hardware(self) -> tuple[torch.device, torch.dtype, str]:
        """This rank's device, the weights' dtype there, and the backend of collectives."""
        import torch

        count = torch.cuda.device_count()
        if count == 0:
            raise ConfigError(f"trainer: rank {self.rank} sees no GPU; trainer=megatron needs one a rank")
        number = int(os.environ.get("LOCAL_RANK", self.rank))
        if number >= count:
            raise ConfigError(
                f"trainer.num_gpus: rank {self.rank} would need GPU {number}, this machine shows {count}; expected at "
                "most that many ranks on it"
            )
        torch.cuda.set_device(number)
        return torch.device("cuda", number), torch.bfloat16, "nccl"

    def _train(self, device: torch.device, dtype: torch.dtype) -> Training:
        from rl360.models.megatron.parallel import start_parallel
        from rl360.trainers.megatron.training import Training

        start_parallel(self.settings.layout, self._timeout)
        return Training(self.settings, device, dtype)
