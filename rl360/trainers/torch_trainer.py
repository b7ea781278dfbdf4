"""The trainer of one process: torch, on the CPU or on one GPU.

In: a global `Batch` and an `Algorithm`. Out: an optimizer step and its metrics; checkpoints, HF folders. Left to
others: packing, attention, logprobs and optimizer (the modules beside this one), when to publish (the loop). `decoder`
is the module that an embedded engine shares: nothing may run it while `step` or `restore` does.

Axes: N input tokens, U predicting positions, M trained tokens of one micro-batch.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl360.errors import CheckpointError
from rl360.models.architecture import another_model, identity
from rl360.models.cpu_threads import use_cpu_threads
from rl360.protocols import Algorithm
from rl360.trainers.attention import tree_attend, varlen_attend
from rl360.trainers.checkpoint import STATE_FILE, read_state, write_state
from rl360.trainers.logprobs import Predictions, backward_through_head, token_logprobs
from rl360.trainers.mismatch import mismatch_means, mismatch_sums
from rl360.trainers.offload import Offloader
from rl360.trainers.optim import Optimizer
from rl360.trainers.packing import MicroBatch, pack
from rl360.types import Batch, Update

if TYPE_CHECKING:
    from rl360.models.decoder import Decoder
    from rl360.weight_sync.buckets import Expectation


class TorchTrainer:
    """Implements `rl360.protocols.Trainer`. The keyword-only arguments are collaborators, the others `TrainerConfig`.

    Args:
        model_dir: HF folder of the initial policy, also of the reference model where the algorithm needs one.
        random_init_seed: None: the folder's weights; a number: random weights from it.
        fp32_logits: final logits of bf16 weights in fp32 and not in bf16; the engine must do the same.
        seed: of torch's random state at `start`; nothing in a step draws from it today, but it is saved and restored.
        load_decoder: how to get a decoder; None: rl360.models.loading.load_decoder.
    """

    def __init__(
        self,
        learning_rate: float,
        warmup_steps: int = 0,
        betas: SequenceABC[float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        max_grad_norm: float = 1.0,
        max_tokens_per_gpu: int = 1024,
        logprob_chunk_tokens: int = 256,
        gradient_checkpointing: bool = False,
        share_prompts: bool = True,
        device: str = "auto",
        num_threads: int = 0,
        *,
        model_dir: Path | str,
        random_init_seed: int | None = None,
        fp32_logits: bool = True,
        algorithm: Algorithm,
        seed: int = 0,
        load_decoder: Callable[..., Decoder] | None = None,
    ):
        self.version = 0
        self._make_optimizer = partial(
            Optimizer,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            betas=tuple(betas),
            eps=eps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        )
        self._max_tokens = max_tokens_per_gpu
        self._chunk_tokens = logprob_chunk_tokens
        self._recompute_layers = gradient_checkpointing
        self._share_prompts = share_prompts
        self._device_name = device
        self._num_threads = num_threads
        self._model_dir = Path(model_dir)
        self._random_init_seed = random_init_seed
        self._fp32_logits = fp32_logits
        self._algorithm = algorithm
        self._seed = seed
        self._load_decoder = load_decoder
        self._decoder: Decoder | None = None
        self._reference: Decoder | None = None
        self._optimizer: Optimizer | None = None
        self._offloader = Offloader()

    @property
    def decoder(self) -> Decoder:
        assert self._decoder is not None, "TorchTrainer.start() comes first"
        return self._decoder

    def start(self) -> None:
        """Load the policy (and the reference where needed) and make the optimizer."""
        if self._load_decoder is None:
            from rl360.models.loading import load_decoder

            self._load_decoder = load_decoder
        name = self._device_name
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(name)
        if self._device.type == "cpu":
            use_cpu_threads(self._num_threads)
        torch.manual_seed(self._seed)
        self._decoder = self._load()
        if self._algorithm.needs_reference:
            self._reference = self._load().requires_grad_(False)
        self._optimizer = self._make_optimizer(self._decoder)

    def _load(self) -> Decoder:
        assert self._load_decoder is not None
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        return self._load_decoder(
            self._model_dir, device=str(self._device), dtype=dtype, random_init_seed=self._random_init_seed
        )

    def step(self, batch: Batch) -> Update:
        """Run the algorithm's `updates_per_batch` optimizer steps on the whole batch; the version grows by one.

        Metrics over several steps are means (maxima for names that end in `_max`); learning rate and version are the
        last. `train/entropy` is the plain mean over trained tokens, nats; `perf/train_tokens_per_s` counts every
        sequence's own prompt and completion, shared or not.

        Raises:
            ValueError: the batch has no sequences.
            NonFiniteGradient: a gradient is NaN or infinite; the weights are as before that optimizer step.
        """
        if not batch.sequences:
            raise ValueError("the batch has no sequences; expected at least one trained token (skip the step instead)")
        assert self._optimizer is not None, "TorchTrainer.start() comes first"
        began_s = time.perf_counter()
        if self._device.type == "cpu":
            return_free_memory()  # of the engine's cache, where it shares this process
        share = self._share_prompts and self._device.type == "cpu"
        micro_batches = [_Work.of(packed, self._device) for packed in pack(batch.sequences, self._max_tokens, share)]
        updates = self._algorithm.updates_per_batch
        # With one update the proximal policy is the current one, and its logprobs come from the same forward.
        needs_proximal = updates > 1 or self._algorithm.needs_sequence_ratios
        proximal = [self._logprobs(self.decoder, work) if needs_proximal else None for work in micro_batches]
        corrections = [self._correction(*pair) for pair in zip(micro_batches, proximal, strict=True)]
        reference = [self._logprobs(self._reference, work) if self._reference else None for work in micro_batches]
        per_update: list[dict[str, float]] = []
        for _ in range(updates):
            totals: dict[str, float] = {}
            for parts in zip(micro_batches, proximal, reference, corrections, strict=True):
                _merge(totals, self._backward(*parts))
            totals["train/entropy"] /= batch.num_trained_tokens
            totals["train/grad_norm"], totals["train/lr"] = self._optimizer.step()
            per_update.append(mismatch_means(totals))
        self.version += 1
        if self._device.type == "cpu":
            return_free_memory()
        metrics = _over_updates(per_update)
        metrics["train/lr"] = per_update[-1]["train/lr"]
        if self._device.type == "cuda":
            metrics["perf/gpus"] = 1.0
        metrics["time/train_s"] = time.perf_counter() - began_s
        num_tokens = sum(sequence.token_ids_T.size for sequence in batch.sequences)
        metrics["perf/train_tokens_per_s"] = updates * num_tokens / metrics["time/train_s"]
        return Update(version=self.version, metrics=metrics)

    def _hidden(self, decoder: Decoder, work: _Work) -> Tensor:
        """Hidden states [U, hidden] of the positions that predict."""
        if self._device.type == "cpu":
            attend = tree_attend(work.packed.trees, decoder.dtype)
        else:
            attend = varlen_attend(work.packed.trees, self._device)
        hidden_N = decoder.hidden(work.token_ids_N, work.positions_N, attend, checkpoint=self._recompute_layers)
        return hidden_N.index_select(0, work.rows_U)

    @torch.no_grad()
    def _logprobs(self, decoder: Decoder, work: _Work) -> Tensor:
        return token_logprobs(
            self._hidden(decoder, work), decoder.head_weight, work.predictions, self._chunk_tokens, self._fp32_logits
        )

    @torch.no_grad()
    def _correction(self, work: _Work, proximal_M: Tensor | None) -> tuple[Tensor, ...]:
        """Where the algorithm weighs whole sequences: each token's part of it, [M]; else nothing."""
        if not self._algorithm.needs_sequence_ratios:
            return ()
        assert proximal_M is not None
        sums_S = proximal_M.new_zeros(work.num_sequences).index_add_(0, work.sequences_M, proximal_M - work.behaviour_M)
        counts_S = torch.bincount(work.sequences_M, minlength=work.num_sequences)
        return (self._algorithm.sequence_correction(sums_S, counts_S)[work.sequences_M],)

    def _backward(
        self, work: _Work, proximal_M: Tensor | None, reference_M: Tensor | None, correction: tuple[Tensor, ...]
    ) -> dict[str, float]:
        """Add one micro-batch's gradient to the optimizer's; return its metric sums."""
        assert self._optimizer is not None
        sums: dict[str, Tensor] = {}
        chunks: list[Tensor] = []  # logprobs of this very pass, in the order of M

        def token_loss(tokens: slice, logprobs_M: Tensor) -> Tensor:
            with torch.enable_grad():
                current_M = logprobs_M.detach().requires_grad_()
                loss, metrics = self._algorithm.loss(
                    current_M,
                    logprobs_M if proximal_M is None else proximal_M[tokens],
                    work.behaviour_M[tokens],
                    work.advantages_M[tokens],
                    work.weights_M[tokens],
                    None if reference_M is None else reference_M[tokens],
                    *(correction_M[tokens] for correction_M in correction),
                )
                (grad_M,) = torch.autograd.grad(loss, current_M)
            chunks.append(logprobs_M.detach())
            _merge(sums, {"train/loss": loss.detach(), **metrics})
            return grad_M

        hidden_U = self._hidden(self.decoder, work)
        head_weight = self.decoder.head_weight
        hidden_grad_U, entropy_sum = backward_through_head(
            hidden_U.detach(),
            head_weight,
            work.predictions,
            self._chunk_tokens,
            token_loss,
            self._optimizer.gradient(head_weight),
            self._fp32_logits,
        )
        hidden_U.backward(hidden_grad_U)
        before_M = torch.cat(chunks) if proximal_M is None else proximal_M
        _merge(sums, mismatch_sums(before_M, work.behaviour_M, work.weights_M, work.places_M))
        return {"train/entropy": float(entropy_sum)} | {name: float(value) for name, value in sums.items()}

    def publish(self, folder: Path) -> Path:
        from rl360.models.loading import save_hf

        return save_hf(self.decoder, folder, self._model_dir)

    def publish_hashed(self, folder: Path, dtype: str | None, ways: SequenceABC[int]) -> Expectation:
        """See protocols.Trainer."""
        from rl360.weight_sync.buckets import Expectation
        from rl360.weight_sync.folder import hashing

        expectation = Expectation(tuple(ways), self.decoder.config.num_kv_heads)
        for _ in hashing(self.decoder.named_parameters(), expectation, dtype):
            pass
        self.publish(folder)
        return expectation

    def save(self, folder: Path) -> None:
        """Write weights, moments, step count, version and random state to folder/trainer.pt, atomically."""
        assert self._optimizer is not None, "TorchTrainer.start() comes first"
        state = {
            "version": self.version,
            "model": identity(self.decoder.config),
            "optimizer": self._optimizer.state(),
            "rng_cpu": torch.get_rng_state(),
        }
        if self._device.type == "cuda":
            state["rng_cuda"] = torch.cuda.get_rng_state(self._device)
        write_state(Path(folder), state)

    def restore(self, folder: Path) -> None:
        """Take over what `save` wrote, in place: an engine that shares the decoder must drop its caches.

        Raises:
            CheckpointError: incomplete, or of another model; nothing was changed.
        """
        assert self._optimizer is not None, "TorchTrainer.start() comes first"
        file = Path(folder) / STATE_FILE
        state = read_state(Path(folder))
        if (difference := another_model(self.decoder.config, state.get("model", {}))) is not None:
            raise CheckpointError(f"{file}: the chosen model's {difference}")
        try:
            self._optimizer.load(state["optimizer"])
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from None
        self.version = int(state["version"])
        torch.set_rng_state(state["rng_cpu"])
        if self._device.type == "cuda" and "rng_cuda" in state:
            torch.cuda.set_rng_state(state["rng_cuda"], self._device)

    def offload(self) -> None:
        """Move weights and optimizer state to host memory, give the GPU's back; until `onload` nothing else runs."""
        self._offloader.offload(self._resident(), drop=[])

    def onload(self) -> None:
        """Undo `offload`."""
        self._offloader.onload()

    def trim(self) -> None:
        """Give what only a step needs of the GPU back."""
        self._offloader.trim(self._resident(), drop=[])

    def _resident(self) -> list[Tensor]:
        """What lives from step to step."""
        assert self._optimizer is not None, "TorchTrainer.start() comes first"
        modules = [self.decoder, *([self._reference] if self._reference else [])]
        weights = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        return [*weights, *self._optimizer.tensors()]

    def close(self) -> None:
        """Let go of weights and moments, and of the host's memory for them."""
        self._offloader.close()
        self._decoder = self._reference = self._optimizer = None


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A micro-batch's arrays as tensors on the device."""

    packed: MicroBatch
    token_ids_N: Tensor
    positions_N: Tensor
    rows_U: Tensor
    predictions: Predictions
    behaviour_M: Tensor
    advantages_M: Tensor
    weights_M: Tensor
    sequences_M: Tensor
    places_M: Tensor
    num_sequences: int

    @classmethod
    def of(cls, packed: MicroBatch, device: torch.device) -> _Work:
        def tensor(array: Any) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            packed=packed,
            token_ids_N=tensor(packed.token_ids_N),
            positions_N=tensor(packed.positions_N),
            rows_U=tensor(packed.rows_U),
            predictions=Predictions(
                temperatures_U=tensor(packed.temperatures_U),
                slots_M=tensor(packed.slots_M),
                targets_M=tensor(packed.targets_M),
            ),
            behaviour_M=tensor(packed.behaviour_M),
            advantages_M=tensor(packed.advantages_M),
            weights_M=tensor(packed.weights_M),
            sequences_M=tensor(packed.sequences_M),
            places_M=tensor(packed.places_M),
            num_sequences=int(packed.sequences_M.max()) + 1,
        )


def return_free_memory() -> None:
    """Give freed heap back to the system: glibc keeps it, and step and KV cache would each add to the peak."""
    with suppress(OSError, AttributeError):  # another C library than glibc has no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def _merge(totals: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a part's metrics to the totals; names that end in `_max` take the maximum."""
    for name, value in part.items():
        if name not in totals:
            totals[name] = value
        else:
            totals[name] = max(totals[name], value) if name.endswith("_max") else totals[name] + value


def _over_updates(per_update: list[dict[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for update in per_update:
        _merge(totals, update)
    return {name: value if name.endswith("_max") else value / len(per_update) for name, value in totals.items()}
