"""The forecast for SGLang's GPUs against what a run found: `python -m rl360.config.forecast_compare RUN`.

In: a run folder (resolved.yaml, metrics.jsonl, SGLang's logs in logs/ or beside them) and, where they were taken,
samples of nvidia-smi. Out: a table of forecast and measured, GiB and tokens. Left to others: the run, the forecast
(forecast_sharing).

    nvidia-smi --query-gpu=timestamp,index,memory.used,utilization.gpu --format=csv,noheader,nounits -lms 250 > gpu.csv

Colocated, the samples are told apart by SGLang's log: a release of memory begins the trainer's step, the next resume
the loading of weights, the one after it the rollout. Samples beside such a moment belong to neither side.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rl360.config.check import load
from rl360.config.files import model_folder
from rl360.config.forecast import GIB, MIB, ModelShape
from rl360.config.forecast_sharing import (
    PHASE_LOAD,
    PHASE_ROLLOUT,
    PHASE_STEPS,
    ServingForecast,
    serving_forecast,
)
from rl360.config.gpu_memory import gpu_forecast
from rl360.config.run_folder import RESOLVED
from rl360.config.schemas import MegatronTrainerConfig, RootConfig
from rl360.errors import ConfigError

EDGE_S = 1.0  # SGLang's log has whole seconds, and a release or a resume takes a part of one
_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_OTHER_RANK = re.compile(r"^\[[^\]]* TP[1-9]")
_NUMBERS = {  # SGLang 0.5.16's lines; "GB" there are GiB
    "free": re.compile(r"Load weight begin\. avail mem=([\d.]+) GB"),
    "weights": re.compile(r"Load weight end\..* mem usage=([\d.]+) GB"),
    "tokens": re.compile(r"KV Cache is allocated\..*#tokens: (\d+)"),
    "kv_cache": re.compile(r"KV Cache is allocated\..*K size: ([\d.]+) GB, V size: ([\d.]+) GB"),
    "graphs": re.compile(r"Capture target (?:decode|prefill) CUDA graph end\..* mem usage=([\d.]+) GB"),
    "left": re.compile(r"max_total_num_tokens=.*available_gpu_mem=([\d.]+) GB"),
}
_WATCHED = {"trainer step": PHASE_STEPS, "transfer": PHASE_LOAD, "rollout": PHASE_ROLLOUT}  # of benchmarks/colocated.py
_MOVES = re.compile(r'"POST /(release|resume)_memory_occupation')


@dataclass(slots=True)
class ServerLog:
    """Of a server's last start: numbers in GiB and tokens; of all its lives the moments at which memory moved."""

    numbers: dict[str, float] = field(default_factory=dict)
    moves: list[tuple[datetime, str]] = field(default_factory=list)


def read_log(lines: Iterable[str]) -> ServerLog:
    """From the lines of logs/sglang-<i>.log. Several graphs' memory is added up."""
    log = ServerLog()
    for line in lines:
        if _OTHER_RANK.match(line):
            continue
        for name, pattern in _NUMBERS.items():
            if (found := pattern.search(line)) is not None:
                value = sum(float(group) for group in found.groups())
                if name == "free":
                    log.numbers.clear()
                log.numbers[name] = log.numbers.get(name, 0.0) + value if name == "graphs" else value
        moved, stamp = _MOVES.search(line), _STAMP.match(line)
        if moved and stamp:
            log.moves.append((datetime.fromisoformat(stamp[1]), moved[1]))
    return log


def read_samples(lines: Iterable[str], gpu: int) -> list[tuple[datetime, float]]:
    """(time, GiB used) of one GPU from nvidia-smi's timestamp, index, memory.used in MiB."""
    samples = []
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) >= 3 and cells[1] == str(gpu) and cells[2].isdigit():
            samples.append((datetime.strptime(cells[0], "%Y/%m/%d %H:%M:%S.%f"), int(cells[2]) * MIB / GIB))
    return samples


def phase_at(moves: Sequence[tuple[datetime, str]], when: datetime) -> str | None:
    """The phase of a colocated run at a moment; None: too near to a change. Before the first release: rollout."""
    phase = PHASE_ROLLOUT
    for moved, kind in moves:
        if abs((moved - when).total_seconds()) <= EDGE_S:
            return None
        if moved > when + timedelta(seconds=EDGE_S):
            break
        phase = PHASE_STEPS if kind == "release" else PHASE_LOAD if phase == PHASE_STEPS else PHASE_ROLLOUT
    return phase


def peaks(forecast: ServingForecast, log: ServerLog, samples: Sequence[tuple[datetime, float]]) -> dict[str, float]:
    """GiB of the fullest sample of each phase; those in which weights pass are often too short for one."""
    found: dict[str, float] = {}
    names = [phase.name for phase in forecast.phases]
    for when, used in samples:
        phase = phase_at(log.moves, when) if len(names) > 1 else names[0]
        if phase is not None:
            found[phase] = max(found.get(phase, 0.0), used)
    return found


