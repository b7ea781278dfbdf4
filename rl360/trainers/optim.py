"""AdamW with parameter groups, warm-up, clipping and, below fp32, master weights.

In: named parameters and their gradients. Out: one optimizer step, with the gradient's norm and the learning rate. Left
to others: gradients (torch_trainer.py), files (checkpoint.py).

Weights in fp32 are stepped in place. Weights of a narrower dtype have fp32 masters, which hold the moments and take the
gradients: each micro-batch's gradient is added to the master's in fp32 as soon as it is complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl360.errors import CheckpointError, NonFiniteGradient


def decay_groups(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[list[str], list[str]]:
    """Split parameter names into (with weight decay, without): norms' gains and biases, one-dimensional, have none.

    Megatron does the same (megatron/core/optimizer), so both trainers share this rule.
    """
    decayed: list[str] = []
    plain: list[str] = []
    for name, parameter in named_parameters:
        (decayed if parameter.ndim > 1 else plain).append(name)
    return decayed, plain


def worst_gradient(named_gradients: Iterable[tuple[str, Tensor]]) -> tuple[str, float]:
    """(name, largest magnitude) of the first gradient with a NaN or an infinity, else of the one with the largest."""
    worst = ("no parameter", 0.0)
    for name, gradient in named_gradients:
        peak = float(torch.linalg.vector_norm(gradient, ord=math.inf)) if gradient.numel() else 0.0
        if not math.isfinite(peak):
            return name, peak
        if peak > worst[1]:
            worst = name, peak
    return worst


def norm_error(step: int, norm: float, worst: tuple[str, float]) -> NonFiniteGradient:
    """The error of an optimizer step whose gradient norm is NaN or infinite. worst: as `worst_gradient` gives it."""
    name, peak = worst
    # Finite values can have squares, or a sum of them, beyond fp32.
    where = f"too large for fp32: up to {peak:.2g} in {name}" if math.isfinite(peak) else f"first in {name}"
    return NonFiniteGradient(
        f"optimizer step {step}: gradient norm {norm}, {where}; expected a finite number. The weights were not "
        "changed. Look at trainer.learning_rate, at trainer.max_grad_norm and at the batch's logprobs"
    )


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over a module's trainable parameters.

    Args:
        learning_rate: constant after `warmup_steps`, during which it grows linearly: step i of 1.. uses
            learning_rate * i / warmup_steps.
        max_grad_norm: the gradient is scaled down to this 2-norm; 0: no clipping.
    """

    def __init__(
        self,
        module: nn.Module,
        learning_rate: float,
        warmup_steps: int,
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float,
    ):
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.max_grad_norm = max_grad_norm
        self.num_steps = 0
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._masters = {name: self._master(p) for name, p in self._parameters.items()}
        self._names_of_groups = decay_groups(self._parameters.items())
        groups = [
            {"params": [self._masters[name] for name in names], "weight_decay": decay}
            for names, decay in zip(self._names_of_groups, (weight_decay, 0.0), strict=True)
        ]
        # fused: one pass over memory for all of the update; the step is bound by memory on every device.
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=learning_rate,
            betas=(betas[0], betas[1]),
            eps=eps,
            fused=True,
        )

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        master = nn.Parameter(parameter.detach().float())

        def move_gradient(finished: Tensor) -> None:
            assert finished.grad is not None
            if master.grad is None:
                master.grad = finished.grad.float()
            else:
                master.grad += finished.grad
            finished.grad = None

        parameter.register_post_accumulate_grad_hook(move_gradient)
        return master

    def gradient(self, parameter: Tensor) -> Tensor:
        """The buffer, fp32 (fp64 for an fp64 weight), that a hand-computed gradient of `parameter` is added to."""
        name = next(name for name, p in self._parameters.items() if p is parameter)
        master = self._masters[name]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    @torch.no_grad()
    def step(self) -> tuple[float, float]:
        """Clip, step, and drop the gradients. Returns the gradient's norm before clipping, and the learning rate used.

        Raises:
            NonFiniteGradient: the norm is NaN or infinite; weights and moments are as before, gradients are dropped.
        """
        with_grad = {name: m.grad for name, m in self._masters.items() if m.grad is not None}
        norms = torch._foreach_norm(list(with_grad.values()))
        norm = float(torch.linalg.vector_norm(torch.stack(list(norms)))) if norms else 0.0
        if not math.isfinite(norm):
            worst = worst_gradient(with_grad.items())
            self.drop_gradients()
            raise norm_error(self.num_steps + 1, norm, worst)
        if self.max_grad_norm > 0 and norm > self.max_grad_norm:
            torch._foreach_mul_(list(with_grad.values()), self.max_grad_norm / norm)
        rate = self.learning_rate
        if self.num_steps < self.warmup_steps:
            rate *= (self.num_steps + 1) / self.warmup_steps
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self.num_steps += 1
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                self._parameters[name].copy_(master)
        self.drop_gradients()
        return norm, rate

    def tensors(self) -> list[Tensor]:
        """Masters and moments: what lives from step to step beside the weights."""
        moments = [value for state in self._adam.state.values() for value in state.values() if torch.is_tensor(value)]
        return [*self._masters.values(), *moments]

    def drop_gradients(self) -> None:
        for name, master in self._masters.items():
            master.grad = None
            self._parameters[name].grad = None

    def state(self) -> dict[str, Any]:
        """Masters (fp32 weights themselves included), moments by parameter name, and the step count; no copies."""
        moments = {
            name: {key: self._adam.state[m][key] for key in ("exp_avg", "exp_avg_sq")}
            for name, m in self._masters.items()
            if m in self._adam.state
        }
        masters = {name: m.detach() for name, m in self._masters.items()}
        return {"num_steps": self.num_steps, "masters": masters, "moments": moments}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Copy a saved state in, in place. Raises `CheckpointError`, before anything changed, where it does not fit."""
        masters, moments = state["masters"], state["moments"]
        problems = [
            f"{name}: {'missing' if name not in masters else f'shape {tuple(masters[name].shape)}'}"
            f", expected {tuple(master.shape)}"
            for name, master in self._masters.items()
            if name not in masters or masters[name].shape != master.shape
        ]
        problems += [f"{name}: not a parameter of this model" for name in masters if name not in self._masters]
        if problems:
            raise CheckpointError(f"the checkpoint does not fit the model: {'; '.join(problems[:5])}")
        self.num_steps = int(state["num_steps"])
        for name, master in self._masters.items():
            master.copy_(masters[name])
            if master is not self._parameters[name]:
                self._parameters[name].copy_(master)
            self._adam.state.pop(master, None)
            if name in moments:
                self._adam.state[master] = {
                    "step": torch.tensor(float(self.num_steps), dtype=torch.float32, device=master.device),
                    **{key: value.to(master.device, copy=True) for key, value in moments[name].items()},
                }
