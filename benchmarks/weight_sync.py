"""Seconds to bring a trainer's weights to servers, by every transport, and whether what arrives is what was sent.

    python benchmarks/weight_sync.py --model FOLDER --sync ipc --out FILE          one GPU, shared by both sides
    python benchmarks/weight_sync.py --model FOLDER --sync nccl --trainer-device 1 --device 0
    python benchmarks/weight_sync.py --model FOLDER --sync nccl --megatron 2 --device 2   ranks on GPUs 0 and 1, sharded

The trainer is a decoder with random weights that change before each sync; servers are a fleet, started with random
weights of their own. Requests run meanwhile, so that the stall is one that sessions would see. Afterwards the weights
are exported and a server is started from the export: both must report the same hashes and, within what one server
differs from itself when asked again, the same greedy logprobs. A continuation is compared as far as its ids are the
same, one token more included: random weights have near ties that rounding decides, and what follows is another text.
With --fault a last sync (by ipc) damages one tensor on its way to the last rank: it must be named, and end the run.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

BARS_S = {"ipc": 1.0, "nccl": 2.0}  # transfer_s of an 8B, the project's
PROMPT = [1, 40, 198, 28, 253, 167]  # any ids that every vocabulary has
NUM_PROMPTS, PROMPT_TOKENS, CONTINUATION = 64, 32, 64
CHANGE = 1e-3  # standard deviation of what a "step" adds to each weight


class RandomTrainer:
    """Random weights on one device, without an optimizer."""

    def __init__(self, folder: Path, device: str, dtype: str) -> None:
        import torch

        from rl360.models.decoder import Decoder
        from rl360.models.loading import read_config

        self.folder = folder
        self.version = 0
        torch.set_default_dtype(getattr(torch, dtype))
        with torch.device(device):
            self.decoder = Decoder(read_config(folder)).requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        for name, parameter in self.decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)

    def step(self) -> int:
        import torch

        for parameter in self.decoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=CHANGE)
        self.version += 1
        return self.version

    def publish(self, folder: Path) -> Path:
        from rl360.models.loading import save_hf

        return save_hf(self.decoder, folder, self.folder)

    def num_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.decoder.parameters())

    def close(self) -> None: ...


class MegatronTrainer:
    """trainer=megatron, tensor parallel over `num_gpus`; a train step on a few tokens changes the weights."""

    def __init__(self, folder: Path, num_gpus: int, rank_target: str, logs: Path) -> None:
        from rl360.algorithms.grpo import GRPO
        from rl360.models.loading import read_config
        from rl360.trainers.megatron.trainer import MegatronTrainer as Trainer

        self.shape = read_config(folder)
        self._trainer = Trainer(
            learning_rate=CHANGE,
            num_gpus=num_gpus,
            tensor_parallel_size=num_gpus,
            max_tokens_per_gpu=512,
            compile=False,
            rank_target=rank_target,
            model_dir=folder,
            random_init_seed=0,
            algorithm=GRPO(),
            log_dir=logs,
        )
        self._trainer.start()
        self.version = 0
        self.weight_sources = self._trainer.weight_sources
        self.publish = self._trainer.publish
        self.publish_hashed = self._trainer.publish_hashed
        self.close = self._trainer.close

    def step(self) -> int:
        from argparse import Namespace

        from benchmarks.train_step import Case, random_batch

        self.version += 1
        what = Namespace(prompt_share=0.125, data_parallel=1)
        self._trainer.step(random_batch(self.shape, what, Case.of("512x1"), self.version))
        return self.version

    def num_bytes(self) -> int:
        """In bf16."""
        import torch

        from rl360.models.decoder import Decoder

        with torch.device("meta"):
            return 2 * sum(p.numel() for p in Decoder(self.shape).parameters())


def main() -> int:
    arguments = _arguments()
    found = _measure(arguments)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="HF folder; its weights are not read")
    parser.add_argument("--sync", choices=("disk", "ipc", "nccl"), required=True)
    parser.add_argument("--command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--extra", default="", help="more flags of the servers")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of each server")
    parser.add_argument("--fault", action="store_true", help="damage one tensor for one rank at the end")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", action="append", default=[], help="GPU of a server, of the visible ones from 0")
    parser.add_argument("--trainer-device", default="0", help="of the visible GPUs from 0, or cpu")
    parser.add_argument(
        "--megatron", type=int, default=0, help="the trainer is trainer=megatron with so many tensor ranks"
    )
    parser.add_argument("--rank-target", default="rl360.trainers.megatron.rank:MegatronRank")
    parser.add_argument("--bucket-gib", type=float, default=1.0)
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32, help="running during each sync; 0: none")
    parser.add_argument("--no-parity", action="store_true", help="skip the server that is started from the export")
    parser.add_argument("--work", type=Path, default=Path("/tmp/rl360-weight-sync"))
    parser.add_argument("--out", type=Path)
    found = parser.parse_args()
    if found.megatron and found.fault:
        parser.error("--fault damages the weights of a trainer in this process: not with --megatron")
    return found


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from rl360.weight_sync.groups import loaded_nccl
    from rl360.weight_sync.sync import FleetSync

    device = arguments.trainer_device if arguments.trainer_device == "cpu" else f"cuda:{arguments.trainer_device}"
    fleet = _fleet(arguments, arguments.model, arguments.servers, "dummy")
    began = time.monotonic()
    urls = fleet.start()
    start_s = time.monotonic() - began
    try:
        trainer: Any
        if arguments.megatron:
            logs = arguments.work / "logs"
            trainer = MegatronTrainer(arguments.model, arguments.megatron, arguments.rank_target, logs)
        else:
            trainer = RandomTrainer(arguments.model, device, arguments.dtype)
        num_bytes = trainer.num_bytes()
        sync = FleetSync(fleet, _transport(arguments, device), _make_engine)
        rows, older = [], {}
        for url in urls:
            _view(url)  # the first request compiles kernels for longer than a pause waits
        for number in range(arguments.syncs + 1):  # the first makes groups and compiles the hash's kernel
            if number == arguments.syncs and not arguments.no_parity:
                older = _view(urls[0])
            version = trainer.step()
            with _Load(urls, arguments.requests) as load:
                report = sync.sync(trainer, version)
            row = {"transfer_s": report.transfer_s, "stall_s": report.stall_s, **asdict(sync.timing)}
            row = {name: round(value, 4) for name, value in row.items()}
            rows.append(
                {**row, "confirmed": len(report.confirmed), "interrupted": load.interrupted, "first": number == 0}
            )
            print(rows[-1], flush=True)
        parity = None if arguments.no_parity else _parity(arguments, trainer, urls, older)
        fault = _fault(arguments, trainer, urls) if arguments.fault else None
        sync.close()
        trainer.close()
    finally:
        fleet.close()
    timed = rows[1:]
    transfer_s = statistics.median(row["transfer_s"] for row in timed)
    return {
        "model": arguments.model.name,
        "sync": arguments.sync,
        "servers": arguments.servers,
        "tensor_parallel": arguments.tensor_parallel,
        "megatron": arguments.megatron,
        "gib": round(num_bytes / 2**30, 2),
        "bucket_gib": arguments.bucket_gib,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "nccl": ".".join(map(str, loaded_nccl())) if torch.cuda.is_available() else None,
        "server_start_s": round(start_s, 1),
        "transfer_s": transfer_s,
        "stall_s": statistics.median(row["stall_s"] for row in timed),
        "gib_per_s": round(num_bytes / 2**30 / transfer_s, 1),
        "bar_s": BARS_S.get(arguments.sync),
        "parity": parity,
        "fault": fault,
        "syncs": rows,
    }


def _fleet(arguments: argparse.Namespace, model: Path, servers: int, load_format: str | None) -> Any:
    from rl360.engine.engines import every_device
    from rl360.serving.command import ServerFlags, launches
    from rl360.serving.fleet import Fleet, WatchSettings
    from rl360.serving.ports import claim_ports

    flags = ServerFlags(
        model,
        arguments.context_length,
        tensor_parallel_size=arguments.tensor_parallel,
        command=tuple(shlex.split(arguments.command)),
        dtype=arguments.dtype,
        load_format=load_format,
        extra_args=tuple(shlex.split(arguments.extra)),
    )
    logs = arguments.work / ("logs" if load_format else "logs-cold")
    every = every_device()
    devices = [every[int(number)] for number in arguments.device]
    shared = arguments.sync == "ipc" and arguments.trainer_device != "cpu"
    plan = launches(
        flags, claim_ports(servers, 0).pairs, devices, [every[int(arguments.trainer_device)]] if shared else []
    )
    return Fleet(plan, logs, WatchSettings(health_interval_s=3600.0))


def _transport(arguments: argparse.Namespace, device: str) -> Any:
    from rl360.weight_sync.transports import BroadcastTransport, DiskTransport, HandleTransport

    bucket_bytes = int(arguments.bucket_gib * 2**30)
    if arguments.sync == "disk":
        return DiskTransport(arguments.work / "weights", arguments.dtype)
    if arguments.sync == "ipc":
        return HandleTransport(bucket_bytes, arguments.dtype)
    return BroadcastTransport(bucket_bytes, arguments.dtype, "gloo" if device == "cpu" else "nccl")


def _make_engine(url: str) -> Any:
    from rl360.weight_sync.engine import WeightEngine

    return WeightEngine(url, request_timeout_s=600)


class _Load:
    """Requests that run until the block ends; counts those that were cut off and would be resumed."""

    def __init__(self, urls: tuple[str, ...], requests: int) -> None:
        self._sends = [(urls[number % len(urls)], number) for number in range(requests)]
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []
        self.interrupted = 0

    def __enter__(self) -> _Load:
        self._threads = [threading.Thread(target=self._ask, args=send, daemon=True) for send in self._sends]
        for thread in self._threads:
            thread.start()
        if self._threads:
            time.sleep(1.0)
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        for url in {url for url, _ in self._sends}:
            _post(url + "/abort_request", {"abort_all": True, "rid": ""})
        for thread in self._threads:
            thread.join()

    def _ask(self, url: str, number: int) -> None:
        params = {"max_new_tokens": 2000, "temperature": 1.0, "ignore_eos": True, "sampling_seed": number + 1}
        while not self._done.is_set():
            body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
            reply = _post(url + "/generate", body)
            self.interrupted += reply["meta_info"]["finish_reason"]["type"] == "abort" and not self._done.is_set()
            time.sleep(0.05)


def _parity(
    arguments: argparse.Namespace, trainer: RandomTrainer, urls: tuple[str, ...], older: dict[str, Any]
) -> dict[str, Any]:
    """The synced servers against one that is started from the export; beside it what the same comparison says of one
    server asked twice, and of the weights of one sync before."""
    synced = [_view(url) for url in urls]
    again = _view(urls[0])
    export = trainer.publish(arguments.work / "export")
    cold_fleet = _fleet(arguments, export, 1, None)
    (cold_url,) = cold_fleet.start()
    try:
        _view(cold_url)  # compiles
        cold = _view(cold_url)
    finally:
        cold_fleet.close()
    return {
        "hashes_equal": all(one["hash"] == cold["hash"] for one in synced),
        "synced_and_cold": [difference(one, cold) for one in synced],
        "asked_twice": difference(synced[0], again),
        "one_sync_older": difference(synced[0], older),
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Of two views: next tokens that differ, the largest difference of the likeliest ones' logprobs, nats; the same of
    one long continuation as far as both have the same ids before."""
    next_tokens = [(a, b) for a, b in zip(one["next"], other["next"], strict=True)]
    ids, others = one["long"]["ids"], other["long"]["ids"]
    same = next((at for at, (a, b) in enumerate(zip(ids, others, strict=True)) if a != b), len(ids))
    pairs = list(zip(one["long"]["logprobs"], other["long"]["logprobs"], strict=True))[: same + 1]
    return {
        "next_ids_different": sum(a["ids"] != b["ids"] for a, b in next_tokens),
        "next_logprob_difference_max": max(abs(a["logprobs"][0] - b["logprobs"][0]) for a, b in next_tokens),
        "continuation_same_tokens": same,
        "continuation_logprob_difference_max": max(abs(a - b) for a, b in pairs),
    }


