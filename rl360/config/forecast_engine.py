"""How much memory of a GPU one SGLang server takes, and how many tokens its KV cache holds. Pure.

In: a model's numbers, the flags of a server, the bytes of a card and what others hold of it. Out: `EngineForecast`.
Left to others: who shares the card and whether all fits (rl360.config.forecast_sharing).

Followed here is SGLang 0.5.16 (srt/server_args.py, srt/mem_cache/kv_cache_configurator.py, pool_configurator.py). What
counts is what is free when a server starts, not the card: of the bytes that are free after its CUDA context, weights
and KV cache together take mem_fraction_static, whatever others have. The rest is for what follows: CUDA graphs, the
table of requests, prefill, logits. Nothing checks that these fit; a server that runs out of memory ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl360.config.forecast import GIB, MIB, ModelShape
from rl360.config.schemas import RootConfig

# Measured in the log of a server on an H200, SmolLM2-135M, no graphs: of 139.80 GiB 139.13 were free before its
# weights, its process group took 0.09 of them; 0.07 GiB lay beside the weights when the cache was sized; 0.19
# GiB went between the cache and "ready".
CONTEXT_BYTES = 600 * MIB  # CUDA context and kernels
ALONE_GROUP_BYTES = 92 * MIB  # NCCL of a server of one GPU
BESIDE_WEIGHTS_BYTES = 70 * MIB  # rotary tables, workspaces, blocks rounded up
BUFFERS_BYTES = 200 * MIB  # of the attention backend and the scheduler
TENSOR_GROUP_BYTES = GIB  # a rank of several: NCCL's and the all-reduce's buffers; 0.8-1.5 GiB are usual
DRIVER_BYTES = 616 * MIB  # of what nvidia-smi calls the card's memory, and CUDA never gives out; measured on an H200
# SGLang's own estimates (server_args.py, reserve_for_graph_mb).
GRAPH_BYTES_PER_ROW = 2 * MIB  # of the largest batch that decodes from a graph
PREFILL_GRAPH_BYTES = 8 * MIB  # of each captured size
# A row of logits: as computed (2 bytes), in fp32, its softmax, its logprobs.
LOGIT_BYTES = 2 + 3 * 4
REQUEST_TABLE_EXTRA = 4  # columns of the request table beyond the context
VOCAB_MULTIPLE = 64  # SGLang pads the vocabulary to it
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "auto": 2}  # auto: SGLang takes float16 for a float32 folder
KV_DTYPE_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Server:
    """One server of a fleet: everything that its memory depends on but the card."""

    model: ModelShape
    context_tokens: int  # of one request, prompt and output
    requests: int  # open at once on this server
    tensor: int = 1  # GPUs
    value_bytes: int = 2  # of a weight
    kv_value_bytes: int = 2
    mem_fraction: float | None = None  # null: SGLang's own
    max_running: int | None = None
    max_total_tokens: int | None = None
    chunked_prefill: int | None = None
    graph_rows: int | None = None  # largest batch of a CUDA graph; 0: none; null: SGLang's own
    prefill_graphs: bool = False
    fp32_head: bool = False  # SGLang then makes an fp32 copy of its output matrix for each forward pass

    @classmethod
    def of(cls, config: RootConfig, model: ModelShape) -> Server:
        """From an experiment; flags of extra_args count, since they come last on the command line."""
        settings = config.rollout.sglang
        flags = _flags(settings.extra_args)
        value_bytes = DTYPE_BYTES.get(settings.dtype, 2)

        def number(flag: str, otherwise: int | None = None) -> int | None:
            values = [int(float(value)) for value in flags.get(flag, ()) if value.replace(".", "", 1).isdecimal()]
            return max(values) if values else otherwise

        graph_rows = number("--cuda-graph-bs-decode", number("--cuda-graph-max-bs-decode", settings.cuda_graph_max_bs))
        kv_dtype, fraction = flags.get("--kv-cache-dtype"), flags.get("--mem-fraction-static")
        return cls(
            model=model,
            context_tokens=config.rollout.max_context_tokens,
            requests=-(-config.rollout.concurrency // max(1, settings.num_servers)),
            tensor=settings.tensor_parallel_size,
            value_bytes=value_bytes,
            kv_value_bytes=KV_DTYPE_BYTES.get(kv_dtype[0], value_bytes) if kv_dtype else value_bytes,
            mem_fraction=float(fraction[0]) if fraction else settings.mem_fraction_static,
            max_running=number("--max-running-requests", settings.max_running_requests),
            max_total_tokens=number("--max-total-tokens"),
            chunked_prefill=number("--chunked-prefill-size"),
            graph_rows=graph_rows,
            prefill_graphs=settings.prefill_cuda_graph and settings.cuda_graph_max_bs != 0,
            fp32_head=config.model.fp32_logits and value_bytes == 2,
        )

    @property
    def weight_bytes(self) -> int:
        """Of one GPU."""
        return self.value_bytes * engine_parameters(self.model, self.tensor)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token on one GPU: each has at least one key/value head."""
        heads = max(1, self.model.num_kv_heads // self.tensor)
        return 2 * self.model.num_layers * heads * self.model.head_dim * self.kv_value_bytes

    @property
    def head_copy(self) -> int:
        """Of the output matrix in fp32; 0: none is made."""
        return 4 * vocab_rows(self.model, self.tensor) * self.model.hidden_size if self.fp32_head else 0

    @property
    def running(self) -> int:
        """Requests that decode at once at most."""
        return self.requests if self.max_running is None else min(self.requests, self.max_running)


def is_sglang(config: RootConfig) -> bool:
    """Whether the run starts real SGLang servers: another program that takes its flags needs what it needs."""
    command = config.rollout.sglang.command
    return config.rollout.engine == "sglang" and (not command or any("sglang" in word for word in command))


def _flags(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The values behind each `--flag` or `--flag=`; of several the last."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            values = found[name] = [value] if equals else []
        else:
            values.append(argument)
    return found


def tensor_misfits(model: ModelShape, tensor: int) -> list[str]:
    """What of the model a server of `tensor` GPUs cannot split: SGLang asserts as much when it loads it."""
    if tensor < 1:
        return []
    key = f"rollout.sglang.tensor_parallel_size: {tensor}"
    problems = [
        f"{key} does not divide the model's {count} {what}; expected one that does"
        for what, count in (
            ("attention heads", model.num_heads),
            ("values of the MLP's width", model.intermediate_size),
        )
        if count % tensor
    ]
    larger, smaller = max(tensor, model.num_kv_heads), min(tensor, model.num_kv_heads)
    if larger % smaller:
        problems.append(f"{key} and the model's {model.num_kv_heads} key/value heads: neither divides the other")
    return problems


def engine_parameters(model: ModelShape, tensor: int) -> int:
    """Parameters on one GPU: matrices split, key/value heads at least one each, norms whole, vocabulary padded."""
    heads, kv_heads = model.num_heads // tensor, max(1, model.num_kv_heads // tensor)
    attention = model.hidden_size * model.head_dim * 2 * (heads + kv_heads)
    norms = 2 * model.hidden_size + (2 * model.head_dim if model.qk_norm else 0)
    layer = attention + 3 * model.hidden_size * (model.intermediate_size // tensor) + norms
    embeddings = vocab_rows(model, tensor) * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return model.num_layers * layer + model.hidden_size + embeddings


def vocab_rows(model: ModelShape, tensor: int) -> int:
    """Of the embedding on one GPU, with its padding."""
    multiple = VOCAB_MULTIPLE
    if -(-model.vocab_size // multiple) * multiple % tensor:
        multiple *= tensor
    return -(-model.vocab_size // multiple) * multiple // tensor


@dataclass(frozen=True, slots=True)
class EngineForecast:
    """Bytes of one GPU of a server by what they are for. The cache is sized when `outside` and `weights` are there."""

    server: Server
    fraction: float  # mem_fraction_static, SGLang's own where none is given
    free: int  # what the server finds free after its context
    outside: Mapping[str, int]
    weights: int
    tokens: int  # that the cache holds; 0: the weights leave no room and the server does not start
    working: Mapping[str, int]  # from the part that mem_fraction_static leaves

    @property
    def kv_cache(self) -> int:
        return self.tokens * self.server.token_bytes

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def paused(self) -> int:
        """What a server keeps that has given KV cache and weights away: torch-memory-saver keeps neither, SGLang
        empties its allocator then, and its graphs stay (SGLANG_MEMORY_SAVER_CUDA_GRAPH is off)."""
        return sum(self.outside.values()) + self.working["buffers"] + self.working["CUDA graphs"]

    @property
    def slack(self) -> int:
        """What mem_fraction_static leaves for `working`."""
        return self.free - int(self.fraction * self.free)

    @property
    def contexts(self) -> float:
        """Requests of full length that the cache holds."""
        return self.tokens / self.server.context_tokens

    @property
    def parts(self) -> dict[str, int]:
        held = {"engine's weights": self.weights, "beside weights": BESIDE_WEIGHTS_BYTES, "KV cache": self.kv_cache}
        return {**self.outside, **held, **self.working}

    @property
    def least_fraction(self) -> float:
        """The smallest mem_fraction_static, in hundredths, whose cache holds what runs at full length at once, else
        one request; above 0.99: none does."""
        one = self.server.context_tokens * self.server.token_bytes
        wanted = one * self.server.running
        held = self.weights + BESIDE_WEIGHTS_BYTES
        room = self.free - sum(self.working.values())
        need = held + (wanted if held + wanted <= room else one)
        return -(-100 * need // max(1, self.free)) / 100


def forecast_engine(server: Server, capacity: int, taken: int = 0) -> EngineForecast:
    """capacity: bytes of the card that CUDA can give out. taken: of them, what others hold when the server starts."""
    group = ALONE_GROUP_BYTES if server.tensor == 1 else TENSOR_GROUP_BYTES
    outside = {"engine's CUDA": CONTEXT_BYTES, "engine's NCCL": group}
    free = max(0, capacity - taken - sum(outside.values()))
    fraction = own_fraction(server, capacity) if server.mem_fraction is None else server.mem_fraction
    budget = int(fraction * free) - server.weight_bytes - BESIDE_WEIGHTS_BYTES
    tokens = max(0, budget // server.token_bytes)
    if server.max_total_tokens is not None:
        tokens = min(tokens, server.max_total_tokens)
    return EngineForecast(
        server, fraction, free, outside, server.weight_bytes, tokens, _working(server, capacity, tokens)
    )


def prefill_tokens(server: Server, capacity: int) -> int:
    """Tokens of one prefill batch: SGLang's default by the size of the card (_handle_gpu_memory_settings)."""
    if server.chunked_prefill is not None and server.chunked_prefill > 0:
        return server.chunked_prefill
    gib = capacity / GIB
    return 2048 if gib < 35 else 4096 if gib < 60 else 8192 if gib < 160 else 16384


def graph_rows(server: Server, capacity: int) -> int:
    """The largest batch that decodes from a graph; SGLang's default by the size of the card."""
    if server.graph_rows is not None:
        return server.graph_rows
    gib, few = capacity / GIB, server.tensor < 4
    if gib < 20:
        return 8
    if gib < 35:
        return 24 if few else 80
    if gib < 60:
        return 32 if few else 160
    if gib < 160:
        return 256 if few else 512
    return 512


def own_fraction(server: Server, capacity: int) -> float:
    """mem_fraction_static that SGLang takes where none is given (_handle_gpu_memory_settings)."""
    reserved = 512 * MIB + int(1.5 * MIB) * max(2048, prefill_tokens(server, capacity))
    reserved += server.tensor * 128 * MIB + _graph_bytes(server, capacity)
    if capacity > 60 * GIB:
        reserved = max(reserved, 10 * GIB)
    card = capacity + DRIVER_BYTES  # SGLang asks nvidia-smi
    return round((card - reserved) / card, 3)


def _graph_bytes(server: Server, capacity: int) -> int:
    count = graph_rows(server, capacity) * GRAPH_BYTES_PER_ROW
    if server.prefill_graphs:
        most = min(prefill_tokens(server, capacity), server.context_tokens)
        sizes: tuple[range, ...] = (range(4, 33, 4), range(48, 257, 16), range(288, 513, 32), range(576, 1025, 64))
        sizes += (range(1280, 4097, 256), range(4608, most + 1, 512))
        count += PREFILL_GRAPH_BYTES * sum(size <= most for group in sizes for size in group)
    return count


def _working(server: Server, capacity: int, tokens: int) -> dict[str, int]:
    model = server.model
    rows = server.max_running
    if rows is None:  # resolve_max_num_reqs
        rows = max(2048, min(4096, tokens * 512 // server.context_tokens))
    rows = min(rows, max(1, tokens // 2))
    widths = model.intermediate_size // server.tensor * 3  # [gate; up] and its product
    attention = model.head_dim * (3 * model.num_heads + 2 * model.num_kv_heads) // server.tensor  # q, k, v, norm, out
    row = server.value_bytes * (3 * model.hidden_size + max(widths, attention))
    batch = min(prefill_tokens(server, capacity), server.running * server.context_tokens)
    return {
        "request table": 4 * (rows + 1) * (server.context_tokens + REQUEST_TABLE_EXTRA),
        "buffers": BUFFERS_BYTES,
        "CUDA graphs": _graph_bytes(server, capacity) + (server.head_copy if graph_rows(server, capacity) else 0),
        "prefill": batch * row + server.head_copy,
        "logits": LOGIT_BYTES * server.running * model.vocab_size,
    }
