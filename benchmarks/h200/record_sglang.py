"""What a real SGLang answers to the calls that RL360 makes: one JSON document, for the stand-in of the tests.

    python benchmarks/h200/record_sglang.py URL > FILE
    python benchmarks/h200/record_sglang.py --model FOLDER --extra "FLAGS" --logs DIR --out FILE    starts one itself

In: a server that nobody else uses. Out: a list of {call, request, status, s, reply, situation}, in the order of the
calls; `situation` says what went on meanwhile, `used_mib` what the GPUs had in use around a change of memory (by
whomever). The last calls leave the server unusable, which is part of the record; it ends when nobody answers. Folders
of the machine are named MODEL and SITE. Reading from a URL needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
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
    ("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["bm8="], "load_format": "flattened_bucket"}),
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
        row = {"call": f"{method} {path}", "request": shortened(body), "status": status, "situation": situation}
        row |= {"s": round(time.monotonic() - began, 3), "reply": reply}
        if before is not None:
            row["used_mib"] = {"before": before, "after": used_mib()}
        with self._lock:
            self._found.append(row)

    def all(self) -> list[dict[str, Any]]:
        for method, path, body in IDLE:
            self.call(method, path, body)
        for mode in ("abort", "retract", "in_place"):
            self._paused(mode)
        self._aborted()
        for method, path, body in MEMORY:
            self.call(method, path, body, "memory changes hands")
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

    def _start(self, params: dict[str, Any], situation: str, **more: str) -> threading.Thread:
        body = {"sampling_params": params, **more}
        thread = threading.Thread(target=self.call, args=("POST", "/generate", body, situation))
        thread.start()
        return thread


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
    long = body is not None and isinstance(body.get("input_ids"), list) and len(body["input_ids"]) > 100
    return body if body is None or not long else {**body, "input_ids": f"{len(body['input_ids'])} ids"}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", help="of a server that runs; its model is read from /model_info")
    parser.add_argument("--model", type=Path, help="HF folder: start a server with the fleet's code")
    parser.add_argument("--command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--extra", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--logs", type=Path, default=Path("/tmp/rl360-record"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.url:
        info = send(arguments.url + "/model_info", "GET", None)[1]
        found = Recorder(arguments.url, info["model_path"]).all()
    else:
        found = _start_and_record(arguments)
    text = json.dumps(found, indent=1) + "\n"
    (arguments.out.write_text if arguments.out else sys.stdout.write)(text)


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
        return Recorder(url, str(arguments.model)).all()
    finally:
        fleet.close()


if __name__ == "__main__":
    main()
