"""AdamW on Megatron's distributed optimizer: the groups, warm-up and clipping of the torch trainer.

In: model chunks wrapped in Megatron's DistributedDataParallel, their gradients reduced. Out: one optimizer step, with
the gradient's norm and the learning rate. Left to others: gradients and their reduction (training.py), files
(checkpoint.py).

Masters (fp32 copies of narrower weights) and moments are split over data and context ranks; each steps its part and
gathers the weights. What Megatron would leave to a scheduler of its own (the learning rate, no decay on one-dimensional
parameters) is set here before each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rl360.models.megatron.hf_weights import named_parameters
from rl360.trainers.optim import decay_groups, norm_error, worst_gradient


@contextmanager
def _torchs_adam() -> Iterator[None]:
    """Megatron builds torch's AdamW, also where Transformer Engine or Apex is installed, whose own it would prefer.

    Those read no `grad_scale`, so clipping would end without a word, and count steps elsewhere than checkpoints do.
    """
    from megatron.core import optimizer as module

    names: Any = module
    before = names.Adam, names.USING_PYTORCH_OPTIMIZER
    names.Adam, names.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    try:
        yield
    finally:
        names.Adam, names.USING_PYTORCH_OPTIMIZER = before


class ShardedOptimizer:
    """AdamW over this rank's parameters; arguments as `rl360.trainers.optim.Optimizer`."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        learning_rate: float,
        warmup_steps: int,
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float,
        params_dtype: torch.dtype,
    ):
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
        from megatron.core.optimizer_param_scheduler import ParamGroupOverride

        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.max_grad_norm = max_grad_norm
        self.num_steps = 0
        self._chunks = chunks
        _, plain = decay_groups(named_parameters(chunks))  # type: ignore[arg-type]
        undecayed = {id(parameter) for name, parameter in named_parameters(chunks) if name in set(plain)}
        key = ParamKey(predicate=ParamPredicate(name="no_decay", fn=lambda parameter: id(parameter) in undecayed))
        config = OptimizerConfig(
            optimizer="adam",
            lr=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=betas[0],
            adam_beta2=betas[1],
            adam_eps=eps,
            clip_grad=0.0,
            bf16=params_dtype == torch.bfloat16,
            params_dtype=params_dtype,
            use_distributed_optimizer=True,
        )
        no_decay = ParamGroupOverride(wd_mult=0.0)
        with _torchs_adam():
            self.megatron = get_megatron_optimizer(
                config, list(chunks), config_overrides={key: no_decay}, use_gloo_process_groups=False
            )

    @torch.no_grad()
    def step(self) -> tuple[float, float]:
        """Clip and step. Returns the gradient's norm before clipping, over all ranks, and the learning rate used.

        Raises:
            NonFiniteGradient: on every rank; the norm is NaN or infinite, and weights and moments are as before.
        """
        self.megatron.prepare_grads()
        norm = float(self._norm())
        if not math.isfinite(norm):
            raise norm_error(self.num_steps + 1, norm, self._worst_gradient())
        rate = self.learning_rate
        if self.num_steps < self.warmup_steps:
            rate *= (self.num_steps + 1) / self.warmup_steps
        scale = norm / self.max_grad_norm if self.max_grad_norm > 0 and norm > self.max_grad_norm else None
        for adam in self.adams():
            for group in adam.param_groups:
                group["lr"] = rate
                group["weight_decay"] = self.weight_decay * group["wd_mult"]
                group["fused"], group["foreach"] = True, False
            # The fused step divides gradients by this as it reads them: clipping costs no pass of its own.
            device = adam.param_groups[0]["params"][0].device if adam.param_groups[0]["params"] else "cpu"
            adam.grad_scale = None if scale is None else torch.tensor(scale, dtype=torch.float32, device=device)
        self.megatron.step_with_ready_grads()
        self.num_steps += 1
        return norm, rate

    def adams(self) -> list[Any]:
        """The torch optimizers inside."""
        return [part.optimizer for part in self.megatron.chained_optimizers if part.optimizer is not None]

    def _norm(self) -> Tensor:
        """2-norm of the gradient over all ranks; what several ranks hold a copy of counts once."""
        grads: list[Tensor] = []
        for part in self.megatron.chained_optimizers:
            grads += part.get_grads_for_grad_norm()
        device = next(self._chunks[0].parameters()).device
        total = torch.zeros((), dtype=torch.float32, device=device)
        if grads:
            total = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(grads)))).square()
        distributed.all_reduce(total, group=self.megatron.get_grad_stats_parallel_group())
        return total.sqrt()

    def _worst_gradient(self) -> tuple[str, float]:
        """As `worst_gradient`, over all ranks, and the same on each of them."""
        gradients: Iterator[tuple[str, Any]] = ((name, p.main_grad) for name, p in named_parameters(self._chunks))  # type: ignore[attr-defined]
        group = self.megatron.get_grad_stats_parallel_group()
        found: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(found, worst_gradient(gradients), group=group)
        return next((one for one in found if not math.isfinite(one[1])), max(found, key=lambda one: one[1]))
