"""Whether an experiment fits its GPUs, as a table and, where it does not, the knob to turn and how far.

In: a typed config whose trainer is Megatron's, a model's numbers, a card's memory. Out: `GpuForecast`: the stages'
bytes, lines for `rl360 check`, a problem or a warning. Left to others: the bytes themselves
(rl360.trainers.megatron.memory), which cards there are (rl360.config.files).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rl360.config.forecast import GIB, ModelShape
from rl360.config.schemas import MegatronTrainerConfig, RootConfig
from rl360.errors import ConfigError
from rl360.models.megatron.layout import Layout
from rl360.trainers.megatron.memory import StageForecast, Work, forecast_stages, fullest_stage, padded_tokens

# What a card is taken to have where none can be asked: the smallest of those that large models are trained on.
USUAL_GPU_GIB = 80.0
# The forecast is within 15 % of what was measured; nearer to the limit than this a run may still fail.
MARGIN = 0.10
MOST_ADVICE = 4  # suggestions in one message
RECOMPUTE = ("none", "core_attn", "full")


@dataclass(frozen=True, slots=True)
class Setup:
    """What decides memory: everything that a knob of the trainer changes."""

    model: ModelShape
    layout: Layout
    tokens_per_gpu: int  # trainer.max_tokens_per_gpu
    longest: int  # tokens of an attempt, which gets a micro-batch of its own when it exceeds the budget
    chunk: int
    recompute: str
    compiled: bool
    reference: bool
    fp32_logits: bool = True
    transformer_engine: bool = False
    sequence_parallel: bool = True  # as the key says, which counts once there are tensor ranks

    @classmethod
    def of(cls, config: RootConfig, model: ModelShape) -> Setup:
        """Raises `ConfigError` when the layout does not fit the model."""
        trainer = config.trainer
        assert isinstance(trainer, MegatronTrainerConfig)
        return cls(
            model=model,
            layout=layout_of(trainer, model),
            tokens_per_gpu=trainer.max_tokens_per_gpu,
            longest=config.rollout.max_context_tokens,
            chunk=trainer.logprob_chunk_tokens,
            recompute=trainer.recompute,
            compiled=trainer.compile,
            reference=config.algorithm.kl_coef > 0,
            fp32_logits=config.model.fp32_logits,
            transformer_engine=trainer.transformer_engine,
            sequence_parallel=trainer.sequence_parallel,
        )

    @property
    def tokens(self) -> int:
        """Of the largest micro-batch, over its context-parallel GPUs."""
        return padded_tokens(self.layout, max(self.tokens_per_gpu * self.layout.context, self.longest))

    @property
    def work(self) -> Work:
        return Work(
            self.tokens,
            self.chunk,
            self.recompute,
            self.compiled,
            fp32_logits=self.fp32_logits,
            reference=self.reference,
            transformer_engine=self.transformer_engine,
        )

    def stages(self) -> list[StageForecast]:
        return forecast_stages(self.model, self.layout, self.work)

    @property
    def needed(self) -> int:
        return fullest_stage(self.model, self.layout, self.work).total


@dataclass(frozen=True, slots=True)
class GpuForecast:
    """A setup against a card. `assumed`: nobody could be asked for the card's memory."""

    setup: Setup
    stages: tuple[StageForecast, ...]
    capacity: int
    assumed: bool

    @property
    def needed(self) -> int:
        return max(stage.total for stage in self.stages)

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity

    def message(self) -> str | None:
        """What to say when it does not fit, or barely; None when there is room."""
        stage = max(self.stages, key=lambda s: s.total)
        where = f" of pipeline stage {stage.pipeline_rank}" if len(self.stages) > 1 else ""
        card = f"a GPU has {_gib(self.capacity)}"
        if self.assumed:
            card = f"{_gib(self.capacity)} is assumed of a GPU (cluster.gpu_memory_gib says it)"
        if self.needed <= (1 - MARGIN) * self.capacity:
            return None
        if self.fits:
            return (
                f"trainer: {_gib(self.needed)} forecast on a GPU{where}, {card}: nearer to the limit than the forecast "
                f"is sure of ({MARGIN:.0%})"
            )
        found = [f"{knobs} ({_gib(needed)})" for knobs, needed in advice(self.setup, self.capacity)]
        hint = f"try {', '.join(found)}" if found else "no single knob or pair of them is enough; more GPUs are needed"
        return f"trainer: {_gib(self.needed)} forecast on a GPU{where} at the {stage.fullest}, {card}; {hint}"

    def lines(self) -> list[str]:
        """A table: one row a pipeline stage, GiB by what they are for, at the stage's fullest moment."""
        layout, setup = self.setup.layout, self.setup
        interleaved = f" x {layout.virtual_pipeline} chunks" if layout.virtual_pipeline else ""
        assumed = ", assumed" if self.assumed else ""
        head = (
            f"{layout.world_size} GPUs: tensor {layout.tensor}{' with sequence' if layout.sequence_parallel else ''}, "
            f"context {layout.context}, pipeline {layout.pipeline}{interleaved}, data {layout.data}; micro-batches of "
            f"{setup.tokens:,} tokens, {setup.tokens // layout.context:,} a GPU; recompute {setup.recompute}"
        )
        rows = [["stage", "parameters", *_COLUMNS, "needed", f"of GiB{assumed}", "fullest at"]]
        for stage in self.stages:
            bytes_ = _columns(stage)
            rows.append(
                [
                    str(stage.pipeline_rank),
                    f"{stage.num_parameters:,}",
                    *(f"{bytes_[name] / GIB:.1f}" for name in _COLUMNS),
                    f"{stage.total / GIB:.1f}",
                    f"{self.capacity / GIB:.1f}",
                    stage.fullest,
                ]
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        aligned = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return [head, *aligned]

    def to_dict(self) -> list[dict[str, int]]:
        """Bytes of each stage by what they are for, for plan.json."""
        return [{**stage.parts, "total": stage.total} for stage in self.stages]


# Columns of the table; what has none of its own is "other".
_COLUMNS = ("weights", "gradients", "optimizer", "activations", "passing", "other")
_PASSING = ("one layer's backward", "head")  # alive for a moment


def _columns(stage: StageForecast) -> Mapping[str, int]:
    columns = dict.fromkeys(_COLUMNS, 0)
    for name, count in stage.parts.items():
        columns["passing" if name in _PASSING else name if name in columns else "other"] += count
    return columns


def layout_of(trainer: MegatronTrainerConfig, model: ModelShape | None = None) -> Layout:
    """The trainer's layout. Raises `ConfigError` naming every misfit."""
    return Layout.of(
        trainer.num_gpus,
        trainer.tensor_parallel_size,
        trainer.pipeline_parallel_size,
        trainer.virtual_pipeline_parallel_size,
        trainer.context_parallel_size,
        trainer.sequence_parallel,
        model,
    )


def gpu_forecast(config: RootConfig, model: ModelShape, capacity: int | None) -> GpuForecast:
    """capacity: bytes of one GPU; None: unknown. Raises `ConfigError` when the layout does not fit the model."""
    setup = Setup.of(config, model)
    return GpuForecast(setup, tuple(setup.stages()), capacity or int(USUAL_GPU_GIB * GIB), assumed=capacity is None)


def advice(setup: Setup, capacity: int) -> list[tuple[str, int]]:
    """(keys with the values that fit, bytes then needed), single knobs first, each as little as is enough.

    Where no single knob is enough, pairs that begin with recompute=full.
    """
    found = list(_fitting(setup, capacity))
    if not found and setup.recompute != "full":
        again = replace(setup, recompute="full")
        found = [(f"trainer.recompute=full {knob}", needed) for knob, needed in _fitting(again, capacity)]
    return found[:MOST_ADVICE]


def _fitting(setup: Setup, capacity: int) -> Iterator[tuple[str, int]]:
    """The first value of each knob that fits with its margin, else the first that fits at all."""
    for values in _knobs(setup):
        tried = [(text, changed.needed) for text, changed in values]
        roomy = [found for found in tried if found[1] <= (1 - MARGIN) * capacity]
        yield from (roomy or [found for found in tried if found[1] <= capacity])[:1]


def _knobs(setup: Setup) -> Iterator[list[tuple[str, Setup]]]:
    """Each knob with its further values as overrides, the least costly in speed first."""
    yield [(f"trainer.logprob_chunk_tokens={n}", replace(setup, chunk=n)) for n in _halves(setup.chunk, 64)]
    if setup.layout.tensor > 1 and not setup.layout.sequence_parallel:
        shared = replace(setup, sequence_parallel=True, layout=replace(setup.layout, sequence_parallel=True))
        yield [("trainer.sequence_parallel=true", shared)]
    least = -(-setup.longest // setup.layout.context)  # an attempt is never cut
    budgets = [n for n in _halves(setup.tokens_per_gpu, 256) if n > least]
    if setup.tokens_per_gpu > least:
        budgets.append(least)
    yield [(f"trainer.max_tokens_per_gpu={n}", replace(setup, tokens_per_gpu=n)) for n in budgets]
    later = RECOMPUTE[RECOMPUTE.index(setup.recompute) + 1 :] if setup.recompute in RECOMPUTE else ()
    yield [(f"trainer.recompute={name}", replace(setup, recompute=name)) for name in later]
    yield list(_with_context(setup))
    for axis in ("tensor", "pipeline"):
        resized = [(size, _resized(setup, axis, size)) for size in _larger(setup, axis)]
        yield [
            (f"trainer.{axis}_parallel_size={size}", replace(setup, layout=layout))
            for size, layout in resized
            if layout
        ]
    layout = setup.layout
    yield [
        (f"trainer.num_gpus={layout.world_size * n}", replace(setup, layout=replace(layout, data=layout.data * n)))
        for n in (2, 4, 8)
    ]


def _with_context(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """More context ranks for the same micro-batches: the budget of each GPU shrinks with its share."""
    for size in _larger(setup, "context"):
        if (layout := _resized(setup, "context", size)) is None:
            continue
        budget = min(setup.tokens_per_gpu, -(-setup.tokens // size))
        text = f"trainer.context_parallel_size={size}"
        if budget != setup.tokens_per_gpu:
            text += f" trainer.max_tokens_per_gpu={budget}"
        yield text, replace(setup, layout=layout, tokens_per_gpu=budget)


def _larger(setup: Setup, axis: str) -> list[int]:
    """Multiples of an axis's size that the GPUs could hold."""
    size = int(getattr(setup.layout, axis))
    return list(range(2 * size, setup.layout.world_size + 1, size))


def _resized(setup: Setup, axis: str, size: int) -> Layout | None:
    """The layout with one axis of another size on the same GPUs; None when it does not divide."""
    layout = setup.layout
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context, axis: size}
    try:
        return Layout.of(
            layout.world_size,
            **sizes,
            virtual_pipeline=layout.virtual_pipeline,
            sequence_parallel=setup.sequence_parallel,
            model=setup.model,
        )
    except ConfigError:
        return None


def _halves(start: int, least: int) -> list[int]:
    values = []
    while (start := start // 2) >= least:
        values.append(start)
    return values


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