def _fault(arguments: argparse.Namespace, trainer: RandomTrainer, urls: tuple[str, ...]) -> str:
    """What a sync says of a layer's o_proj that the last rank alone gets with lowest bits flipped."""
    import torch

    from rl360.errors import EngineError
    from rl360.weight_sync.buckets import FlatBucket
    from rl360.weight_sync.sources import TensorSource, decoder_source
    from rl360.weight_sync.sync import FixedSet, FleetSync
    from rl360.weight_sync.transports import HandleTransport
    from rl360.weight_sync.wire import exported

    class Damaging(TensorSource):
        def export(self, index: int, count: int) -> list[str]:
            handles = super().export(index, count)
            bucket, lent = self._buckets[index]
            for meta in bucket.metas:
                if meta.name == "model.layers.1.self_attn.o_proj.weight":
                    wrong = bucket.flat_B.clone()
                    wrong[meta.start_idx : meta.end_idx : 2] ^= 1
                    if wrong.is_cuda:
                        torch.cuda.synchronize(wrong.device)
                    handles[-1] = lent.enter_context(exported(FlatBucket(wrong, bucket.metas)))
                    lent.callback(wrong.size)  # it lives as long as its handle
            return handles

    source = Damaging(decoder_source(trainer)._tensors, kv_heads=trainer.decoder.config.num_kv_heads)
    trainer.weight_sources = lambda: [source]  # type: ignore[attr-defined]
    sync = FleetSync(FixedSet(urls), HandleTransport(int(arguments.bucket_gib * 2**30), arguments.dtype), _make_engine)
    try:
        sync.sync(trainer, trainer.step())  # type: ignore[arg-type]
    except EngineError as error:
        return str(error)
    raise SystemExit("a damaged tensor of one rank was not noticed")


def _view(url: str) -> dict[str, Any]:
    """Hashes, the likeliest next token of many prompts, one continuation; nothing cached, one at a time."""
    flush = urllib.request.Request(url + "/flush_cache", b"", method="POST")
    urllib.request.urlopen(flush, timeout=60).close()
    draw = random.Random(0)
    prompts = [[draw.randrange(300) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    return {
        "hash": _post(url + "/weights_checker", {"action": "checksum"})["per_engine_checksum"],
        "next": [_greedy(url, prompt, 1) for prompt in prompts],
        "long": _greedy(url, PROMPT, CONTINUATION),
    }


def _greedy(url: str, prompt: list[int], num_tokens: int) -> dict[str, list[Any]]:
    params = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    reply = _post(url + "/generate", {"input_ids": prompt, "sampling_params": params, "return_logprob": True})
    return {"ids": reply["output_ids"], "logprobs": [row[0] for row in reply["meta_info"]["output_token_logprobs"]]}


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.loads(reply.read() or b"{}")
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}: {error.code} {error.read()[:500]!r}") from None


if __name__ == "__main__":
    sys.exit(main())
