"""Phases of a colocated run: which call an instant belongs to, and what was used in it."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from benchmarks.colocated import Span, Watch, lines_about_memory, run
from rl360.config import files
from rl360.errors import ConfigError
from tests.tiny_model import write_tiny_llama


def test_an_instant_counts_for_the_innermost_call():
    watch = Watch(
        spans=[Span("return", 10.0, 20.0), Span("transfer", 12.0, 15.0), Span("step", 5.0, 9.0)],
        samples=[(6.0, 1024.0), (9.5, 2048.0), (11.0, 3072.0), (13.0, 4096.0), (14.0, 5120.0), (19.0, 512.0)],
    )
    assert watch.peaks_gib() == {"step": 1.0, "rollout": 2.0, "return": 3.0, "transfer": 5.0}
    assert watch.seconds() == {"step": [4.0], "return": [10.0], "transfer": [3.0]}


def test_calls_are_watched_also_when_they_fail():
    class Trainer:
        def step(self, by):
            return by + 1

        async def send(self):
            await asyncio.sleep(0.01)
            raise ValueError("broken")

    watch = Watch()
    watch.call(Trainer, "step", "step")
    watch.call(Trainer, "send", "transfer")
    assert Trainer().step(2) == 3
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(Trainer().send())
    assert [span.name for span in watch.spans] == ["step", "transfer"]
    assert watch.spans[1].ended_s - watch.spans[1].began_s >= 0.01


def test_samples_come_from_a_command():
    watch = Watch()
    process = watch.sample([sys.executable, "-u", "-c", "print(7); print('N/A'); print(' 81559 ')"])
    deadline = time.monotonic() + 10
    while len(watch.samples) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.wait()
    assert [mib for _, mib in watch.samples] == [7.0, 81559.0]


def test_what_logs_say_of_memory(tmp_path):
    (tmp_path / "a.log").write_text("fine\n  torch.OutOfMemoryError: CUDA out of memory. Tried\n" * 2)
    (tmp_path / "b.log").write_text("all is well\n")
    found = lines_about_memory(sorted(tmp_path.glob("*.log")))
    assert found == ["a.log: torch.OutOfMemoryError: CUDA out of memory. Tried"]


def test_a_disk_that_is_too_small_is_asked_first(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_disk_bytes", lambda folder: 0)
    with pytest.raises(ConfigError, match=r"disk: [\d.]+ GiB needed"):
        run(
            [
                "experiment=tiny_e2e",
                f"model.path={write_tiny_llama(tmp_path / 'tiny')}",
                f"output_dir={tmp_path / 'run'}",
            ]
        )
    assert not (tmp_path / "run").exists()
