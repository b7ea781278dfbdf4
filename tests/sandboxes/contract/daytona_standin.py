"""A stand-in for the Daytona service: its HTTP API as far as Harbor's direct sandboxes use it, over local sandboxes.

In: a folder for the sandboxes. Out: a server on a free port, with switches for what the service may do wrong. It was
written from the public client's requests; the service itself was not reached, so it shows that our side keeps to the
client's contract and not that the service keeps to it too.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

KEY = "standin-key"


class StandIn:
    """`limit_next`: requests that are answered with 429 first. `capacity`: sandboxes that the account may have."""

    def __init__(self, folder: Path, make: Callable[..., Any]):
        self._folder, self._make = folder, make
        self.url = ""
        self.capacity = 1000
        self.limit_next: Counter[str] = Counter()  # by kind: create | session | files
        self.retry_after = "0.05"
        self.requests: Counter[str] = Counter()
        self.created: list[dict[str, Any]] = []
        self.most_open = 0
        self._open: dict[str, Any] = {}
        self._dto: dict[str, dict[str, Any]] = {}
        self._commands: dict[str, asyncio.Task[Any]] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[StandIn]:
        app = web.Application(client_max_size=2**30, middlewares=[self._gate])
        app.router.add_post("/api/sandbox", self._create)
        app.router.add_get("/api/sandbox/{id}", self._get)
        app.router.add_delete("/api/sandbox/{id}", self._delete)
        app.router.add_post("/toolbox/{id}/process/session", self._session)
        app.router.add_post("/toolbox/{id}/process/session/{session}/exec", self._exec)
        app.router.add_get("/toolbox/{id}/process/session/{session}/command/{command}", self._command)
        app.router.add_get("/toolbox/{id}/process/session/{session}/command/{command}/logs", self._logs)
        app.router.add_post("/toolbox/{id}/files/bulk-upload", self._upload)
        app.router.add_post("/toolbox/{id}/files/bulk-download", self._download)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            for sandbox in list(self._open.values()):
                await sandbox.stop(delete=True)
            await runner.cleanup()

    async def lose(self) -> None:
        """Every sandbox is gone, as after its time to live."""
        for name in list(self._open):
            await self._open.pop(name).stop(delete=True)

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.startswith("/api") and "socket.io" in request.path:
            return web.Response(status=404)
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return _error(401, "Unauthorized")
        path = request.path
        kind = "session" if "/process/" in path else "files" if "/files/" in path else "api"
        if path == "/api/sandbox" and request.method == "POST":
            kind = "create"
        self.requests[kind] += 1
        if self.limit_next[kind] > 0:
            self.limit_next[kind] -= 1
            await request.read()
            return _error(429, "Too many requests", {"Retry-After": self.retry_after})
        if "/toolbox/" in path and request.match_info.get("id") not in self._open:
            await request.read()
            return _error(404, "sandbox not found")
        return await handler(request)

    # -- control plane ------------------------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        if len(self._open) >= self.capacity:
            return _error(403, "Total CPU limit exceeded. Maximum allowed: 1000.")
        name = str(uuid.uuid4())
        dockerfile = (body.get("buildInfo") or {}).get("dockerfileContent") or "FROM x\n"
        sandbox = self._make(self._folder / name, dockerfile, body)
        self.created.append(body)
        self._open[name] = sandbox
        self.most_open = max(self.most_open, len(self._open))
        self._dto[name] = {
            "id": name, "organizationId": "org", "name": name, "user": "root", "env": body.get("env") or {},
            "labels": body.get("labels") or {}, "public": False, "kvm": False, "target": body.get("target") or "us",
            "networkBlockAll": bool(body.get("networkBlockAll")), "cpu": body.get("cpu") or 1, "gpu": 0,
            "memory": body.get("memory") or 1, "disk": body.get("disk") or 3, "state": "started",
            "desiredState": "started", "toolboxProxyUrl": f"{self.url}/toolbox",
        }  # fmt: skip
        try:
            await sandbox.start(force_build=False)
        except Exception as error:
            del self._open[name]
            self._dto[name] |= {"state": "build_failed", "errorReason": f"Failed to build: {error}"}
        return web.json_response(self._dto[name])

    async def _get(self, request: web.Request) -> web.Response:
        dto = self._dto.get(request.match_info["id"])
        return web.json_response(dto) if dto else _error(404, "sandbox not found")

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        sandbox = self._open.pop(name, None)
        if sandbox is None:
            return _error(404, "sandbox not found")
        await sandbox.stop(delete=True)
        self._dto[name]["state"] = "destroyed"
        return web.json_response(self._dto[name])

    # -- toolbox ------------------------------------------------------------------------------------------------------

    async def _session(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=201)

    async def _exec(self, request: web.Request) -> web.Response:
        body = await request.json()
        command = uuid.uuid4().hex
        sandbox = self._open[request.match_info["id"]]
        line, user = _without_su(body["command"])
        self._commands[command] = asyncio.create_task(sandbox.exec(line, user=user))
        await asyncio.wait([self._commands[command]], timeout=0.01)
        return web.json_response({"cmdId": command}, status=202)

    async def _command(self, request: web.Request) -> web.Response:
        name = request.match_info["command"]
        task = self._commands[name]
        code = {"exitCode": task.result().return_code} if task.done() else {}
        return web.json_response({"id": name, "command": "x", **code})

    async def _logs(self, request: web.Request) -> web.Response:
        done = self._commands[request.match_info["command"]].result()
        out, err = done.stdout or "", done.stderr or ""
        return web.json_response({"output": out + err, "stdout": out, "stderr": err})

    async def _upload(self, request: web.Request) -> web.Response:
        sandbox = self._open[request.match_info["id"]]
        form = await request.post()
        for key, part in form.items():
            if not key.endswith(".file"):
                continue
            assert isinstance(part, web.FileField)
            local = self._folder / f"up-{uuid.uuid4().hex}"
            local.write_bytes(part.file.read())
            try:
                await sandbox.upload_file(local, str(form[key.replace(".file", ".path")]))
            except RuntimeError as error:
                return _error(400, str(error))
            finally:
                local.unlink()
        return web.json_response({})

    async def _download(self, request: web.Request) -> web.Response:
        sandbox = self._open[request.match_info["id"]]
        (path,) = (await request.json())["paths"]
        local = self._folder / f"down-{uuid.uuid4().hex}"
        try:
            await sandbox.download_file(path, local)
            name, kind, data = "file", "application/octet-stream", local.read_bytes()
        except RuntimeError:
            reason = {"statusCode": 404, "message": f"file not found: {path}", "code": "FILE_NOT_FOUND"}
            name, kind, data = "error", "application/json", json.dumps(reason).encode()
        finally:
            local.unlink(missing_ok=True)
        head = (
            f'--B\r\nContent-Disposition: form-data; name="{name}"; filename="{path}"\r\nContent-Type: {kind}\r\n\r\n'
        )
        return web.Response(
            body=head.encode() + data + b"\r\n--B--\r\n", headers={"Content-Type": "multipart/form-data; boundary=B"}
        )


def _without_su(line: str) -> tuple[str, str | int | None]:
    """A local sandbox has no `su`, whose own checks need more than its kernel allows: it starts as the user instead."""
    words = shlex.split(line) if line.startswith("su ") else []
    if len(words) != 6 or words[2:5] != ["-s", "/bin/bash", "-c"]:
        return line, None
    number = re.match(r"\$\(getent passwd (\d+) ", words[1])
    return words[5], int(number[1]) if number else words[1]


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(
        {"statusCode": status, "message": message, "error": message}, status=status, headers=headers
    )


def over_local_sandboxes(cache: Path) -> Callable[..., Any]:
    """How the stand-in makes a sandbox: a local one, from the Dockerfile that the client sent."""
    from rl360.sandboxes.local import LocalSandbox
    from tests.sandboxes.contract.backends import Backend, new_sandbox

    backend = Backend("standin", LocalSandbox, {"cache_dir": cache, "lifetime_s": 600.0})

    def make(folder: Path, dockerfile: str, body: dict[str, Any]) -> Any:
        env, network = body.get("env") or {}, not body.get("networkBlockAll")
        dockerfile = re.sub(r"(?im)^FROM .*$", "FROM x", dockerfile)
        task = {"env": env, **({"network_mode": "public"} if network else {})}
        limits = {"memory_mib": 1024 * (body.get("memory") or 1), "disk_mib": 1024 * (body.get("disk") or 1), "pids": 0}
        return new_sandbox(backend, folder, dockerfile, task, {}, {"network": network, "pids": 256, **limits})

    return make
