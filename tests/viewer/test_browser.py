"""The viewer in a real browser: it draws, its script runs, and what a run wrote does not.

Needs headless Chromium (Debian: chromium). Only loopback is reached. A script of the test's own that is put into a page
would be refused by the content policy; instead the browser prints the document after its own scripts ran.
"""

from __future__ import annotations

import asyncio
import shutil
import struct
import subprocess
from pathlib import Path

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
DEADLINE_S = 120

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
