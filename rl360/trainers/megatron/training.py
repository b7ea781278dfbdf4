"""One rank's step: Megatron's schedules over its micro-batches, the algorithm's loss at the head, the optimizer.

In: this data rank's micro-batches. Out: weights one step further, metrics summed over all ranks. Left to others:
processes and groups (rank.py), dealing the batch out (shards.py), checkpoints (checkpoint.py), metrics (metrics.py).

The weights of a batch's tokens add up to 1 over the whole batch, so its gradient is the plain sum over data ranks,
context ranks and micro-batches, however it was cut: nothing is averaged and nothing divided by a token count.

Axes: U predicting positions, M trained tokens of a context rank's part of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn

from rl360.models.decoder import DecoderConfig
from rl360.models.loading import read_config
from rl360.models.megatron.blocks import gather_hidden
from rl360.models.megatron.hf_weights import load_hf
from rl360.models.megatron.model import Chunk, build_model
from rl360.models.megatron.wgrad import complete_in_backward
from rl360.trainers.megatron.head import head_logprobs, head_loss
from rl360.trainers.megatron.metrics import ENTROPY, LOSS, MetricSums, metric_names, over_updates
from rl360.trainers.megatron.optim import ShardedOptimizer
from rl360.trainers.megatron.settings import PEAK_MEMORY, PEAK_RESERVED, TrainingSettings
from rl360.trainers.megatron.work import Targets, Work
from rl360.trainers.mismatch import mismatch_means, mismatch_sums
from rl360.trainers.offload import Offloader
from rl360.trainers.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class Constants:
    """What the loss takes as given in all optimizer steps on one batch, by micro-batch, [M]; absent where not needed
    and on ranks that are no last stage."""

    proximal: Mapping[int, Tensor] = field(default_factory=dict)
    reference: Mapping[int, Tensor] = field(default_factory=dict)
    corrections: Mapping[int, Tensor] = field(default_factory=dict)


class Training:
    """Policy, optimizer and, where the algorithm needs one, reference model of one rank.

    `start_parallel(settings.layout)` must have run. The policy's chunks are wrapped in Megatron's data parallelism,
    whose buffers hold weights and fp32 gradients.
    """

    def __init__(self, settings: TrainingSettings, device: torch.device, dtype: torch.dtype):
        from megatron.core import parallel_state

        self.settings = settings
        self.device = device
        self.config: DecoderConfig = read_config(settings.model_dir)
        self.place = settings.layout.place(distributed.get_rank())
        self.is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self._dtype = dtype
        self.chunks: list[Any] = self._with_buffers(self._build())
        self.reference = self._build() if settings.algorithm.needs_reference else None
        self._metric_names = metric_names(settings.algorithm, device)
        self.optimizer = ShardedOptimizer(
            self.chunks,
            learning_rate=settings.learning_rate,
            warmup_steps=settings.warmup_steps,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            params_dtype=dtype,
        )
        self._offloader = Offloader()

    def unwrapped(self) -> list[nn.Module]:
        """The policy's model chunks themselves."""
        return [chunk.module for chunk in self.chunks]

    def _build(self) -> list[nn.Module]:
        settings = self.settings
        chunks = build_model(
            self.config,
            settings.layout,
            params_dtype=self._dtype,
            device=self.device,
            recompute=settings.recompute,
            compiled=settings.compile and self.device.type == "cuda",
            transformer_engine=settings.transformer_engine,
            random_init_seed=settings.random_init_seed,
        )
        if settings.random_init_seed is None:
            load_hf(chunks, self.config, settings.layout, settings.model_dir)
        return chunks

    def _with_buffers(self, chunks: list[nn.Module]) -> list[Any]:
        from megatron.core.distributed import finalize_model_grads

        from rl360.trainers.megatron.buffers import with_buffers

        def finalize(model: Any, num_tokens: Any, **others: Any) -> None:
            finalize_model_grads(model, None, **others)  # sums, divided by nothing

        layout = self.settings.layout
        overlap = self.settings.overlap_grad_reduce and layout.data * layout.context > 1
        wrapped = with_buffers(chunks, overlap)
        config = cast(Chunk, chunks[0]).config
        config.finalize_model_grads_func = finalize
        if overlap:
            # The schedules hold the exchange back until a step's last micro-batch.
            no_sync = [chunk.no_sync for chunk in wrapped]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        return wrapped

    # ---- a step

    def step(self, micro_batches: SequenceABC[MicroBatch], num_trained_tokens: int) -> dict[str, float]:
        """Run the algorithm's `updates_per_batch` optimizer steps over this data rank's micro-batches.

        Every data rank must have as many. Returns metrics under the names of the torch trainer, summed over all ranks
        (`num_trained_tokens` of the whole batch divides the entropy); they are complete on ranks of the last stage,
        others have the norm, the learning rate and, on a GPU, what their own device held at most during the step
        (GiB: tensors, and what the allocator kept for them).

        Raises:
            NonFiniteGradient: on every rank; the weights are as before that optimizer step.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        works = self._works(micro_batches)
        updates = self.settings.algorithm.updates_per_batch
        constants = self.constants(works)
        per_update = []
        for _ in range(updates):
            sums = self.backward(works, constants)
            norm, rate = self.optimizer.step()
            totals = sums.over_ranks(self._metric_names, self.device) if self.is_last_stage else {}
            if ENTROPY in totals:
                totals[ENTROPY] /= num_trained_tokens
            per_update.append({**mismatch_means(totals), "train/grad_norm": norm, "train/lr": rate})
        metrics = over_updates(per_update)
        if self.device.type == "cuda":
            metrics[PEAK_MEMORY] = torch.cuda.max_memory_allocated(self.device) / 2**30
            metrics[PEAK_RESERVED] = torch.cuda.max_memory_reserved(self.device) / 2**30
        return metrics

    def constants(self, works: SequenceABC[Work]) -> Constants:
        """Passes over the batch before its first optimizer step, where the algorithm needs them."""
        by_sequence = self.settings.algorithm.needs_sequence_ratios
        # With one update the proximal policy is the current one, and its logprobs come from the same forward.
        needs_proximal = by_sequence or self.settings.algorithm.updates_per_batch > 1
        proximal = self._logprobs(self.chunks, works) if needs_proximal else {}
        return Constants(
            proximal,
            self._logprobs(self.reference, works) if self.reference else {},
            self._corrections(works, proximal) if by_sequence else {},
        )

    def backward(self, works: SequenceABC[Work], constants: Constants) -> MetricSums:
        """Leave the gradient of the whole batch in the buffers (each data rank has its part); return metric sums."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        sums = MetricSums()

        def loss(work: Work, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            return self._loss(work, hidden, sums, constants), torch.zeros((), dtype=torch.int), {}

        self._run(self.chunks, works, loss, forward_only=False)
        return sums

    def logprobs(self, micro_batches: SequenceABC[MicroBatch]) -> list[NDArray[np.float32]] | None:
        """Logprobs of each micro-batch's trained tokens, [M] in its order; None on ranks that are no last stage."""
        works = self._works(micro_batches)
        found = self._logprobs(self.chunks, works)
        if not self.is_last_stage:
            return None
        whole = []
        for work in works:
            targets = _targets(work)
            values = torch.zeros(targets.num_tokens, dtype=torch.float32, device=self.device)
            values[torch.from_numpy(targets.tokens_M).to(self.device)] = found[work.index].float()
            if self.settings.layout.context > 1:
                from megatron.core import parallel_state

                distributed.all_reduce(values, group=parallel_state.get_context_parallel_group())
            whole.append(values.cpu().numpy())
        return whole

    # ---- memory

    def offload(self) -> int:
        """Move what lives from step to step to host memory; returns the bytes that the device has back."""
        return self._offloader.offload(*self._resident())

    def onload(self) -> None:
        """Undo `offload`."""
        self._offloader.onload()

    def trim(self) -> None:
        """Give what only a step needs of the device back; gradients may be zero afterwards."""
        self._offloader.trim(*self._resident())

    def close(self) -> None:
        """Give the host's memory for an offload back."""
        self._offloader.close()

    def _resident(self) -> tuple[list[Tensor], list[Tensor]]:
        """What lives from step to step, and gradients, whose memory does."""
        buffers = [buffer for chunk in self.chunks for buffer in chunk.buffers]
        keep = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        keep += [p for chunk in self.chunks + (self.reference or []) for p in chunk.parameters()]
        for adam in self.optimizer.adams():
            keep += [p for group in adam.param_groups for p in group["params"]]
            keep += [value for state in adam.state.values() for value in state.values() if torch.is_tensor(value)]
        return keep, [buffer.grad_data for buffer in buffers]

    # ---- parts of a step

    def _works(self, micro_batches: SequenceABC[MicroBatch]) -> list[Work]:
        return [
            Work.of(
                index,
                micro,
                self.device,
                context_size=self.settings.layout.context,
                context_rank=self.place.context,
                with_targets=self.is_last_stage,
            )
            for index, micro in enumerate(micro_batches)
        ]

    def _run(
        self,
        chunks: SequenceABC[Any],
        works: SequenceABC[Work],
        loss: Callable[[Work, Tensor], Any],
        forward_only: bool,
    ) -> None:
        """Megatron's schedule of this layout; `loss` is called on last stages, micro-batches in order."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(iterator: Iterator[Work], chunk: Any) -> tuple[Tensor, Any]:
            work = next(iterator)
            return chunk(work.packed), partial(loss, work)

        iterators = [iter(works) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(works),
            seq_length=works[0].packed.num_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    @torch.no_grad()
    def _logprobs(self, chunks: SequenceABC[Any], works: SequenceABC[Work]) -> dict[int, Tensor]:
        """Logprobs of this context rank's trained tokens by micro-batch; empty on ranks that are no last stage."""
        found: dict[int, Tensor] = {}

        def keep(work: Work, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            hidden_U, head = self._predicting(work, hidden, chunks)
            found[work.index] = head_logprobs(hidden_U, head.output_weight, **self._head_arguments(work, head))
            return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), {}

        self._run(chunks, works, keep, forward_only=True)
        return found

    def _predicting(self, work: Work, hidden: Tensor, chunks: SequenceABC[Any]) -> tuple[Tensor, Chunk]:
        """Hidden states [U, F] that something is predicted from, and the chunk that has the head."""
        head = cast(Chunk, getattr(chunks[-1], "module", chunks[-1]))
        whole = gather_hidden(hidden.squeeze(1), head.setting)
        return whole.index_select(0, _targets(work).rows_U), head

    def _head_arguments(self, work: Work, head: Chunk) -> dict[str, Any]:
        return {
            "predictions": _targets(work).predictions,
            "chunk": self.settings.logprob_chunk_tokens,
            "group": head.setting.group,
            "vocab_start": self.place.tensor * head.output_weight.shape[0],
            "vocab_size": self.config.vocab_size,
            "fp32_logits": self.settings.fp32_logits,
            "compiled": self.settings.compile and self.device.type == "cuda",
        }

    def _corrections(self, works: SequenceABC[Work], proximal: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Each token's part of its sequence's weight, where the algorithm weighs whole sequences."""
        from megatron.core import parallel_state

        found: dict[int, Tensor] = {}
        for work in works if self.is_last_stage else ():
            targets = _targets(work)
            differences_M = proximal[work.index] - targets.behaviour_M
            sums_2S = differences_M.new_zeros(2, targets.num_sequences)
            sums_2S[0].index_add_(0, targets.sequences_M, differences_M)
            sums_2S[1].index_add_(0, targets.sequences_M, torch.ones_like(differences_M))
            if self.settings.layout.context > 1:
                distributed.all_reduce(sums_2S, group=parallel_state.get_context_parallel_group())
            weights_S = self.settings.algorithm.sequence_correction(sums_2S[0], sums_2S[1])
            found[work.index] = weights_S[targets.sequences_M]
        return found

    def _loss(self, work: Work, hidden: Tensor, sums: MetricSums, constants: Constants) -> Tensor:
        """A scalar whose backward pass is that of the algorithm's loss of one micro-batch."""
        targets = _targets(work)
        proximal_M = constants.proximal.get(work.index)
        reference_M = constants.reference.get(work.index)
        correction_M = constants.corrections.get(work.index)
        chunks: list[Tensor] = []  # logprobs of this very pass, in the order of M

        def token_loss(tokens: slice, logprobs_M: Tensor) -> Tensor:
            with torch.enable_grad():
                current_M = logprobs_M.detach().requires_grad_()
                loss, metrics = self.settings.algorithm.loss(
                    current_M,
                    logprobs_M if proximal_M is None else proximal_M[tokens],
                    targets.behaviour_M[tokens],
                    targets.advantages_M[tokens],
                    targets.weights_M[tokens],
                    None if reference_M is None else reference_M[tokens],
                    *(() if correction_M is None else (correction_M[tokens],)),
                )
                (grad_M,) = torch.autograd.grad(loss, current_M)
            chunks.append(logprobs_M.detach())
            sums.add({LOSS: loss.detach(), **metrics})
            return grad_M

        hidden_U, head = self._predicting(work, hidden, self.chunks)
        weight: Any = head.output_weight
        loss, entropy_sum = head_loss(
            hidden_U, weight, token_loss=token_loss, head_grad=weight.main_grad, **self._head_arguments(work, head)
        )
        sums.add({ENTROPY: entropy_sum})
        if chunks:
            before_M = torch.cat(chunks) if proximal_M is None else proximal_M
            sums.add(mismatch_sums(before_M, targets.behaviour_M, targets.weights_M, targets.places_M))
        is_embedding_too = head.share_embeddings_and_output_weights and head.pre_process
        return loss if is_embedding_too else complete_in_backward(loss, weight)


def _targets(work: Work) -> Targets:
    assert work.targets is not None, "only a last stage has targets"
    return work.targets
