"""What starts one server: its command line, environment, ports and devices. Pure.

In: the numbers of `rollout.sglang` and of the run, ports (ports.py). Out: a `Launch` for each server. Flags are SGLang
0.5.16's; any command that takes them will do, and RL360's embedded engine is one (`python -m
rl360.gateway.embedded.serve`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl360.config.serving import FP32_LOGITS_FLAG
from rl360.errors import ConfigError

SGLANG = (sys.executable, "-m", "sglang.launch_server")
# SGLang upcasts hidden states and output matrix for each forward pass and multiplies in fp32: on tensor cores only as
# TF32, whose 11 significant bits hold a bf16 or fp16 value exactly, so that it costs no precision here. An fp32 model
# has fp32 logits anyway, and TF32 would round all its products.
FP32_LOGITS_FLAGS = (FP32_LOGITS_FLAG, "--enable-tf32-matmul")
# Of its context SGLang 0.5.16 keeps so many tokens from prompts (and two from answers): one that ends in them is a 400,
# which would mask an attempt whose last turn just fits.
KEPT_TOKENS = 6
# Where it looks for the longest context that it may be given, in this order.
CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
SEED_STEP = 1009  # between two servers' seeds, so that no two sample alike
ENVIRONMENT = {
    # A health check must neither wait behind a pause nor cost a token; the fleet asks the scheduler itself.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """What is the same for every server of a fleet. None leaves a flag to SGLang."""

    model_path: Path
    context_length: int  # tokens of prompt and output
    command: tuple[str, ...] = SGLANG
    tensor_parallel_size: int = 1
    dtype: str = "bfloat16"
    fp32_logits: bool = False  # final logits in fp32, whatever the dtype
    load_format: str | None = None
    weight_version: int = 0
    seed: int = 0
    host: str = "127.0.0.1"
    attention_backend: str | None = None
    sampling_backend: str | None = None
    grammar_backend: str | None = None
    mem_fraction_static: float | None = None
    max_running_requests: int | None = None
    cuda_graph_max_bs: int | None = None  # 0: no CUDA graphs at all
    prefill_cuda_graph: bool = False
    memory_saver: bool = False
    external_model_package: str | None = None
    extra_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """One server, ready to be started: `{**os.environ, **environment}` and `command`."""

    index: int
    url: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    rendezvous_port: int | None = None  # by which its server is told from somebody else's


def program_path() -> str:
    """PATH of the servers: as in an activated environment, `python` is first the one that runs this."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def server_context(max_context_tokens: int, model_path: Path) -> int:
    """The context that a server needs so that attempts may use all of `max_context_tokens`: a little more, where the
    model has as many positions (SGLang does not start with more than that)."""
    try:
        config = json.loads((model_path / "config.json").read_text())
    except (OSError, ValueError):
        return max_context_tokens
    positions = next((config[key] for key in CONTEXT_KEYS if isinstance(config.get(key), int)), max_context_tokens)
    return max(max_context_tokens, min(max_context_tokens + KEPT_TOKENS, positions))


def launches(
    flags: ServerFlags, ports: Sequence[tuple[int, int]], devices: Sequence[str], visible: Sequence[str] = ()
) -> list[Launch]:
    """One plan of ports and devices for the whole fleet: a server for each (HTTP, rendezvous) of `ports`.

    `devices` are names for CUDA_VISIBLE_DEVICES, the first `tensor_parallel_size` for server 0 and so on; none: the
    variable is left alone. A server computes on its own and sees those of `visible` behind them: it opens a trainer's
    memory on another GPU (sync ipc) only where it sees that GPU. Raises `ConfigError` when they do not suffice.
    """
    num_servers = len(ports)
    needed = num_servers * flags.tensor_parallel_size
    if devices and len(devices) < needed:
        raise ConfigError(
            f"rollout.sglang: {num_servers} servers of tensor_parallel_size {flags.tensor_parallel_size} need {needed} "
            f"devices, there are {len(devices)} ({', '.join(devices)}); try fewer servers, or set devices"
        )
    size = flags.tensor_parallel_size
    own = [devices[index * size :][:size] for index in range(num_servers)]
    seen = [[*mine, *(name for name in visible if name not in mine)] if mine else [] for mine in own]
    return [_launch(flags, index, ports[index], seen[index]) for index in range(num_servers)]


def _launch(flags: ServerFlags, index: int, ports: tuple[int, int], devices: Sequence[str]) -> Launch:
    port, rendezvous_port = ports
    command = [
        *flags.command,
        *("--model-path", str(flags.model_path)),
        *("--host", flags.host),
        *("--port", str(port)),
        *("--nccl-port", str(rendezvous_port)),
        *("--tp-size", str(flags.tensor_parallel_size)),
        *("--dtype", flags.dtype),
        *("--context-length", str(flags.context_length)),
        *("--weight-version", str(flags.weight_version)),
        *("--random-seed", str(flags.seed + SEED_STEP * index)),
        "--skip-server-warmup",
        "--enable-metrics",
    ]
    for flag, value in (
        ("--load-format", flags.load_format),
        ("--attention-backend", flags.attention_backend),
        ("--sampling-backend", flags.sampling_backend),
        ("--grammar-backend", flags.grammar_backend),
        ("--mem-fraction-static", flags.mem_fraction_static),
        ("--max-running-requests", flags.max_running_requests),
    ):
        if value is not None:
            command += [flag, str(value)]
    if flags.cuda_graph_max_bs == 0:
        command.append("--disable-decode-cuda-graph")
    elif flags.cuda_graph_max_bs is not None:
        command += ["--cuda-graph-max-bs-decode", str(flags.cuda_graph_max_bs)]
    if not flags.prefill_cuda_graph or flags.cuda_graph_max_bs == 0:
        command.append("--disable-prefill-cuda-graph")  # capturing them took 75 s for a model of 135M
    if flags.fp32_logits and flags.dtype != "float32":
        command += FP32_LOGITS_FLAGS
    if flags.memory_saver:
        command.append("--enable-memory-saver")
    environment = {**ENVIRONMENT, **flags.environment}
    if flags.memory_saver and (runtime := cuda_runtime(_nvidia_packages())):
        paths = [str(runtime), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        environment.setdefault("LD_LIBRARY_PATH", os.pathsep.join(paths))
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if flags.external_model_package:
        environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] = flags.external_model_package
    return Launch(index, f"http://{flags.host}:{port}", (*command, *flags.extra_args), environment, rendezvous_port)


def cuda_runtime(packages: Iterable[Path]) -> Path | None:
    """Where pip has put libcudart. torch finds it there by itself; the memory saver's library, which is preloaded,
    does not, and is then left out with a line on stderr and no other sign: memory would never be released."""
    for folder in packages:
        for found in sorted(folder.glob("*/lib/libcudart.so.*"), reverse=True):
            return found.parent
    return None


def _nvidia_packages() -> list[Path]:
    found = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (found and found.submodule_search_locations) or ()]
