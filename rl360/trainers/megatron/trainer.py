"""trainer=megatron as the loop sees it: one object in the driver, one process a GPU behind it.

In: global batches. Out: an optimizer step and its metrics; published weights; checkpoints. Left to others: what a rank
computes (rank.py), dealing a batch out (shards.py), processes (a `WorkerGroup`: local ones here, Ray's later).

Ranks work together or not at all: when one dies, raises or is silent past its deadline, the others wait for it in a
collective, so all are ended and the error says which one it was. The exception is what every rank finds by itself, a
gradient that is not finite or a checkpoint of another model: the ranks are as before and go on.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rl360.engine.workers import LocalWorkerGroup
from rl360.errors import CheckpointError, ConfigError, InfrastructureError, NonFiniteGradient, RL360Error, WorkerDied
from rl360.models.megatron.layout import Layout
from rl360.protocols import Algorithm, PendingSave
from rl360.trainers.megatron.settings import PEAK_MEMORY, PEAK_RESERVED, TrainingSettings
from rl360.trainers.megatron.shards import equal_cost_tokens, shard_batch
from rl360.types import Batch, Update

if TYPE_CHECKING:
    from rl360.trainers.megatron.publish import Written
    from rl360.trainers.megatron.weights import StageSource
    from rl360.weight_sync.buckets import Expectation

# After one rank failed the others either fail by themselves within this time or wait for it in a collective.
LAST_WORDS_S = 5.0
# Raised by every rank, these leave all of them as they were before the call.
SURVIVABLE = (NonFiniteGradient, CheckpointError)
# Of one rank's write in the background: 100 GiB at 50 MiB/s.
SAVE_TIMEOUT_S = 2400.0
# Names in a checkpoint's folder, as in rl360.models.megatron.convert, which the driver does without: it needs torch.
TRACKER_FILE = "latest_checkpointed_iteration.txt"
COMPANIONS = "hf"
# Padding of a micro-batch beyond what the layout needs: rows of a product are computed in tiles of 64 and more, so
# these cost nothing. At most a 64th of a small budget, so that tiny batches are not all padding.
TOKEN_ALIGNMENT = 64


class MegatronTrainer:
    """Implements `rl360.protocols.Trainer`. Keyword-only arguments are collaborators, the others
    `MegatronTrainerConfig`.

    Args:
        model_dir: HF folder of the initial policy, also of the reference model where the algorithm needs one.
        random_init_seed: None: the folder's weights; a number: random weights from it.
        fp32_logits: final logits of bf16 weights in fp32 and not in bf16; the engines must do the same.
        log_dir: of the ranks' logs; None: a temporary folder.
        worker_group_factory: (target, size, kwargs, name) -> WorkerGroup; None: processes on this machine.
    """

    def __init__(
        self,
        learning_rate: float,
        warmup_steps: int = 0,
        betas: SequenceABC[float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        max_grad_norm: float = 1.0,
        max_tokens_per_gpu: int = 16384,
        logprob_chunk_tokens: int = 1024,
        num_gpus: int = 1,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        virtual_pipeline_parallel_size: int | None = None,
        context_parallel_size: int = 1,
        sequence_parallel: bool = True,
        recompute: str = "none",
        transformer_engine: bool = False,
        compile: bool = True,
        overlap_grad_reduce: bool = False,
        async_checkpoint: bool = True,
        step_timeout_s: float = 900.0,
        start_timeout_s: float = 900.0,
        init_method: str = "tcp://127.0.0.1:0",
        rank_target: str = "rl360.trainers.megatron.rank:MegatronRank",
        *,
        model_dir: Path | str,
        random_init_seed: int | None = None,
        fp32_logits: bool = True,
        algorithm: Algorithm,
        seed: int = 0,
        log_dir: Path | str | None = None,
        worker_group_factory: Callable[[str, int, Mapping[str, Any], str], Any] | None = None,
    ):
        self.version = 0
        self._model_dir = Path(model_dir)
        self._sizes = (
            num_gpus,
            tensor_parallel_size,
            pipeline_parallel_size,
            virtual_pipeline_parallel_size,
            context_parallel_size,
            sequence_parallel,
        )
        self._settings: dict[str, Any] = {
            "model_dir": self._model_dir,
            "algorithm": algorithm,
            "learning_rate": learning_rate,
            "warmup_steps": warmup_steps,
            "betas": (betas[0], betas[1]),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "logprob_chunk_tokens": logprob_chunk_tokens,
            "recompute": recompute,
            "compile": compile,
            "overlap_grad_reduce": overlap_grad_reduce,
            "transformer_engine": transformer_engine,
            "random_init_seed": random_init_seed,
            "fp32_logits": fp32_logits,
            "seed": seed,
        }
        self._algorithm = algorithm
        self._max_tokens = max_tokens_per_gpu
        self._async_checkpoint = async_checkpoint
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._init_method = init_method
        self._rank_target = rank_target
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._make_workers = worker_group_factory or self._local_workers
        self._workers: Any = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.layout = Layout()

    def start(self) -> None:
        """Start the ranks and wait until each has its weights.

        Raises:
            ConfigError: the layout does not fit the model, or the machine.
            InfrastructureError: a rank did not start, or not in time.
        """
        from rl360.models.loading import read_config

        config = read_config(self._model_dir)
        self.layout = Layout.of(*self._sizes, model=config)
        self._equal_cost = equal_cost_tokens(config)
        address = urlsplit(self._init_method)
        if address.scheme != "tcp" or not address.hostname:
            raise ConfigError(f"trainer.init_method: {self._init_method!r}; expected tcp://host:port")
        settings = TrainingSettings(layout=self.layout, **self._settings)
        kwargs = {"settings": settings, "timeout_s": max(self._step_timeout_s, self._start_timeout_s)}
        self._workers = self._make_workers(self._rank_target, self.layout.world_size, kwargs, "trainer")
        deadline = time.monotonic() + self._start_timeout_s
        try:
            self._workers.start()
            host = address.hostname
            (port,) = self._call("listen", [(host, address.port or 0)], self._start_timeout_s)
            left_s = max(1.0, deadline - time.monotonic())
            self._call("join", [(host, port)] * self.layout.world_size, left_s)
        except BaseException:
            self.close()
            raise

    def _local_workers(self, target: str, size: int, kwargs: Mapping[str, Any], name: str) -> LocalWorkerGroup:
        log_dir = self._log_dir
        if log_dir is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="rl360-trainer-")
            log_dir = Path(self._scratch.name)
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return LocalWorkerGroup(
            target, size, kwargs, name=name, log_dir=log_dir, env=env, start_timeout_s=self._start_timeout_s
        )

    # ---- rl360.protocols.Trainer

    def step(self, batch: Batch) -> Update:
        """Run the algorithm's `updates_per_batch` optimizer steps on the whole batch; the version grows by one.

        Metrics as of `TorchTrainer.step`.

        Raises:
            ValueError: the batch has no sequences.
            NonFiniteGradient: a gradient is NaN or infinite; the weights are as before that optimizer step.
            InfrastructureError: a rank died, failed or did not answer; all ranks are ended.
        """
        self._require_ranks()
        began_s = time.perf_counter()
        shards = shard_batch(
            batch,
            data_parallel=self.layout.data,
            max_tokens=self._max_tokens * self.layout.context,
            pad_multiple=self._pad_multiple(),
            count_multiple=self.layout.micro_batch_multiple,
            equal_cost=self._equal_cost,
        )
        of_ranks = [shards[self.layout.place(rank).data] for rank in range(self.layout.world_size)]
        found = self._call("step", [(micro, batch.num_trained_tokens) for micro in of_ranks], self._step_timeout_s)
        self.version += 1
        metrics = dict(found[-1])  # the last rank is of the last stage
        for name in (PEAK_MEMORY, PEAK_RESERVED):  # each GPU's own
            if name in metrics:
                metrics[name] = max(of_rank[name] for of_rank in found)
        metrics["perf/gpus"] = float(self.layout.world_size)
        metrics["time/train_s"] = time.perf_counter() - began_s
        num_tokens = sum(sequence.token_ids_T.size for sequence in batch.sequences)
        updates = self._algorithm.updates_per_batch
        metrics["perf/train_tokens_per_s"] = updates * num_tokens / metrics["time/train_s"]
        return Update(version=self.version, metrics=metrics)

    def publish(self, folder: Path) -> Path:
        """Write the current weights as an HF folder, whole or not at all; an existing one is replaced."""
        self._publish(folder)
        return Path(folder)

    def publish_hashed(self, folder: Path, dtype: str | None, ways: SequenceABC[int]) -> Expectation:
        """See protocols.Trainer. Each stage's first rank hashes what it writes, on its own device."""
        from rl360.trainers.megatron.publish import hashes_of

        return hashes_of(self._publish(folder, dtype, tuple(ways)), tuple(ways))

    def _publish(self, folder: Path, engine_dtype: str | None = None, ways: tuple[int, ...] = ()) -> list[Written]:
        from rl360.models.hf_folder import replacing_folder
        from rl360.trainers.megatron.publish import complete

        with replacing_folder(Path(folder)) as staging:
            found: list[Written] = self._call_all("publish", staging, engine_dtype, ways)
            complete(staging, found, self._model_dir)
        return found

    def save(self, folder: Path) -> None:
        """Write weights, masters, moments, step, version and random states; complete when it returns."""
        self._begin_save(Path(folder)).wait()

    def begin_save(self, folder: Path) -> PendingSave | None:
        """Start `save`: when this returns, training may go on; None: it is complete already (`async_checkpoint` off).

        One at a time: another save, or `restore`, waits for it.
        """
        pending = self._begin_save(Path(folder))
        if self._async_checkpoint:
            return pending
        pending.wait()
        return None

    def restore(self, folder: Path) -> None:
        """Take over what `save` wrote, under this trainer's layout, whatever it was written under.

        Raises:
            CheckpointError: incomplete, or of another model; names the first tensor that does not fit, and its file.
        """
        self.version = self._call_all("restore", Path(folder))[0]

    def _begin_save(self, folder: Path) -> _RanksSave:
        from rl360.models.loading import copy_companions

        folder.mkdir(parents=True, exist_ok=True)
        self._call_all("begin_save", folder, self.version)
        copy_companions(self._model_dir, folder / COMPANIONS)
        (folder / TRACKER_FILE).write_text(str(self.version))
        return _RanksSave(self)

    def weight_sources(self) -> list[StageSource]:
        """Where a weight sync gets the current weights: one source for each pipeline stage."""
        from rl360.trainers.megatron.weights import StageSource

        address = urlsplit(self._init_method).hostname
        assert address is not None, "start() has looked at it"
        return [
            StageSource(self._workers, self.layout, stage, address, self._step_timeout_s)
            for stage in range(self.layout.pipeline)
        ]

    def offload(self) -> None:
        """Move the ranks' weights and optimizer state to host memory; until `onload` only that may be called."""
        self._call_all("offload")

    def onload(self) -> None:
        self._call_all("onload")

    def trim(self) -> None:
        """Have the ranks give back what only a step needs of their GPUs."""
        self._call_all("trim")

    def close(self) -> None:
        """End the ranks. Idempotent."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    # ---- calls

    def _pad_multiple(self) -> int:
        """Of the tokens of a micro-batch: what the layout needs, and TOKEN_ALIGNMENT a context rank."""
        most = max(1, min(TOKEN_ALIGNMENT, self._max_tokens // TOKEN_ALIGNMENT))
        # A power of two, as the layout's own multiple mostly is: the least common one of 61 and 128 is 7808.
        alignment = 2 ** (most.bit_length() - 1)
        return math.lcm(self.layout.token_multiple, alignment * self.layout.context)

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        return self._call(method, [args] * self.layout.world_size, self._step_timeout_s)

    def _call(self, method: str, args: SequenceABC[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        """Call `method` on ranks 0.. with their arguments. See the module's docstring for what an error does."""
        self._require_ranks()
        try:
            return asyncio.run(self._gather(method, args, timeout_s))
        except _FromEveryRankError as agreed:
            raise agreed.error from None
        except BaseException:
            self._end_ranks()
            raise

    def _require_ranks(self) -> None:
        if self._workers is None:
            raise RL360Error("MegatronTrainer: not started, or its ranks have ended")

    async def _gather(self, method: str, args: SequenceABC[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        calls = [
            asyncio.create_task(self._workers.call(rank, method, *of_rank), name=f"rank {rank}")
            for rank, of_rank in enumerate(args)
        ]
        done, open_ = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = [call for call in done if call.exception() is not None]
        if not failed and not open_:
            return [call.result() for call in calls]
        if not failed:
            silent = ", ".join(call.get_name() for call in calls if call in open_)
            if hasattr(self._workers, "dump_stacks"):
                self._workers.dump_stacks()
                await asyncio.sleep(1.0)
            raise InfrastructureError(
                "trainer_timeout", f"{method}: no answer after {timeout_s:g} s from {silent}; their logs have stacks"
            )
        if open_:
            more, open_ = await asyncio.wait(open_, timeout=LAST_WORDS_S)
            failed += [call for call in more if call.exception() is not None]
        _raise_first(method, failed, len(calls))
        raise AssertionError("unreachable")

    def _end_ranks(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close(grace_s=0.0)


class _RanksSave:
    """A save that the ranks are writing."""

    def __init__(self, trainer: MegatronTrainer):
        self._trainer = trainer

    def wait(self) -> None:
        """Until every rank's files are complete. From any thread; the ranks may be in a step."""
        trainer = self._trainer
        if trainer._workers is None:
            raise CheckpointError("the trainer's ranks ended before their checkpoint was complete")
        size = trainer.layout.world_size
        # Not through `_call`: a full disk is no reason to end ranks in the middle of a step.
        try:
            asyncio.run(trainer._gather("finish_save", [()] * size, SAVE_TIMEOUT_S))
        except _FromEveryRankError as agreed:
            raise agreed.error from None


class _FromEveryRankError(Exception):
    """Carries what every rank raised by itself; never leaves this module."""

    def __init__(self, error: RL360Error):
        super().__init__(str(error))
        self.error = error


def _raise_first(method: str, failed: SequenceABC[asyncio.Task[Any]], num_ranks: int) -> None:
    """Raise what explains the failure best: what every rank says by itself as it is, a death, else the first error."""
    errors = [(call.get_name(), call.exception()) for call in failed]
    agreed = [error for _, error in errors if isinstance(error, SURVIVABLE)]
    if len(agreed) == num_ranks:
        raise _FromEveryRankError(agreed[0])
    deaths = [(name, error) for name, error in errors if isinstance(error, WorkerDied)]
    name, error = (deaths or errors)[0]
    assert error is not None
    if isinstance(error, ConfigError | CheckpointError):
        raise error
    notes = "\n".join(getattr(error, "__notes__", []))
    raise InfrastructureError(
        "trainer_rank_died" if deaths else "trainer_rank_failed",
        f"{method}: {name} of {num_ranks}: {type(error).__name__}: {error}\n{notes}".rstrip(),
    ) from error
