"""What the tests of weight syncs share: servers that are real processes, and trainers that are only their weights."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl360.models.decoder import Decoder
from rl360.models.loading import load_decoder, save_hf
from rl360.serving.command import ServerFlags, launches
from rl360.serving.fleet import Fleet, WatchSettings
from rl360.serving.ports import claim_ports
from rl360.weight_sync.buckets import Expectation
from rl360.weight_sync.engine import WeightEngine
from rl360.weight_sync.folder import hashing
from rl360.weight_sync.sources import TensorSource

EMBEDDED = (sys.executable, "-m", "rl360.gateway.embedded.serve")
WATCH = WatchSettings(
    start_timeout_s=60, health_interval_s=1, health_timeout_s=5, health_failures=5, max_restarts=3, grace_s=5
)
BUCKET_BYTES = 20_000  # a handful of buckets of the tiny model
PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]


class StubTrainer:
    """Weights with a version. `tensors` of its source can be tampered with."""

    def __init__(self, folder: Path, seed: int, source: Callable[[StubTrainer], TensorSource] | None = None) -> None:
        self.folder = folder
        self.version = 0
        self.decoder: Decoder = load_decoder(folder, random_init_seed=seed)
        self._source = (source or (lambda trainer: TensorSource(trainer.tensors)))(self)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self.decoder.named_parameters())

    def step(self, seed: int | None = None) -> int:
        """Other weights, as an optimizer would leave them: in place."""
        self.version += 1
        other = load_decoder(self.folder, random_init_seed=100 + self.version if seed is None else seed)
        with torch.no_grad():
            for mine, new in zip(self.decoder.parameters(), other.parameters(), strict=True):
                mine.copy_(new)
        return self.version

    def publish(self, folder: Path) -> Path:
        return save_hf(self.decoder, folder, self.folder)

    def publish_hashed(self, folder: Path, dtype: str | None, ways: Sequence[int]) -> Expectation:
        expectation = Expectation(tuple(ways), self.decoder.config.num_kv_heads)
        for _ in hashing(self.tensors(), expectation, dtype):
            pass
        self.publish(folder)
        return expectation

    def weight_sources(self) -> list[TensorSource]:
        return [self._source]


def embedded_fleet(
    folder: Path,
    log_dir: Path,
    num_servers: int,
    model: Path | None = None,
    load_format: str | None = None,
    more: tuple[str, ...] = (),
) -> Fleet:
    flags = ServerFlags(
        model or folder,
        2048,
        command=EMBEDDED,
        dtype="float32",
        load_format=load_format,
        extra_args=("--threads", "1", "--kv-cache-gib", "0.05", *more),
        environment={"OMP_NUM_THREADS": "1"},
    )
    return Fleet(launches(flags, claim_ports(num_servers, 0).pairs, []), log_dir, WATCH)


def make_engine(url: str) -> WeightEngine:
    return WeightEngine(url, request_timeout_s=30, control_timeout_s=10, transfer_timeout_s=20)


def post(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read() or b"{}")


def greedy(url: str, max_new_tokens: int = 12) -> dict[str, Any]:
    params = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}
    reply: dict[str, Any] = post(
        url + "/generate", {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    )
    return reply


def logprobs(reply: dict[str, Any]) -> list[float]:
    return [row[0] for row in reply["meta_info"]["output_token_logprobs"]]


def checksum(url: str) -> str:
    return str(post(url + "/weights_checker", {"action": "checksum"})["per_engine_checksum"])
