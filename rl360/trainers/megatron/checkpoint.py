"""Training checkpoints of the Megatron trainer: weights, masters, moments and step of one rank, to files and back.

In: a rank's `Training`. Out: `iter_<version>/` in Megatron's torch_dist format, and everything restored under another
layout. Left to others: when to save and which folders to keep (rl360.engine.state), HF folders (publish.py).

The tensors have the names and shapes of Megatron's own "fully reshardable" checkpoints: each of the optimizer's is the
size of its parameter. Megatron makes them by gathering the optimizer's state over the data ranks. Here each rank writes
the boxes that its share of the flattened parameters covers, and reads back the boxes of the share it has now, whatever
the shares were: no exchange, no copy of what others hold. Restoring sets masters, moments and step by hand, for
`DistributedOptimizer.load_state_dict` without Transformer Engine loses the step, and lets all parameters share one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from rl360.errors import CheckpointError, RL360Error
from rl360.models.architecture import another_model, identity
from rl360.models.megatron import hf_weights, torch_dist
from rl360.models.megatron.convert import COMMON, extra_states, refuse_unknown, weights_folder
from rl360.models.megatron.hf_weights import EMBEDDING, HEAD, Piece, named_parameters, pieces, stacked_keys
from rl360.models.megatron.torch_dist import Box, Object, Reader

if TYPE_CHECKING:
    from rl360.trainers.megatron.training import Training

FORMAT = 1  # of OWN_KEY; grows when its entries change
OWN_KEY = "rl360"  # what Megatron has no place for, in the common state
RNG_KEY = "rl360_rng"
MASTER, MOMENTS = "param", ("exp_avg", "exp_avg_sq")  # Megatron's names of the optimizer's tensors
OPTIMIZER_PREFIX = "optimizer.state."


def iteration_folder(folder: Path, version: int) -> Path:
    """Megatron's name for an iteration's folder."""
    return folder / f"iter_{version:07d}"


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of one parameter: elements [start, end) of it, flattened; masters and moments have that size."""

    name: str
    parameter: Tensor
    start: int
    end: int
    adam: torch.optim.Optimizer
    master: torch.nn.Parameter

    @property
    def weights(self) -> Tensor:
        return self.parameter.detach().view(-1)[self.start : self.end]


