"""One life of one server: started under a keeper, asked whether it is ready or well, ended with all it started.

In: a `Launch` and a log file. Out: readiness within a deadline, with a line of progress now and then; liveness without
generating. Which server is started when, and what its death means, is left to rl360.serving.fleet.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from rl360.errors import InfrastructureError
from rl360.serving.command import Launch, program_path
from rl360.serving.secrets import CONFIG_FLAG, KeyFile, shown

log = logging.getLogger(__name__)

READY_POLL_S = 0.2
ASK_TIMEOUT_S = 5.0  # for what a server that is up says of itself
PROGRESS_S = 15.0  # between two lines while a server starts
TAIL_BYTES = 4000  # of a dead server's log, quoted in the error
# The first request compiles kernels, 38 s with SGLang 0.5.16 on an H200: no pause and no turn may be what waits for it.
FIRST_REQUEST = {
    "input_ids": [1, 1, 1, 1],
    "sampling_params": {"max_new_tokens": 2, "temperature": 1.0},
    "return_logprob": True,
}
KEEPER_MARGIN_S = 8.0  # the keeper's own time to end and reap, beyond the grace that the server has
# Servers are asked directly, whatever http_proxy says: a cluster's proxy does not know them.
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerProcess:
    """Started by the constructor. Every method may be called from any thread.

    `api_key`, that it is to ask for: it is told in a file (`--config`) which is removed when it is ready.
    """

    def __init__(self, launch: Launch, log_path: Path, grace_s: float = 10.0, api_key: str | None = None) -> None:
        self.launch = launch
        self._log_path = log_path
        self._grace_s = grace_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._key_file = KeyFile(api_key) if api_key else None
        try:
            self._keeper = self._start()
        except BaseException:
            self._forget_key()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        key_file = [str(self._key_file.path)] if self._key_file else []
        command = [*self.launch.command, *([CONFIG_FLAG, *key_file] if key_file else [])]
        keeper = [
            sys.executable,
            "-P",
            "-u",
            "-m",
            "rl360.serving.keeper",
            str(self._grace_s),
            *key_file,
            "--",
            *command,
        ]
        root = str(Path(__file__).parents[2])  # -P leaves the working directory out; the keeper must still be found
        modules = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": modules, "PATH": program_path(), "PYTHONUNBUFFERED": "1"}
        with self._log_path.open("ab") as file:
            file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {shown(command)}\n".encode())
            file.flush()
            return subprocess.Popen(
                keeper,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own, **self.launch.environment},
                start_new_session=True,  # Ctrl-C reaches the driver alone
            )

    def _forget_key(self) -> None:
        if self._key_file is not None:
            self._key_file.remove()

    @property
    def url(self) -> str:
        return self.launch.url

    @property
    def keeper_pid(self) -> int:
        return self._keeper.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._keeper.poll()

    def wait_ready(self, timeout_s: float, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Until it answers on /health, /model_info and /server_info, and has generated one request's tokens. False when
        `stopped` said so first.

        Raises InfrastructureError `engine_start` with the end of the log when it exits, takes longer, or generates
        nothing.
        """
        began = said = time.monotonic()
        first: _FirstRequest | None = None
        while not stopped():
            now = time.monotonic()
            if (code := self.exit_code()) is not None:
                raise InfrastructureError("engine_start", f"{self._name} ended with code {code}; {self.log_tail()}")
            if first is not None:
                if first.problem is not None:
                    problem = f"{self._name} answers, and generates nothing: {first.problem}; {self.log_tail()}"
                    raise InfrastructureError("engine_start", problem)
                if not first.is_alive():
                    self._forget_key()
                    log.info("%s is ready after %.0f s", self._name, now - began)
                    return True
            elif self.get("/health", READY_POLL_S * 10) is not None and self._is_ours():
                first = _FirstRequest(self.url, self._headers, timeout_s)  # the deadline below ends it
                first.start()
            if now - began > timeout_s:
                raise InfrastructureError(
                    "engine_start", f"{self._name} is not ready after {timeout_s:g} s; {self.log_tail()}"
                )
            if now - said > PROGRESS_S:
                said = now
                last = self.log_tail().rpartition("\n")[2][:160]
                log.info(
                    "waiting for %s: %.0f of at most %.0f s; its log: %s", self._name, now - began, timeout_s, last
                )
            time.sleep(READY_POLL_S)
        return False

    def _is_ours(self) -> bool:
        """False: it does not say yet. Raises InfrastructureError `engine_start` when somebody else's server answers: it
        took the port while ours did not listen yet, and would be given our weights."""
        info = self.get("/server_info", ASK_TIMEOUT_S) if self.get("/model_info", ASK_TIMEOUT_S) is not None else None
        if info is None:
            return False
        port, ours = info.get("nccl_port"), self.launch.rendezvous_port
        if ours is not None and isinstance(port, int) and port != ours:
            raise InfrastructureError(
                "engine_start",
                f"{self._name}: somebody else's server answers there, with rendezvous port {port} and not {ours}",
            )
        return True

    def well(self, timeout_s: float) -> bool:
        """Whether its scheduler answers (/server_info asks it), paused or not; generates nothing."""
        return self.get("/server_info", timeout_s) is not None

    def get(self, path: str, timeout_s: float) -> Mapping[str, object] | None:
        """A JSON answer, {} for a 200 without one, None for anything else."""
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with _DIRECTLY.open(request, timeout=timeout_s) as reply:
                raw = reply.read()
        except (OSError, ValueError, urllib.error.HTTPError):  # refused, 4xx and 5xx, timed out, not HTTP
            return None
        with suppress(ValueError):
            found = json.loads(raw)
            if isinstance(found, dict):
                return found
        return {}

    def close(self, at_once: bool = False) -> None:
        """End it: SIGTERM and its grace, or SIGKILL `at_once`. Idempotent, and waits until it is gone."""
        assert self._keeper.stdin is not None
        if at_once and self.exit_code() is None:
            for child in _children(self._keeper.pid):
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)  # a stopped server takes no other signal; the keeper ends the rest
        with suppress(OSError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(self._grace_s + KEEPER_MARGIN_S)
        except subprocess.TimeoutExpired:
            log.error("%s does not end; killing its keeper %d", self._name, self._keeper.pid)
            self._keeper.kill()
            self._keeper.wait()
        self._forget_key()

    def log_tail(self) -> str:
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                tail = file.read().decode(errors="replace").rstrip()
        except OSError:
            tail = "(no log)"
        return f"its log {self._log_path} ends:\n{tail}"

    @property
    def _name(self) -> str:
        return f"server {self.launch.index} ({self.url})"


class _FirstRequest(threading.Thread):
    """Asks for two tokens; `problem` says why there were none. Left behind when its server is not wanted any more."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        super().__init__(name="first-request", daemon=True)
        self.problem: str | None = None
        self._timeout_s = timeout_s
        self._request = urllib.request.Request(
            f"{url}/generate", json.dumps(FIRST_REQUEST).encode(), {**headers, "Content-Type": "application/json"}
        )

    def run(self) -> None:
        try:
            with _DIRECTLY.open(self._request, timeout=self._timeout_s) as reply:
                if not json.loads(reply.read()).get("output_ids"):
                    self.problem = "an answer without output_ids"
        except urllib.error.HTTPError as error:
            self.problem = f"HTTP {error.code} {error.read(500).decode(errors='replace')}"
        except (OSError, ValueError, AttributeError) as error:
            self.problem = repr(error)


def _children(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found