def compare(
    forecast: ServingForecast, log: ServerLog, used: Mapping[str, float], metrics: Sequence[Mapping[str, float]]
) -> list[tuple[str, float, float]]:
    """(what, forecast, measured), GiB but for tokens; only what was measured. used: GiB by phase."""
    engine, numbers = forecast.engine, log.numbers
    working = engine.working
    left = engine.free - engine.weights - engine.kv_cache - working["request table"] - working["buffers"]
    ours = {
        "free": engine.free / GIB,
        "weights": engine.weights / GIB,
        "tokens": float(engine.tokens),
        "kv_cache": engine.kv_cache / GIB,
        "graphs": working["CUDA graphs"] / GIB,
        "left": (left - working["CUDA graphs"]) / GIB,
    }
    rows = [(f"SGLang {name}", ours[name], numbers[name]) for name in ours if name in numbers]
    trainer = _trainer(forecast)
    for name, forecast_gib in trainer.items():
        if values := [float(row[name]) for row in metrics if name in row]:
            rows.append((name, forecast_gib, max(values)))
    for phase in forecast.phases:
        if phase.name in used:
            rows.append((f"nvidia-smi, {phase.name}", phase.needed / GIB, used[phase.name]))
    return rows


def _trainer(forecast: ServingForecast) -> dict[str, float]:
    config = forecast.config
    if not isinstance(config.trainer, MegatronTrainerConfig):
        return {}
    stages = gpu_forecast(config, forecast.engine.server.model, forecast.capacity).stages
    stage = max(stages, key=lambda one: one.total)
    return {
        "perf/peak_memory_gib_max": stage.allocated / GIB,
        "perf/peak_reserved_gib_max": (stage.allocated + stage.slack) / GIB,
    }


def lines(rows: Sequence[tuple[str, float, float]]) -> list[str]:
    """A Markdown table. Measured less forecast: in the unit of the row, and as a share of the forecast."""
    table = ["| | forecast | measured | difference |", "|---|---|---|---|"]
    for name, ours, theirs in rows:
        digits = 0 if name.endswith("tokens") else 2
        share = f" ({(theirs - ours) / ours:+.1%})" if ours else ""
        table.append(f"| {name} | {ours:,.{digits}f} | {theirs:,.{digits}f} | {theirs - ours:+,.{digits}f}{share} |")
    return table


def forecast_of(run: Path, gpu_memory_gib: float | None, model: Path | None = None) -> ServingForecast:
    """The forecast for the config of a run folder. model: where the model is now; None: where the run had it.

    Raises `ConfigError` where it cannot be made.
    """
    values = OmegaConf.load(run / RESOLVED)
    assert isinstance(values, DictConfig)
    config, problems = load(values)
    if config is None:
        raise ConfigError(list(problems))
    if config.rollout.engine != "sglang":
        raise ConfigError(f"{run / RESOLVED}: rollout.engine {config.rollout.engine}; expected sglang")
    known = gpu_memory_gib or config.cluster.gpu_memory_gib
    return serving_forecast(config, _shape(config, model), None if known is None else int(known * GIB))


def _shape(config: RootConfig, model: Path | None) -> ModelShape:
    """From the model's folder where it is still there, else from what model.expect says."""
    path = (model or model_folder(config)) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else dict(config.model.expect or {})
        return ModelShape.from_hf(raw)
    except (KeyError, OSError, ValueError) as error:
        raise ConfigError(f"model: neither {path} nor model.expect has its numbers ({error})") from error


def main(arguments: Sequence[str] | None = None) -> int:
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="rl360.config.forecast_compare", description=description)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--samples", type=Path, help="nvidia-smi's CSV, see the module")
    parser.add_argument("--peaks", type=Path, help="instead: JSON of benchmarks/colocated.py, which knows the phases")
    parser.add_argument("--model", type=Path, help="folder with the model's config.json, when it has moved")
    parser.add_argument("--gpu", type=int, default=0, help="index of the GPU in the samples")
    parser.add_argument("--gpu-memory-gib", type=float, help="of a GPU as CUDA has it (an H200: 139.8)")
    parser.add_argument("--server", type=int, default=0, help="whose log")
    given = parser.parse_args(arguments)
    try:
        forecast = forecast_of(given.run, given.gpu_memory_gib, given.model)
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    name = f"sglang-{given.server}.log"
    log_path = next((path for path in (given.run / "logs" / name, given.run / name) if path.is_file()), None)
    log = read_log(_lines(log_path)) if log_path else ServerLog()
    metrics = [json.loads(line) for line in _lines(given.run / "metrics.jsonl") if line.strip()]
    used = peaks(forecast, log, read_samples(_lines(given.samples), given.gpu)) if given.samples else {}
    if given.peaks:
        found = json.loads(given.peaks.read_text(encoding="utf-8"))["peak_gib"]
        used |= {_WATCHED[name]: float(gib) for name, gib in found.items() if name in _WATCHED}
    print("\n".join([*forecast.lines(), "", *lines(compare(forecast, log, used, metrics))]))
    return 0


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


if __name__ == "__main__":
    sys.exit(main())
