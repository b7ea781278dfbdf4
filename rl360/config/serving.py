"""What rollout=sglang asks of the rest of an experiment: ways for weights, GPUs, ports, and sharing with the trainer.

In: a typed config. Out: problems as `key: what; expected; try`, and what servers of somebody else cannot be told. Left
to others: single values (combinations.py), GPUs of Megatron ranks beside servers (megatron.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from rl360.config.schemas import MegatronTrainerConfig, RootConfig, SGLangConfig
from rl360.gateway.ports import LAST_PORT
from rl360.serving.ports import PORTS_PER_SERVER
from rl360.serving.secrets import CONFIG_FLAG, is_secret_flag

FP32_LOGITS_FLAG = "--enable-fp32-lm-head"  # of SGLang; rl360.serving.command passes it
# Flags without which the run does not find its servers, or holds other weights for theirs: the last on a command line
# wins, and that would only be noticed when they have started, or not at all. Flag -> the key that stands for it.
_OURS = {
    "--model-path": "model.path",
    "--model": "model.path",
    "--host": "gateway.host",
    "--port": "rollout.sglang.base_port",
    "--nccl-port": "rollout.sglang.base_port",
    "--tp-size": "rollout.sglang.tensor_parallel_size",
    "--tensor-parallel-size": "rollout.sglang.tensor_parallel_size",
    "--tp": "rollout.sglang.tensor_parallel_size",
    "--dtype": "rollout.sglang.dtype",
    "--context-length": "rollout.max_context_tokens",
    "--random-seed": "seed",
    "--weight-version": "",
}


def last_server_port(settings: SGLangConfig) -> int:
    """Of the servers' own, which follow `base_port`."""
    return settings.base_port + PORTS_PER_SERVER * settings.num_servers - 1


def serving_problems(config: RootConfig) -> Iterator[str]:
    """Of an experiment with engine sglang."""
    rollout, sglang = config.rollout, config.rollout.sglang
    if rollout.engine_urls:
        yield "rollout.engine_urls: given with engine sglang, which starts its own; expected none, or rollout=external"
    if rollout.sync == "shared":
        yield "rollout.sync: shared needs the embedded engine (one process); expected disk, ipc or nccl with sglang"
    if sglang.colocated:
        yield from _colocated(config)
    needed = sglang.num_servers * sglang.tensor_parallel_size
    if sglang.devices and len(sglang.devices) < needed:
        yield (
            f"rollout.sglang.devices: {len(sglang.devices)} of them for {sglang.num_servers} servers of "
            f"{sglang.tensor_parallel_size} GPUs; expected {needed}"
        )
    if len(set(sglang.devices)) != len(sglang.devices):
        yield "rollout.sglang.devices: the same GPU twice; expected each once"
    if negative := [number for number in sglang.devices if number < 0]:
        yield f"rollout.sglang.devices: {', '.join(map(str, negative))}; expected numbers of GPUs, from 0"
    keyed = config.gateway.api_key_env is not None
    for key, words in (("command", sglang.command), ("extra_args", sglang.extra_args)):
        for name in dict.fromkeys(word.partition("=")[0] for word in words):
            if is_secret_flag(name):
                yield f"rollout.sglang.{key}: {name} would store a secret; name the variable in gateway.api_key_env"
            elif name == CONFIG_FLAG and keyed:
                yield (
                    f"rollout.sglang.{key}: {name} with gateway.api_key_env: SGLang takes one such file, and RL360 "
                    "gives it one with the key; expected the file's flags in rollout.sglang.extra_args"
                )
    for name in dict.fromkeys(argument.partition("=")[0] for argument in sglang.extra_args):
        if name in _OURS:
            key = f"expected {_OURS[name]}" if _OURS[name] else "expected none"
            yield f"rollout.sglang.extra_args: {name} is set by RL360; {key}"
    if FP32_LOGITS_FLAG in sglang.extra_args and not config.model.fp32_logits:
        yield (
            f"rollout.sglang.extra_args: {FP32_LOGITS_FLAG} with model.fp32_logits false: the engines would keep final "
            "logits in fp32 and the trainer would not; expected model.fp32_logits=true, which tells both"
        )
    last = last_server_port(sglang)
    if sglang.base_port and last > LAST_PORT:
        yield f"rollout.sglang.base_port: {sglang.base_port} for {sglang.num_servers} servers ends at {last}"
    for key in ("port", "smg_port", "metrics_port"):
        port = getattr(config.gateway, key, 0)
        if port and sglang.base_port and sglang.base_port <= port <= last:
            yield (
                f"gateway.{key}: {port} is one of the servers' (rollout.sglang.base_port: {sglang.base_port} to "
                f"{last}); expected another, or 0 to take any"
            )
    if sglang.start_timeout_s >= config.cluster.no_progress_s:
        yield (
            f"rollout.sglang.start_timeout_s: {sglang.start_timeout_s:g} s is not less than cluster.no_progress_s "
            f"{config.cluster.no_progress_s:g} s, so the watchdog would end the run first and quote no server's log; "
            "expected less"
        )


def _colocated(config: RootConfig) -> Iterator[str]:
    rollout, trainer = config.rollout, config.trainer
    if rollout.sync == "nccl":
        yield (
            "rollout.sync: nccl with rollout.sglang.colocated: two ranks of one group cannot share a GPU; expected "
            "ipc, or disk"
        )
    if rollout.max_staleness > 0:
        yield (
            f"rollout.max_staleness: {rollout.max_staleness} with rollout.sglang.colocated: while the trainer steps no "
            "engine has memory to run ahead with; expected 0, or GPUs of their own"
        )
    gpus = trainer.num_gpus if isinstance(trainer, MegatronTrainerConfig) else 1
    needed = rollout.sglang.num_servers * rollout.sglang.tensor_parallel_size
    if needed > gpus:
        yield (
            f"rollout.sglang.num_servers: {needed} GPUs for {rollout.sglang.num_servers} servers, colocated with a "
            f"trainer that has {gpus}; expected at most that many"
        )
    outside = [number for number in rollout.sglang.devices if number >= gpus]
    if outside:
        yield (
            f"rollout.sglang.devices: {', '.join(map(str, outside))} beyond the trainer's {gpus} with "
            "rollout.sglang.colocated; expected some of the trainer's, or none given"
        )


def serving_warnings(config: RootConfig) -> Iterator[str]:
    """What the user has to see to, because the run cannot."""
    if config.rollout.engine == "external" and config.model.fp32_logits:
        yield (
            "model.fp32_logits: servers of rollout=external cannot be told: start SGLang with "
            f"{FP32_LOGITS_FLAG} --enable-tf32-matmul, or set model.fp32_logits=false; else mismatch/kl is larger than "
            "it need be"
        )
