"""What a real SGLang answers to the calls that RL360 makes: one JSON document, for the stand-in of the tests.

    python benchmarks/h200/record_sglang.py URL > FILE
    python benchmarks/h200/record_sglang.py --model FOLDER --extra "FLAGS" --logs DIR --out FILE    starts one itself
    ... --command "python -m rl360.gateway.embedded.serve" --device cpu --dtype float32             without a GPU

In: a server that nobody else uses. Out: a list of {call, request, status, s, reply, situation}, in the order of the
calls; `situation` says what went on meanwhile, `used_mib` what the GPUs had in use around a change of memory (by
whomever). The last calls leave the server unusable, which is part of the record; it ends when nobody answers. Folders
of the machine are named MODEL and SITE, long fields of a request are only counted. Reading from a URL needs only the
standard library.

A server that is started here also gets weights from this process, twice, by a whole synchronisation of RL360's own:
every call goes through its client, which is what is recorded. By handles (CUDA IPC) the final norm comes doubled, so
that hashes and logprobs must change; by a group (NCCL) it comes as it was, so that they must be those of before. A call
`NOTE` says what was left out, or what failed, in its `reply`. A group needs a second GPU, or an NCCL that lets two
ranks share one (2.31, with NCCL_MULTI_RANK_GPU_ENABLE=1: one_gpu.sh).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

TIMEOUT_S = 120
SETTLE_S = 1.0  # for running requests to be really running
CODE_BLOCK = r"```[^\n]*\n[\s\S]*?\n```"
PACKAGES = re.compile(r"/[^\s\"']*(?=/(?:sglang|torch|transformers|fastapi|starlette|uvicorn)/)")
PROMPT = [1, 40, 198, 28, 253, 167]  # any ids will do
GREEDY = {"max_new_tokens": 4, "temperature": 0.0}
SAMPLED = {"max_new_tokens": 4, "temperature": 1.0}
LONG = {"max_new_tokens": 1500, "temperature": 1.0, "ignore_eos": True}
LONGEST_LIST, LONGEST_TEXT = 20, 200  # items, characters of a request's field that are written down
HANDLES, GROUP = "weights by handles", "weights by a group"
NOTE = "NOTE"  # in place of a call
DOUBLED = "model.norm.weight"
SHARED_GPU_NCCL = (2, 31)  # the first that can have two ranks on one GPU

IDLE: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/health", None),
    ("GET", "/model_info", None),
    ("GET", "/server_info", None),
    ("POST", "/generate", {"sampling_params": {**SAMPLED, "sampling_seed": 7}}),
    ("POST", "/generate", {"sampling_params": GREEDY}),
    ("POST", "/generate", {"sampling_params": {**SAMPLED, "stop_regex": CODE_BLOCK}}),
    ("POST", "/generate", {"sampling_params": {**SAMPLED, "stop": ["\n"]}}),
    ("POST", "/generate", {"sampling_params": {"max_new_tokens": 0}}),
    ("POST", "/generate", {"sampling_params": {"no_such_field": 1}}),
    ("POST", "/generate", {"sampling_params": {"temperature": -1}}),
    ("POST", "/generate", {"input_ids": None}),
    ("POST", "/generate", {"input_ids": [3] * 200_000}),
    ("POST", "/flush_cache", {}),
    ("POST", "/abort_request", {"rid": "none", "abort_all": False}),
    ("POST", "/abort_request", {"rid": "", "abort_all": False}),
    ("POST", "/pause_generation", {"mode": "gently"}),
    ("POST", "/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "9"}),
    ("POST", "/update_weights_from_disk", {"model_path": "MODEL", "weight_version": "3", "flush_cache": True}),
    ("POST", "/update_weights_from_disk", {"model_path": "MODEL", "flush_cache": False}),
    ("GET", "/model_info", None),
    ("POST", "/update_weight_version", {"new_version": "4", "abort_all_requests": False}),
    ("GET", "/model_info", None),
    ("POST", "/weights_checker", {"action": "checksum"}),
    ("POST", "/weights_checker", {"action": "no_such_action"}),
    ("POST", "/destroy_weights_update_group", {"group_name": "no_such_group"}),
    ("POST", "/init_weights_update_group", {"master_address": "127.0.0.1"}),
    ("GET", "/no_such_path", None),
]
# In the order of a colocated sync. The flush waits until the scheduler is idle: a release before that ends it.
MEMORY: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/generate", {"sampling_params": GREEDY}),
    ("POST", "/pause_generation", {"mode": "abort"}),
    ("POST", "/flush_cache?timeout=10", {}),
    ("POST", "/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
    ("GET", "/health", None),
    ("GET", "/server_info", None),
    ("POST", "/resume_memory_occupation", {"tags": ["weights"]}),
    ("POST", "/update_weights_from_disk", {"model_path": "MODEL", "load_format": "auto", "flush_cache": False}),
    ("POST", "/weights_checker", {"action": "checksum"}),
    ("POST", "/update_weight_version", {"new_version": "6", "abort_all_requests": False}),
    ("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]}),
    ("POST", "/flush_cache?timeout=10", {}),
    ("POST", "/continue_generation", {}),
    ("POST", "/generate", {"sampling_params": GREEDY}),
]
# What the scheduler does not catch: after one of these the server may be gone.
FATAL: list[tuple[str, str, dict[str, Any] | None]] = [
    (
        "POST",
        "/update_weights_from_tensor",
        {"serialized_named_tensors": ["bm8="], "load_format": "flattened_bucket", "flush_cache": False},
    ),
    ("GET", "/health", None),
    (
        "POST",
        "/update_weights_from_distributed",
        {"names": ["model.norm.weight"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": "no_such_group"},
    ),
    ("GET", "/health", None),
]


class Recorder:
    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self._found: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def call(self, method: str, path: str, body: dict[str, Any] | None, situation: str = "idle") -> None:
        if path == "/generate" and body is not None:
            rid = f"r{time.monotonic_ns()}"
            body = {"input_ids": PROMPT, "return_logprob": True, "stream": False, "rid": rid, **body}
        if body is not None and body.get("model_path") == "MODEL":
            body = {**body, "model_path": self._model}
        before = used_mib() if "memory" in path else None
        began = time.monotonic()
        status, reply = send(self._url + path, method, body)
        taken_s = time.monotonic() - began
        more: dict[str, Any] = {} if before is None else {"used_mib": {"before": before, "after": used_mib()}}
        self.keep(f"{method} {path}", body, status, situation, taken_s, reply, **more)

    def keep(
        self,
        call: str,
        body: dict[str, Any] | None,
        status: int,
        situation: str,
        taken_s: float,
        reply: Any,
        **more: Any,
    ) -> None:
        request = shortened(body)
        row = {"call": call, "request": request, "status": status, "situation": situation, "s": round(taken_s, 3)}
        row |= {"reply": reply, **more}
        with self._lock:
            self._found.append(row)

    def all(self, device: str | None = None, dtype: str = "bfloat16") -> list[dict[str, Any]]:
        """device: where this process has the weights that it sends, in `dtype`; None: it sends none."""
        for method, path, body in IDLE:
            self.call(method, path, body)
        for mode in ("abort", "retract", "in_place"):
            self._paused(mode)
        self._aborted()
        for method, path, body in MEMORY:
            self.call(method, path, body, "memory changes hands")
        if device is not None:
            self._weights(device, dtype)
        for method, path, body in FATAL:
            self.call(method, path, body, "last")
            if path == "/health" and self._found[-1]["status"] == 0:
                break  # a call to nobody says nothing
        return [without_folders(row, self._model) for row in self._found]

    def _paused(self, mode: str) -> None:
        """A pause under two running requests, with one that comes later; what works meanwhile, and for how long."""
        running = [self._start(LONG, f"running into a pause, {mode}") for _ in range(2)]
        time.sleep(SETTLE_S)
        self.call("POST", "/flush_cache", {}, "two requests run")
        self.call("POST", "/pause_generation", {"mode": mode}, "two requests run")
        later = self._start(GREEDY, f"sent into a pause, {mode}")
        for method, path, body in (
            ("GET", "/health", None),
            ("GET", "/model_info", None),
            ("GET", "/server_info", None),
            ("POST", "/weights_checker", {"action": "checksum"}),
            ("POST", "/update_weight_version", {"new_version": "5", "abort_all_requests": False}),
            ("POST", "/flush_cache", {}),
        ):
            self.call(method, path, body, f"paused, {mode}")
        self.call("POST", "/continue_generation", {}, f"paused, {mode}")
        later.join()
        if mode != "abort":
            self.call("POST", "/abort_request", {"rid": "", "abort_all": True}, f"after a pause, {mode}")
        for thread in running:
            thread.join()

    def _aborted(self) -> None:
        running = self._start({**LONG}, "aborted by its id", rid="to-abort")
        time.sleep(SETTLE_S)
        self.call("POST", "/abort_request", {"rid": "to-abort", "abort_all": False}, "one request runs")
        running.join()

    def _weights(self, device: str, dtype: str) -> None:
        """From this process, as a run sends them: by handles, then by a group. Each in two buckets."""
        import torch

        from rl360.models.loading import load_decoder
        from rl360.weight_sync.transports import BroadcastTransport, HandleTransport

        trainer = Weights(load_decoder(self._model, device, getattr(torch, dtype)).requires_grad_(False))
        bucket_bytes = two_buckets([p.numel() * p.element_size() for p in trainer.decoder.parameters()])
        trainer.decoder.get_parameter(DOUBLED).mul_(2)
        self._sync(HANDLES, HandleTransport(bucket_bytes, dtype), trainer, 7)
        trainer.decoder.get_parameter(DOUBLED).mul_(0.5)
        place, why_not = group_device(device)
        if place is None:
            self.keep(NOTE, None, 0, GROUP, 0.0, f"left out: {why_not}")
            return
        trainer.decoder.to(place)
        backend = "gloo" if device == "cpu" else "nccl"
        self._sync(GROUP, BroadcastTransport(bucket_bytes, dtype, backend), trainer, 8)

    def _sync(self, situation: str, transport: Any, trainer: Any, version: int) -> None:
        """One synchronisation and a generation under its weights."""
        from rl360.errors import EngineError
        from rl360.weight_sync.sync import FixedSet, FleetSync

        trainer.version = version
        sync = FleetSync(FixedSet([self._url]), transport, lambda url: self._client(url, situation))
        try:
            sync.sync(trainer, version)
        except (EngineError, RuntimeError) as error:  # torch's own are RuntimeErrors; the rest is worth recording, too
            self.keep(NOTE, None, 0, situation, 0.0, f"failed: {error}")
            return
        finally:
            sync.close()
        self.call("POST", "/generate", {"sampling_params": GREEDY}, situation)

    def _client(self, url: str, situation: str) -> Any:
        """RL360's client, each of whose calls is kept; but for /server_info, which is long and recorded elsewhere."""
        from rl360.errors import EngineError
        from rl360.weight_sync.engine import WeightEngine

        recorder = self

        class Recorded(WeightEngine):
            async def exchange(self, method: str, path: str, body: Any, timeout_s: float, headers: Any = None) -> Any:
                call, began = f"{method} {path}", time.monotonic()
                try:
                    answer = await super().exchange(method, path, body, timeout_s, headers)
                except EngineError as error:
                    recorder.keep(call, body, 0, situation, time.monotonic() - began, str(error))
                    raise
                if path != "/server_info":
                    status, raw, _ = answer
                    recorder.keep(call, body, status, situation, time.monotonic() - began, decoded(raw))
                return answer

        return Recorded(url, transfer_timeout_s=TIMEOUT_S)

    def _start(self, params: dict[str, Any], situation: str, **more: str) -> threading.Thread:
        body = {"sampling_params": params, **more}
        thread = threading.Thread(target=self.call, args=("POST", "/generate", body, situation))
        thread.start()
        return thread


