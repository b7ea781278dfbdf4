"""Whether two runs differ in nothing but who computes: trainer, engine, gateway.

python benchmarks/same_setup.py ONE.yaml OTHER.yaml

In: two resolved configs (`rl360 run ... --cfg job --resolve`, or a run's resolved.yaml). Out: exit code 1 and every key
that differs and matters. Which keys may differ is a list of names here; whatever is not in it must be equal, so that a
default that changes on one side is found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

# Who computes, and how fast; none of it is in the objective. A name that ends in "." stands for all below it.
MAY_DIFFER = (
    "output_dir",
    "trainer._target_",
    # torch alone. Prompts are shared on a CPU only, and sharing changes no value.
    "trainer.device",
    "trainer.num_threads",
    "trainer.gradient_checkpointing",
    "trainer.share_prompts",
    # Megatron alone
    "trainer.num_gpus",
    "trainer.tensor_parallel_size",
    "trainer.pipeline_parallel_size",
    "trainer.virtual_pipeline_parallel_size",
    "trainer.context_parallel_size",
    "trainer.sequence_parallel",
    "trainer.recompute",
    "trainer.transformer_engine",
    "trainer.compile",
    "trainer.overlap_grad_reduce",
    "trainer.async_checkpoint",
    "trainer.step_timeout_s",
    "trainer.start_timeout_s",
    "trainer.init_method",
    "trainer.rank_target",
    # engines
    "rollout.engine",
    "rollout.sync",
    "rollout.sglang.",
    "rollout.max_running_requests",
    "rollout.kv_cache_gib",
    "gateway.",
)
ABSENT = "(absent)"


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything below `node`; lists are values."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """A line for each key that differs and may not."""
    ones, others = dict(leaves(one)), dict(leaves(other))
    found = []
    for key in sorted({*ones, *others}):
        mine, its = ones.get(key, ABSENT), others.get(key, ABSENT)
        allowed = any(key.startswith(name) if name.endswith(".") else key == name for name in MAY_DIFFER)
        if mine != its and not allowed:
            found.append(f"{key}: {mine} against {its}")
    return found


def main(one: str, other: str) -> int:
    found = differences(*(yaml.safe_load(Path(path).read_text()) for path in (one, other)))
    for line in found:
        print(f"{one} and {other} differ: {line}", file=sys.stderr)
    if not found:
        print(f"{Path(one).name} and {Path(other).name}: the same but for who computes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
