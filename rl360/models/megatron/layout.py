"""How a model and a batch are spread over GPUs: the numbers, and whether they fit together.

In: parallel sizes and, for the check, the architecture's numbers. Out: a `Layout`, the place of each rank in it, which
layers a stage holds, or a `ConfigError` that names every misfit. Pure Python: the config check and the memory forecast
use it where torch is not imported. Process groups are left to parallel.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rl360.errors import ConfigError

VOCAB_MULTIPLE = 128  # Megatron's: the vocabulary is padded to a multiple of this times the tensor-parallel size
# What brings Transformer Engine, named wherever it is missed. It compiles against the torch that is installed.
TE_INSTALL = 'pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]"'


class Architecture(Protocol):
    """What a layout needs to know of a model; `rl360.models.decoder.DecoderConfig` has it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's index along each axis of a layout."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel groups. Ranks are ordered tensor-context-data-pipeline, the tensor index fastest, as
    Megatron's default order "tp-cp-ep-dp-pp" has it.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None  # model chunks of one pipeline rank; None: one, without interleaving
    context: int = 1
    data: int = 1
    sequence_parallel: bool = False  # activations between the matrix products are split over the tensor ranks

    @classmethod
    def of(
        cls,
        num_gpus: int,
        tensor: int = 1,
        pipeline: int = 1,
        virtual_pipeline: int | None = None,
        context: int = 1,
        sequence_parallel: bool = True,
        model: Architecture | None = None,
    ) -> Layout:
        """The layout in which data parallelism takes what the other axes leave of `num_gpus`.

        `sequence_parallel` means nothing with one tensor rank and is then off. With `model` its numbers must divide,
        too. Raises `ConfigError` with every misfit, under the names of the trainer's keys.
        """
        problems = [
            f"trainer.{key}: {size}; expected at least 1"
            for key, size in (
                ("num_gpus", num_gpus),
                ("tensor_parallel_size", tensor),
                ("pipeline_parallel_size", pipeline),
                ("virtual_pipeline_parallel_size", 1 if virtual_pipeline is None else virtual_pipeline),
                ("context_parallel_size", context),
            )
            if size < 1
        ]
        if problems:
            raise ConfigError(problems)
        if virtual_pipeline == 1:
            virtual_pipeline = None
        if virtual_pipeline is not None and pipeline == 1:
            problems.append(
                f"trainer.virtual_pipeline_parallel_size: {virtual_pipeline} with pipeline_parallel_size 1; interleaved"
                " chunks need at least 2 pipeline ranks; use null"
            )
        of_one_replica = tensor * pipeline * context
        if num_gpus % of_one_replica:
            problems.append(
                f"trainer.num_gpus: {num_gpus} is no multiple of tensor {tensor} x pipeline {pipeline} x context"
                f" {context} = {of_one_replica}"
            )
        layout = cls(
            tensor,
            pipeline,
            virtual_pipeline,
            context,
            max(1, num_gpus // of_one_replica),
            sequence_parallel and tensor > 1,
        )
        if model is not None:
            problems += layout.misfits(model)
        if problems:
            raise ConfigError(problems)
        return layout

    def misfits(self, model: Architecture) -> list[str]:
        """What of the model's numbers this layout cannot split evenly; empty: it fits."""
        problems = [
            f"trainer.tensor_parallel_size: {self.tensor} does not divide the model's {count} {what}"
            for what, count in (
                ("attention heads", model.num_heads),
                ("key/value heads", model.num_kv_heads),
                ("values of the MLP's width", model.intermediate_size),
            )
            if count % self.tensor
        ]
        if model.num_layers % self.num_stages:
            by = f"pipeline_parallel_size {self.pipeline}"
            if self.virtual_pipeline:
                by += f" x virtual_pipeline_parallel_size {self.virtual_pipeline}"
            problems.append(
                f"trainer.pipeline_parallel_size: {by} does not divide the model's {model.num_layers} layers"
            )
        return problems

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def chunks(self) -> int:
        """Model chunks of one rank."""
        return self.virtual_pipeline or 1

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def token_multiple(self) -> int:
        """The number of tokens of a micro-batch must be a multiple of this: 2 chunks of equal length a context rank,
        and equal parts of a rank's tokens for its tensor ranks."""
        return self.tensor * (2 * self.context if self.context > 1 else 1)

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches of a data rank must be a multiple of this: the interleaved schedule hands them
        round in sets of one a pipeline rank."""
        return self.pipeline if self.virtual_pipeline else 1

    def place(self, rank: int) -> Place:
        tensor = rank % self.tensor
        context = rank // self.tensor % self.context
        data = rank // (self.tensor * self.context) % self.data
        return Place(tensor, context, data, rank // (self.tensor * self.context * self.data))

    def rank(self, place: Place) -> int:
        return place.tensor + self.tensor * (place.context + self.context * (place.data + self.data * place.pipeline))

    def layers(self, num_layers: int, pipeline_rank: int, chunk: int = 0) -> range:
        """The layers that a chunk of a pipeline rank holds. Stage s is chunk s // pipeline of rank s % pipeline."""
        each = num_layers // self.num_stages
        first = (chunk * self.pipeline + pipeline_rank) * each
        return range(first, first + each)

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows of the embedding and of the head over all tensor ranks; those past the vocabulary are zero."""
        multiple = VOCAB_MULTIPLE * self.tensor
        return -(-vocab_size // multiple) * multiple
