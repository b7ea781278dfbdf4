"""The viewer in a real browser: it draws, its script runs, and what a run wrote does not.

Needs headless Chromium (Debian: chromium). Only loopback is reached. A script of the test's own that is put into a page
would be refused by the content policy; instead the browser prints the document after its own scripts ran.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rl360.viewer.server import Page, Viewer
from tests.tiny_model import write_tiny_llama
from tests.viewer.runs import client, write_run
from tests.viewer.test_html import read

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1240,900",
)
DEADLINE_S = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"),
]


async def chromium(profile: Path, address: str, *arguments: str) -> str:
    """Run the browser on one page; returns what it printed."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *arguments, address]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode()


class Tab:
    """One page of a running browser, driven over its DevTools socket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._last = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        await self._socket.send_json({"id": self._last, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json(timeout=DEADLINE_S)
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]

    async def value(self, expression: str) -> Any:
        return (await self.call("Runtime.evaluate", expression=expression))["result"].get("value")

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if kind == "keyDown" else "")

    async def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true in a page that has loaded."""
        for _ in range(20 * DEADLINE_S):
            if await self.value(f"Boolean(document.readyState === 'complete' && ({expression}))"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {expression}; at {await self.value('location.href')}")


@asynccontextmanager
async def tab(profile: Path, address: str) -> AsyncIterator[Tab]:
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", address]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        found = None
        while found is None:
            line = await asyncio.wait_for(process.stderr.readline(), DEADLINE_S)
            assert line, "chromium ended"
            found = re.search(rb"ws://([^/]+)/", line)
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://{found[1].decode()}/json/list") as answer:
                (page,) = [one for one in await answer.json() if one["type"] == "page"]
            async with http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await process.communicate()


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return write_run(tmp_path / "run", write_tiny_llama(tmp_path / "model", weights=False))


async def test_pages_are_drawn(run_dir, tmp_path):
    async with client(run_dir) as http:
        for number, address in enumerate(("/", "/iteration/0", "/attempt/1/i1-a-0.t0")):
            picture = tmp_path / f"{number}.png"
            await chromium(tmp_path / f"profile{number}", str(http.make_url(address)), f"--screenshot={picture}")
            data = picture.read_bytes()
            assert struct.unpack(">II", data[16:24]) == (1240, 900)
            assert len(data) > 15_000  # an empty page of this size is 4 kB


async def test_scripts_of_a_run_do_not_run(run_dir, tmp_path):
    async with client(run_dir) as http:
        dom = await chromium(tmp_path / "profile", str(http.make_url("/attempt/1/i1-a-0.t0")), "--dump-dom")
    found = read(dom)
    assert [dict(a).get("src") for tag, a in found.tags if tag == "script"] == ["/static/viewer.js"]
    assert not [tag for tag, _ in found.tags if tag == "img"]
    assert "<script>alert('stolen')</script>" in found.text


async def test_a_live_page_is_fetched_again(run_dir, tmp_path, monkeypatch):
    """A metric that is written after the page was sent is in the document that the browser prints at the end."""
    render = Viewer.render
    rendered = []

    def render_and_go_on(self: Viewer, page: Page) -> str:
        text = render(self, page)
        if not rendered:
            metrics = run_dir / "metrics.jsonl"
            metrics.write_text(metrics.read_text() + '{"iteration": 2, "reward/unfiltered_mean": 0.875}\n')
        rendered.append(text)
        return text

    monkeypatch.setattr(Viewer, "render", render_and_go_on)
    async with client(run_dir) as http:
        address = str(http.make_url("/"))
        dom = await chromium(tmp_path / "profile", address, "--virtual-time-budget=10000", "--dump-dom")
    assert "0.875" not in rendered[0]
    assert "0.875" in read(dom).text


async def test_keys_lead_through_a_filtered_list(run_dir, tmp_path):
    async with client(run_dir) as http:
        start = str(http.make_url("/attempt/0/i0-a-0.t0")) + "?success=no"
        async with tab(tmp_path / "profile", start) as page:
            await page.until("document.querySelector('#token-box.by-logprob')")
            await page.press("m")
            await page.until("document.querySelector('#token-box.by-mask') && location.search.includes('colour=mask')")
            for key, arrives_at in (
                ("n", "/attempt/0/i0-a-2.t0?success=no"),
                ("n", "/attempt/0/e0-a-0.t0?success=no"),
                ("p", "/attempt/0/i0-a-2.t0?success=no"),
                ("u", "/iteration/0?success=no#i0-a"),
            ):
                await page.press(key)
                await page.until(f"location.href.endsWith('{arrives_at}')")
            await page.press("/")
            await page.until("document.activeElement.name === 'tag'")
            await page.press("n")  # typed, not followed
            await page.until("document.activeElement.value === 'n'")
            assert await page.value("location.pathname") == "/iteration/0"
