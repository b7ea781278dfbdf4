"""A training rank on the CPU (gloo, fp32), with what tests ask of it. Runs in processes of its own only."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from rl360.models.megatron.hf_weights import named_parameters, parts
from rl360.trainers.megatron.rank import MegatronRank
from tests.trainers.megatron.shim import install


class CpuRank(MegatronRank):
    """`rank_target` of the tests."""

    dtype = torch.float32
    backend = "gloo"
    _round = 0

    def _hardware(self) -> tuple[torch.device, torch.dtype, str]:
        torch.set_num_threads(1)
        install()
        from rl360.trainers.megatron import buffers

        buffers.MIN_BUCKET_ELEMENTS, buffers.BUCKET_ELEMENTS_PER_RANK = 3000, 0  # several even in a tiny model
        return torch.device("cpu"), self.dtype, self.backend

    # ---- one set of processes, many cases

    async def again(self, changes: dict[str, Any]) -> None:
        """Another layout, or other settings, in the same processes; the number of ranks stays."""
        await self._run(self._again, changes)

    def _again(self, changes: dict[str, Any]) -> None:
        from rl360.models.megatron.parallel import stop_parallel

        self._training = None
        stop_parallel()
        # Megatron only forgets its groups. Each of gloo's keeps sockets and threads, so all of them end here.
        distributed.destroy_process_group()
        gc.collect()
        self._round += 1
        store = distributed.PrefixStore(f"round-{self._round}", self._store)
        size = self.settings.layout.world_size
        distributed.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=size, timeout=self._timeout
        )
        dtype = changes.pop("dtype", self.dtype)
        self.settings = replace(self.settings, **changes)
        self._training = self._train(torch.device("cpu"), dtype)

    async def gradients(self, micro_batches: Any) -> dict[str, Tensor]:
        """The whole batch's gradient under HF names, whole tensors; on rank 0 those of every stage."""
        return await self._run(self._gradients, micro_batches)

    def _gradients(self, micro_batches: Any) -> dict[str, Tensor]:
        training = self.training
        works = training._works(micro_batches)
        training.backward(works, training.constants(works))
        # The reduced gradients are spread over the data and context ranks: sum what each has reduced.
        for chunk in training.chunks:
            for buffer in chunk.buffers:
                for bucket in buffer.buckets:
                    own = bucket.grad_data.chunk(buffer.data_parallel_world_size)
                    mine = own[buffer.data_parallel_group.rank()].clone()
                    distributed.all_gather(list(own), mine, group=buffer.data_parallel_group)
        return self._whole({name: p.main_grad for name, p in named_parameters(training.chunks)})

    async def weights(self) -> dict[str, Tensor]:
        """As `gradients`, of the weights."""
        return await self._run(
            lambda: self._whole({name: p.detach() for name, p in named_parameters(self.training.chunks)})
        )

    def _whole(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        place, config = self.training.place, self.training.config
        # Distinct values of the same HF element (a copy on another data rank) are left out: first of their kind only.
        own = {} if place.data or place.context else {name: value.clone() for name, value in mine.items()}
        gathered: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(gathered, (place.tensor, own))
        pieces: dict[str, list[tuple[Any, Tensor]]] = {}
        for tensor_rank, values in gathered:
            for name, value in values.items():
                for part in parts(name, config, tensor_rank, self.settings.layout.tensor):
                    piece = value.narrow(part.axis, part.at, part.length)
                    pieces.setdefault(part.hf_name, []).append((part, piece))
        found: dict[str, Tensor] = {}
        for hf_name, of_name in pieces.items():
            part, piece = of_name[0]
            shape = list(piece.shape)
            shape[part.axis] = max(p.start + p.length for p, _ in of_name)
            whole = torch.full(shape, float("nan"), dtype=piece.dtype)
            for part, piece in of_name:
                whole.narrow(part.axis, part.start, part.length).copy_(piece)
            found[hf_name] = whole
        return found

    async def groups(self) -> dict[str, tuple[float, float]]:
        """{parameter: (learning rate, weight decay)} of the optimizer's groups, on the ranks that have a part of it."""
        return await self._run(self._groups)

    def _groups(self) -> dict[str, tuple[float, float]]:
        found: dict[str, tuple[float, float]] = {}
        for part in self.training.optimizer.megatron.chained_optimizers:
            names = {id(p): name for name, p in named_parameters(self.training.chunks)}
            model_groups = [a + b for a, b in zip(part.model_float16_groups, part.model_fp32_groups, strict=True)]
            for group, model_group in zip(part.optimizer.param_groups, model_groups, strict=True):
                found |= {names[id(p)]: (group["lr"], group["weight_decay"]) for p in model_group}
        return found

    async def num_buckets(self) -> int:
        return await self._run(
            lambda: sum(len(buffer.buckets) for chunk in self.training.chunks for buffer in chunk.buffers)
        )

    async def bytes_held(self) -> int:
        """Of weights, gradients, masters and moments."""
        training = self.training
        tensors = [p for chunk in training.chunks + (training.reference or []) for p in chunk.parameters()]
        tensors += [buffer.grad_data for chunk in training.chunks for buffer in chunk.buffers]
        for adam in training.optimizer.adams():
            tensors += [value for state in adam.state.values() for value in state.values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    async def fail(self, how: str) -> None:
        """hang: the rank's thread sleeps, so its next call waits. raise: its next step is an error of its own."""
        if how == "hang":
            self._thread.submit(time.sleep, 3600)
        else:
            self._training = None