class RankCheckpoint:
    """Saves and restores one rank. Every method but `finish` is a collective over all ranks, on the rank's thread."""

    def __init__(self, training: Training):
        self.training = training
        # Of its own: the write goes on in the background while the other groups train.
        self._group = distributed.new_group(backend="gloo")
        self._write: Future[None] | None = None

    def begin(self, folder: Path, version: int) -> None:
        """Copy everything to host memory and start writing it to `folder/iter_<version>`.

        When it returns the rank may train on. Raises what went wrong in an earlier write.
        """
        self.finish()
        training = self.training
        if training._offloader.is_offloaded:
            raise RL360Error("the trainer's weights are offloaded; onload comes before a checkpoint")
        boxes = list(self._boxes())
        common = {
            **COMMON,
            "iteration": version,
            "optimizer": {
                "optimizer": {"param_groups": self._param_groups()},
                "param_state_sharding_type": "fully_reshardable",
            },
            OWN_KEY: {
                "format": FORMAT,
                "version": version,
                "num_steps": training.optimizer.num_steps,
                "model": identity(training.config),
            },
        }
        rank, size = distributed.get_rank(), distributed.get_world_size()
        objects = [Object(RNG_KEY, _random_state(training.device), rank, size)]
        if rank == 0:
            objects += extra_states(training.config)
        done: Future[None] = Future()

        def write() -> None:
            try:
                torch_dist.write(iteration_folder(folder, version), boxes, common, objects, self._group)
                done.set_result(None)
            except BaseException as error:  # handed to whoever calls `finish`
                done.set_exception(error)
            finally:
                boxes.clear()  # the copies

        self._write = done
        threading.Thread(target=write, name="checkpoint", daemon=True).start()

    @property
    def writing(self) -> Future[None] | None:
        """The write in hand, or the last one until `finish` was called."""
        return self._write

    def finish(self) -> None:
        """Wait until the write in hand is complete on every rank. Raises what went wrong in it."""
        write, self._write = self._write, None
        if write is not None:
            write.result()

    def restore(self, folder: Path) -> int:
        """Take over what `begin` wrote, under any layout; returns the version.

        Raises:
            CheckpointError: incomplete, of another model, or of another program; names the first tensor that does not
                fit, and its file. Nothing was changed unless a data file is damaged.
        """
        self.finish()
        training = self.training
        iteration = weights_folder(folder)
        reader = Reader(iteration)
        own = reader.common().get(OWN_KEY)
        if not isinstance(own, dict) or own.get("format") != FORMAT:
            raise CheckpointError(
                f"{iteration}: no training checkpoint of this version of RL360 (format {FORMAT}); expected one that "
                "`save` wrote. Weights alone are converted with rl360 model convert, and named by model.path"
            )
        self._check(reader, moments=own["num_steps"] > 0)
        difference = another_model(training.config, own.get("model", {}))
        if difference is not None:  # with every shape in place
            raise CheckpointError(f"{iteration}: the chosen model's {difference}")
        for share in self._shares():
            self._restore(reader, share, own["num_steps"])
        for chunk in training.chunks:
            chunk.start_param_sync(force_sync=True)  # each rank has set its own share of the weights
        training.optimizer.num_steps = own["num_steps"]
        _set_random_state(reader, training.device)
        return int(own["version"])

    # ---- inside

    def _shares(self) -> Iterator[Share]:
        names = {id(parameter): name for name, parameter in named_parameters(self.training.chunks)}
        for part in self.training.optimizer.megatron.chained_optimizers:
            for parameter in part.model_param_gbuf_map:
                group, order = part.model_param_group_index_map[parameter]
                master = part.optimizer.param_groups[group]["params"][order]
                interval = part._get_model_param_range_map(parameter)["param"]
                yield Share(names[id(parameter)], parameter, interval.start, interval.end, part.optimizer, master)

    def _boxes(self) -> Iterator[Box]:
        """What this rank writes, copied: its shares, but for what another rank has the original of."""
        place, config = self.training.place, self.training.config
        for share in self._shares():
            if share.name == HEAD and config.tie_word_embeddings:
                continue  # the last stage's copy of the first stage's embedding
            if hf_weights.is_replicated(share.name) and place.tensor > 0:
                continue
            keys, layer = stacked_keys(share.name)
            state = share.adam.state.get(share.master, {})
            optimizer_tensors = {MASTER: share.master, **{key: state[key] for key in MOMENTS if key in state}}
            copies = [(key, _copy(share.weights)) for key in keys]
            copies += [
                (f"{OPTIMIZER_PREFIX}{kind}.{keys[0]}", _copy(tensor)) for kind, tensor in optimizer_tensors.items()
            ]
            for piece in self._pieces(share):
                whole, offset, shape = self._place(share.name, layer, piece)
                for key, copy in copies:
                    part = copy[piece.at : piece.at + _size(piece)]
                    yield Box(key, whole, offset, shape, copy.dtype, partial(Tensor.view, part, shape))

    def _pieces(self, share: Share) -> list[Piece]:
        training = self.training
        return pieces(
            share.name,
            training.config,
            training.place.tensor,
            training.settings.layout.tensor,
            share.start,
            share.end,
        )

    def _place(
        self, name: str, layer: int | None, piece: Piece
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """(shape of the whole, offset, shape) of a piece in the checkpoint, where layers are stacked."""
        config = self.training.config
        whole = hf_weights.parameter_shape(name, config)
        if layer is None:
            return whole, piece.offset, piece.shape
        return (config.num_layers, *whole), (layer, *piece.offset), (1, *piece.shape)

    def _param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's settings, for readers that are Megatron itself; RL360 takes its own from the run's config."""
        plain = (bool, int, float, str, tuple, type(None))
        return [
            {**{k: v for k, v in group.items() if isinstance(v, plain)}, "step": self.training.optimizer.num_steps}
            for adam in self.training.optimizer.adams()
            for group in adam.param_groups
        ]

    def _source(self, name: str) -> str:
        """The parameter whose values `name` has: a tied head is the embedding."""
        return EMBEDDING if name == HEAD and self.training.config.tie_word_embeddings else name

    def _check(self, reader: Reader, moments: bool) -> None:
        """Names and shapes of the whole model's tensors, in its order: every rank finds the same first misfit."""
        config = self.training.config
        kinds = (MASTER, *MOMENTS) if moments else (MASTER,)
        for name in hf_weights.parameter_names(config):
            keys, layer = stacked_keys(name)
            shape = hf_weights.parameter_shape(name, config)
            expected = shape if layer is None else (config.num_layers, *shape)
            for key in [keys[0], *(f"{OPTIMIZER_PREFIX}{kind}.{keys[0]}" for kind in kinds)]:
                found = reader.shape(key)
                if found != expected:
                    raise CheckpointError(
                        f"{reader.folder / torch_dist.METADATA}: tensor {key} has shape {list(found)}, the model's is "
                        f"{list(expected)}"
                    )
        refuse_unknown(reader, config)

    def _restore(self, reader: Reader, share: Share, num_steps: int) -> None:
        keys, layer = stacked_keys(self._source(share.name))
        found: dict[str, Tensor] = {}
        wanted = []
        for kind in (MASTER, *MOMENTS) if num_steps else (MASTER,):
            # Zeros: padding of the vocabulary, which the checkpoint need not have.
            found[kind] = torch.zeros(share.end - share.start, dtype=share.master.dtype)
            for piece in self._pieces(share):
                _, offset, shape = self._place(share.name, layer, piece)
                target = found[kind][piece.at : piece.at + _size(piece)].view(shape)
                wanted.append((f"{OPTIMIZER_PREFIX}{kind}.{keys[0]}", offset, target))
        reader.read_into(wanted)
        with torch.no_grad():
            share.master.copy_(found[MASTER])
            share.weights.copy_(found[MASTER])
            if not num_steps:
                share.adam.state.pop(share.master, None)
                return
            state = share.adam.state[share.master]
            # One tensor a parameter: shared, each of them would advance it.
            state["step"] = torch.tensor(float(num_steps), dtype=torch.float32, device=share.master.device)
            for kind in MOMENTS:
                if kind in state:
                    state[kind].copy_(found[kind])
                else:
                    state[kind] = found[kind].to(share.master.device, copy=True)


def _size(piece: Piece) -> int:
    size = 1
    for length in piece.shape:
        size *= length
    return size


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).view(-1)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def _set_random_state(reader: Reader, device: torch.device) -> None:
    """This rank's own. With another number of ranks there is none: it stays as it is, and no step draws from it."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    state = reader.object(Object(RNG_KEY, None, rank, size))
    if state is None:
        return
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
