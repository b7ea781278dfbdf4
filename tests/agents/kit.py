"""What the agents' tests share: a scripted endpoint, and a sandbox that is a folder of this machine.

`LocalEnvironment` runs commands for real, so it serves only commands that the tests themselves wrote.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from rl360.agents.shell import STATE_DIR


class Result:
    def __init__(self, stdout: str, stderr: str, return_code: int) -> None:
        self.stdout, self.stderr, self.return_code = stdout or None, stderr or None, return_code


class LocalEnvironment:
    """Harbor's `exec` in a folder. Paths under /app lie in that folder too."""

    default_user = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.app = folder / "app"
        self.app.mkdir(parents=True)
        self.commands: list[str] = []

    async def exec(self, command: str, timeout_sec: int | None = None, **_: Any) -> Result:
        self.commands.append(command)
        here = command.replace(STATE_DIR, str(self.folder / "state")).replace("/app", str(self.app))
        arguments: dict[str, Any] = {"cwd": self.app, "capture_output": True, "timeout": timeout_sec, "check": False}
        done = await asyncio.to_thread(subprocess.run, ["bash", "-c", here], **arguments)
        return Result(done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"), done.returncode)

    async def upload_file(self, source_path: Path, target_path: str) -> None:
        Path(str(target_path).replace("/app", str(self.app))).write_bytes(Path(source_path).read_bytes())


class Terminal:
    """Stands for the tmux session: remembers keystrokes, shows how many there were."""

    def __init__(self, ends_after: int = 1000, refuses: str | None = None) -> None:
        self.keys: list[str] = []
        self.ends_after, self.refuses = ends_after, refuses

    async def is_session_alive(self) -> bool:
        return len(self.keys) < self.ends_after

    async def get_incremental_output(self) -> str:
        return f"$ ({len(self.keys)})"

    async def send_keys(self, keys: str, **_: Any) -> None:
        """Like Harbor's: RuntimeError for keys that tmux refuses, UnicodeEncodeError for what it cannot encode."""
        keys.encode()
        if len(self.keys) >= self.ends_after or keys == self.refuses:
            raise RuntimeError("x: failed to send non-blocking keys: return_code=1, stderr='no server running'")
        self.keys.append(keys)


class NoSandbox:
    """For agents that must not run anything by themselves."""

    default_user = None

    async def exec(self, command: str, **_: Any) -> Any:
        raise AssertionError(command)


class Endpoint:
    """Answers with `script`, one entry a request: text, tool calls, (status, text), or a whole completion."""

    def __init__(self, script: Sequence[Any]) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.url = ""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history of the last request."""
        messages = self.requests[-1]["messages"]
        assert isinstance(messages, list)
        return messages

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        step = self.script.pop(0) if self.script else TURNS_USED
        if isinstance(step, tuple):
            return web.Response(status=step[0], text=step[1])
        if isinstance(step, str):
            step = completion(step)
        elif isinstance(step, list):
            step = completion(None, calls=step)
        return web.json_response(step)


def refusal(message: str) -> tuple[int, str]:
    return 400, json.dumps({"error": {"message": message, "code": "context_length_exceeded"}})


TURNS_USED = refusal("the session's 3 turns are used up. Please reduce the length of the messages.")
TOKENS_USED = refusal("the session reached its token cap")


def completion(
    text: str | None, finish_reason: str = "stop", calls: Sequence[tuple[str, Any]] = (), **message: Any
) -> dict[str, Any]:
    """A chat completion of 7 prompt and 5 sampled tokens. `calls`: (name, arguments as an object or as text)."""
    said: dict[str, Any] = {"role": "assistant", "content": text, **message}
    if calls:
        said["tool_calls"] = [
            {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": _text(arguments)}}
            for i, (name, arguments) in enumerate(calls)
        ]
    usage = {"prompt_tokens": 7, "completion_tokens": 5}
    return {"choices": [{"message": said, "finish_reason": finish_reason}], "usage": usage}


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


@asynccontextmanager
async def serving(script: Sequence[Any]) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(script)
    app = web.Application()
    app.router.add_post("/s/try/v1/chat/completions", endpoint.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}/s/try/v1"
    try:
        yield endpoint
    finally:
        await runner.cleanup()


def make(cls: Any, folder: Path, url: str, **kwargs: Any) -> Any:
    """An agent as Harbor makes it."""
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    return cls(logs_dir=logs, model_name="policy", base_url=url, skip_model_parsing=True, **kwargs)


async def attempt(cls: Any, folder: Path, script: Sequence[Any], **kwargs: Any) -> tuple[Any, Endpoint, Any]:
    """Run an agent through a script; returns (metadata, endpoint, environment)."""
    from harbor.models.agent.context import AgentContext

    environment, context = kwargs.pop("environment", None) or LocalEnvironment(folder / "sandbox"), AgentContext()
    instruction = kwargs.pop("instruction", "Do it.")
    async with serving(script) as endpoint:
        await make(cls, folder, endpoint.url, **kwargs).run(instruction, environment, context)
    return context.metadata, endpoint, environment
