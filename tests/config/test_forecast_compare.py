"""The forecast against a run: a server's log, nvidia-smi's samples and metrics, told apart by phase."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from omegaconf import OmegaConf

from rl360.config.compose import Request, compose
from rl360.config.forecast_compare import main, peaks, phase_at, read_log, read_samples
from rl360.config.forecast_sharing import PHASE_LOAD, PHASE_ROLLOUT, PHASE_STEPS

# Lines of SGLang 0.5.16; the first two lives of a server, and another rank's lines.
LOG = """\
[2026-11-30 01:00:00] Load weight begin. avail mem=99.00 GB
[2026-11-30 01:00:01] Capture target decode CUDA graph end. elapsed=1.00 s, mem usage=9.00 GB, avail mem=1.00 GB.
[2026-11-30 01:10:00] Init torch distributed ends. elapsed=0.27 s, mem usage=0.09 GB
[2026-11-30 01:10:00] Load weight begin. avail mem=139.13 GB
[2026-11-30 01:10:00 TP1] Load weight begin. avail mem=138.00 GB
[2026-11-30 01:10:01] Load weight end. elapsed=0.42 s, type=LlamaForCausalLM, avail mem=138.86 GB, mem usage=0.27 GB.
[2026-11-30 01:10:02] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1930503, K size: 20.71 GB, V size: 20.71 GB
[2026-11-30 01:10:03] Capture target decode CUDA graph end. elapsed=1.00 s, mem usage=0.40 GB, avail mem=97.00 GB.
[2026-11-30 01:10:04] Capture target prefill CUDA graph end. elapsed=1.00 s, mem usage=0.10 GB, avail mem=96.90 GB.
[2026-11-30 01:10:05] max_total_num_tokens=1930503, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=4096, context_len=2048, available_gpu_mem=96.70 GB
[2026-11-30 01:11:00] INFO:     127.0.0.1:39038 - "POST /generate HTTP/1.1" 200 OK
[2026-11-30 01:12:00] INFO:     127.0.0.1:39038 - "POST /release_memory_occupation HTTP/1.1" 200 OK
[2026-11-30 01:12:20] INFO:     127.0.0.1:39038 - "POST /resume_memory_occupation HTTP/1.1" 200 OK
[2026-11-30 01:12:30] INFO:     127.0.0.1:39038 - "POST /resume_memory_occupation HTTP/1.1" 200 OK
"""
SAMPLES = """\
2026/11/30 01:11:59.100, 0, 50000, 10
2026/11/30 01:12:00.300, 0, 99999, 10
2026/11/30 01:12:10.000, 0, 20480, 90
2026/11/30 01:12:10.000, 1, 99999, 90
2026/11/30 01:12:11.000, 0, 30720, 90
2026/11/30 01:12:25.000, 0, 40960, 5
2026/11/30 01:12:40.000, 0, 51200, 30
2026/11/30 01:12:41.000, 0, [N/A], 30
"""


def test_the_last_start_of_the_first_rank_is_read():
    log = read_log(LOG.splitlines())
    assert log.numbers == {
        "free": 139.13, "weights": 0.27, "tokens": 1930503, "kv_cache": 41.42, "graphs": 0.5, "left": 96.7,
    }  # fmt: skip
    assert [kind for _, kind in log.moves] == ["release", "resume", "resume"]


def test_phases_by_what_the_server_was_asked():
    moves = read_log(LOG.splitlines()).moves
    day = "2026-11-30 01:1"
    seen = {
        "0:00": PHASE_ROLLOUT,
        "2:10": PHASE_STEPS,
        "2:25": PHASE_LOAD,
        "2:40": PHASE_ROLLOUT,
        "2:00": None,
        "2:21": None,
    }
    for time, phase in seen.items():
        assert phase_at(moves, datetime.fromisoformat(day + time)) == phase, time


@pytest.fixture
def run(tmp_path):
    """A run folder as benchmarks pack it: logs beside the other files, no model folder."""
    overrides = (
        "experiment=quickstart", "trainer=megatron", "trainer.num_gpus=1", "rollout=sglang", "rollout.sync=ipc",
        "rollout.sglang.colocated=true", "rollout.sglang.mem_fraction_static=0.3", "model.path=/nowhere",
    )  # fmt: skip
    composed = compose(Request(overrides))
    assert composed.problems == ()
    (tmp_path / "resolved.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dict(composed.values))))
    (tmp_path / "sglang-0.log").write_text(LOG)
    (tmp_path / "gpu.csv").write_text(SAMPLES)
    rows = [{"iteration": 0, "perf/peak_memory_gib_max": 3.0}, {"iteration": 1, "perf/peak_memory_gib_max": 3.5}, {}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_run_folder_becomes_a_table(run, capsys):
    assert main([str(run), "--samples", str(run / "gpu.csv"), "--gpu-memory-gib", "139.8"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("1 SGLang server of tensor 1: KV cache of 1,9")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown if line.startswith("| ")]
    measured = {cells_[0]: cells_[2] for cells_ in cells}
    assert measured["SGLang free"] == "139.13"
    assert measured["SGLang tokens"] == "1,930,503"
    assert measured["perf/peak_memory_gib_max"] == "3.50"
    # the fullest sample of each phase, of this GPU, not beside a change
    assert measured["nvidia-smi, trainer steps"] == "30.00"
    assert measured["nvidia-smi, weights load"] == "40.00"
    assert measured["nvidia-smi, rollout"] == "50.00"
    tokens = next(row for row in cells if row[0] == "SGLang tokens")
    assert int(tokens[1].replace(",", "")) == pytest.approx(1_930_503, rel=0.01)  # the trainer left 0.7 GiB


def test_phases_that_a_benchmark_watched(run, capsys):
    peaks_gib = {"rollout": 50.5, "trainer step": 20.25, "transfer": 30.0, "servers start": 99.0}
    (run / "run.json").write_text(json.dumps({"peak_gib": peaks_gib}))
    assert main([str(run), "--peaks", str(run / "run.json")]) == 0
    shown = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| nvidia-smi")]
    measured = {line[1].strip(): float(line[3]) for line in shown}
    assert measured == {
        "nvidia-smi, trainer steps": 20.25, "nvidia-smi, weights load": 30.0, "nvidia-smi, rollout": 50.5,
    }  # fmt: skip


def test_a_run_without_servers_is_said(run, capsys):
    config = OmegaConf.load(run / "resolved.yaml")
    config.rollout.engine, config.rollout.sync, config.rollout.sglang.colocated = "external", "disk", False
    config.rollout.engine_urls = ["http://a:1"]
    OmegaConf.save(config, run / "resolved.yaml")
    assert main([str(run)]) == 1
    assert "rollout.engine external; expected sglang" in capsys.readouterr().err


def test_samples_of_an_engine_alone_are_of_one_phase(run):
    from rl360.config.forecast_compare import forecast_of

    config = OmegaConf.load(run / "resolved.yaml")
    config.rollout.sglang.colocated, config.rollout.sync = False, "disk"
    OmegaConf.save(config, run / "resolved.yaml")
    alone = forecast_of(run, 139.8)
    samples = read_samples(SAMPLES.splitlines(), 0)
    assert peaks(alone, read_log([]), samples) == {PHASE_ROLLOUT: pytest.approx(99999 / 1024)}