class Weights:
    """What a synchronisation asks of a trainer that has an HF-named decoder, and nothing else."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.version = 0


def two_buckets(sizes: Sequence[int]) -> int:
    """The fewest bytes that a bucket may have so that tensors of these sizes, in this order, fill two."""
    return min(max(first, sum(sizes) - first) for first in accumulate(sizes[:-1]))


def group_device(device: str) -> tuple[str | None, str]:
    """(where the trainer's rank of a group computes, if not None, and why not if None); the server is on GPU 0."""
    import torch

    from rl360.weight_sync.groups import loaded_nccl

    if device == "cpu":
        return "cpu", ""
    if torch.cuda.device_count() > 1:
        return "cuda:1", ""
    found = loaded_nccl()
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and found >= SHARED_GPU_NCCL:
        return device, ""
    return None, f"one GPU, and NCCL {'.'.join(map(str, found))} without NCCL_MULTI_RANK_GPU_ENABLE=1, or before 2.31"


def used_mib() -> list[int] | None:
    """MiB in use on each GPU: a memory saver that was not loaded releases nothing and says nothing."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return [int(line) for line in subprocess.run(query, capture_output=True, check=True).stdout.split()]
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def send(url: str, method: str, body: dict[str, Any] | None) -> tuple[int, Any]:
    """(status, decoded reply); status 0: no answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return response.status, decoded(response.read())
    except urllib.error.HTTPError as error:
        return error.code, decoded(error.read())
    except OSError as error:
        return 0, repr(error)


def without_folders(value: Any, model: str) -> Any:
    """The same with MODEL for the model's folder, and SITE for where Python's packages lie, in every text."""
    if isinstance(value, dict):
        return {key: without_folders(part, model) for key, part in value.items()}
    if isinstance(value, list):
        return [without_folders(part, model) for part in value]
    return PACKAGES.sub("SITE", value.replace(model, "MODEL")) if isinstance(value, str) else value


def shortened(body: dict[str, Any] | None) -> dict[str, Any] | None:
    """A request with long lists and long texts counted: "272 names", ["20345 characters"]."""
    return body if body is None else {key: _counted(value, key) for key, value in body.items()}


def _counted(value: Any, key: str) -> Any:
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else f"{len(value)} characters"
    if not isinstance(value, list):
        return value
    what = "ids" if key == "input_ids" else key
    return [_counted(part, key) for part in value] if len(value) <= LONGEST_LIST else f"{len(value)} {what}"


def decoded(data: bytes) -> Any:
    """The reply, with long parts cut: server_info of a real server is pages, checksums of a model are hundreds."""
    try:
        value = json.loads(data)
    except ValueError:
        return data.decode(errors="replace")[:2000]
    if not isinstance(value, dict):
        return value
    for rank in value.get("ranks") or []:
        rank["checksums"] = dict(list(rank["checksums"].items())[:20])
    kept = ("meta_info", "output_ids", "ranks")
    return {k: v for k, v in value.items() if k in kept or not isinstance(v, dict | list) or len(json.dumps(v)) < 2000}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", help="of a server that runs; its model is read from /model_info")
    parser.add_argument("--model", type=Path, help="HF folder: start a server with the fleet's code")
    parser.add_argument("--command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--extra", default="")
    parser.add_argument("--device", default="cuda:0", help="of the weights that this process sends; cpu: by gloo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--logs", type=Path, default=Path("/tmp/rl360-record"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    if arguments.url:
        info = send(arguments.url + "/model_info", "GET", None)[1]
        found = Recorder(arguments.url, info["model_path"]).all()
    else:
        _check_device(parser, arguments.device)
        found = _start_and_record(arguments)
    text = json.dumps(found, indent=1) + "\n"
    (arguments.out.write_text if arguments.out else sys.stdout.write)(text)


def _check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """Before the minutes that come before it is needed."""
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device: {device}, and torch sees no GPU here; try --device cpu")


def _start_and_record(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from rl360.serving.command import ServerFlags, launches
    from rl360.serving.fleet import Fleet, WatchSettings
    from rl360.serving.ports import claim_ports

    flags = ServerFlags(
        arguments.model,
        arguments.context_length,
        command=tuple(shlex.split(arguments.command)),
        dtype=arguments.dtype,
        extra_args=tuple(shlex.split(arguments.extra)),
        memory_saver="sglang" in arguments.command,
    )
    fleet = Fleet(
        launches(flags, claim_ports(1, 0).pairs, []),
        arguments.logs,
        WatchSettings(health_interval_s=3600.0, max_restarts=0),
    )
    (url,) = fleet.start()
    try:
        return Recorder(url, str(arguments.model)).all(arguments.device, arguments.dtype)
    finally:
        fleet.close()


if __name__ == "__main__":
    main()
