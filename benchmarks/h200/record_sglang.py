"""What a real SGLang answers to the calls that RL360 makes: one JSON document, for the stand-in and the docs.

In: the server's URL. Out: on standard output, a list of {call, request, status, reply}. Only the standard library.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 60
CODE_BLOCK = r"```[^\n]*\n[\s\S]*?\n```"
PROMPT = [1, 4093, 198, 28, 253, 1672]  # any ids will do

CALLS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/health", None),
    ("GET", "/model_info", None),
    ("GET", "/server_info", None),
    ("POST", "/generate", {"sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "sampling_seed": 7}}),
    ("POST", "/generate", {"sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}),
    ("POST", "/generate", {"sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "stop_regex": CODE_BLOCK}}),
    ("POST", "/generate", {"sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "stop": ["\n"]}}),
    ("POST", "/generate", {"sampling_params": {"max_new_tokens": 0}}),
    ("POST", "/generate", {"sampling_params": {"no_such_field": 1}}),
    ("POST", "/flush_cache", {}),
    ("POST", "/pause_generation", {"mode": "abort"}),
    ("GET", "/health", None),
    ("POST", "/continue_generation", {}),
    ("POST", "/abort_request", {"rid": "none", "abort_all": False}),
    ("POST", "/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "9"}),
    ("GET", "/model_info", None),
]


def main() -> None:
    found = []
    for method, path, body in CALLS:
        if path == "/generate" and body is not None:
            body = {"input_ids": PROMPT, "return_logprob": True, "stream": False, "rid": f"r{len(found)}", **body}
        began = time.monotonic()
        status, reply = call(sys.argv[1] + path, method, body)
        seconds = round(time.monotonic() - began, 3)
        found.append({"call": f"{method} {path}", "request": body, "status": status, "s": seconds, "reply": reply})
    json.dump(found, sys.stdout, indent=1)


def call(url: str, method: str, body: dict[str, Any] | None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return response.status, decoded(response.read())
    except urllib.error.HTTPError as error:
        return error.code, decoded(error.read())
    except OSError as error:
        return 0, repr(error)


def decoded(data: bytes) -> Any:
    """The reply, with long lists cut: server_info of a real server is pages."""
    try:
        value = json.loads(data)
    except ValueError:
        return data.decode(errors="replace")[:2000]
    return (
        {k: v for k, v in value.items() if not isinstance(v, dict | list) or len(json.dumps(v)) < 2000}
        if isinstance(value, dict)
        else value
    )


if __name__ == "__main__":
    main()
