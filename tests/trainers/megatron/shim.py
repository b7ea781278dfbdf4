"""What megatron-core needs to run on a CPU, for tests only: it names CUDA where the device does not matter.

`install` changes torch for the whole process, so it is called in processes of their own (see cpu_rank.py), before a
model is wrapped. Each replacement stands for one kind of call that megatron-core 0.19.2 makes on the way of a step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like")


def install() -> None:
    """Idempotent."""
    if getattr(torch.cuda, "_rl360_shim", False):
        return
    torch.cuda._rl360_shim = True  # type: ignore[attr-defined]
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.Tensor.type = _cuda_names(torch.Tensor.type)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_, **__: _Stream()  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()  # type: ignore[assignment]


class _Stream:
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).partition(":")[0] == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


def _cuda_names(original: Callable[..., Any]) -> Callable[..., Any]:
    """`x.type()` says torch.cuda.FloatTensor: that is how Megatron sorts parameters by dtype."""

    @functools.wraps(original)
    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return named
