"""What the `rl360 tasks` commands run on: trial workers, the failure table, the verifier's rule for success.

In: a checked config. Out: started components, closed by their context managers. Like rl360.engine.build for runs, this
is where the parts of one command meet; what they do is their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl360.config.schemas import RootConfig, TorchTrainerConfig
from rl360.engine import build
from rl360.engine.workers import LocalWorkerGroup
from rl360.protocols import Rollout
from rl360.rollout.failures import Action, classify
from rl360.rollout.queue import RolloutEvents
from rl360.tasks.calibration import model_fingerprint
from rl360.types import Session, TrialResult, Turn

PROBE_AGENT = "rl360.tasks.probe_agent:ProbeAgent"
_REWARD_KEY = "reward"  # as rl360.rewards.verifier
# A probe asks no model; the table takes an attempt without a model call for one that the engine failed.
_TURN = Turn((), {}, "stop", 0, 0, 0.0, 0)
_ANSWERED = Session((), (_TURN,), None, None, 0.0)


@contextmanager
def probe_workers(config: RootConfig, folder: Path, jobs: int, num_processes: int) -> Iterator[LocalWorkerGroup]:
    """Trial workers whose agent acts out probes. Raises what their start raises: no sandbox on this machine."""
    size = max(1, min(jobs, num_processes))
    settings = {
        "agent": {**asdict(config.agent), "import_path": PROBE_AGENT, "kwargs": {}},
        "sandbox": asdict(config.sandbox),
        "cache_dir": Path(config.paths.cache),
        "trials_dir": folder / "trials",
        "trial_timeout_s": config.cluster.trial_timeout_s,
        "model_name": "probe",
        "max_concurrent": -(-jobs // size),
        "start_interval_s": config.rollout.start_interval_s,
        "run_id": "validate",
    }
    environment = {**build.TRIAL_ENVIRONMENT, **build.ONE_THREAD}
    workers = LocalWorkerGroup(
        build.TRIAL_WORKER, size, settings, name="trial", log_dir=folder / "logs", env=environment
    )
    try:
        workers.start()
        yield workers
    finally:
        workers.close()


@contextmanager
def policy_rollout(config: RootConfig, folder: Path, events: RolloutEvents) -> Iterator[Rollout]:
    """The rollout of training without a trainer: the model's weights in an embedded engine, or servers that run."""
    with ExitStack() as stack:
        model = _FixedWeights(_load_weights(config)) if config.rollout.engine == "embedded" else _FixedWeights(None)
        urls, _ = build.make_engines(config, folder, model, stack)
        rollout = build.make_rollout(config, folder, "calibrate", build.make_gateway(config, folder, urls), events)
        stack.callback(rollout.close)
        rollout.start()
        yield rollout


@dataclass(frozen=True, slots=True)
class _FixedWeights:
    """What the embedded engine needs of a trainer."""

    decoder: Any
    version: int = 0


def _load_weights(config: RootConfig) -> Any:
    import torch

    from rl360.models.cpu_threads import use_cpu_threads
    from rl360.models.loading import load_decoder

    trainer = config.trainer if isinstance(config.trainer, TorchTrainerConfig) else TorchTrainerConfig()
    device = trainer.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        use_cpu_threads(trainer.num_threads)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    seed = config.seed if config.model.random_init else None
    return load_decoder(build.model_dir(config), device, dtype, seed).requires_grad_(False)


def score_of(trial: TrialResult) -> tuple[float | None, bool, str | None]:
    """(reward, whether the machine failed and not the task, cause), by the failure table of training.

    The reward is the entry that decides success: `reward`, or the only one. None: no verdict.
    """
    verdict = classify(trial, _ANSWERED, agent_timeout_s=math.inf if trial.rewards else 0.0)
    if verdict.action in (Action.REQUEUE, Action.ABORT):
        return None, True, verdict.cause
    if verdict.action is Action.SCORE_ZERO:
        return 0.0, False, verdict.cause
    rewards = trial.rewards or {}
    if verdict.action is not Action.TRAIN or not (_REWARD_KEY in rewards or len(rewards) == 1):
        return None, False, verdict.cause or "verifier_no_reward"
    return float(rewards.get(_REWARD_KEY, next(iter(rewards.values())))), False, None


def sandbox_settings(config: RootConfig) -> dict[str, Any]:
    """What a validation report depends on besides the task."""
    return asdict(config.sandbox)


def attempt_settings(config: RootConfig) -> dict[str, Any]:
    """What a pass rate depends on besides the task."""
    return {
        "model": config.model.name,
        "weights": model_fingerprint(build.model_dir(config)) if config.rollout.engine == "embedded" else "external",
        "tool_parser": config.model.tool_parser,
        "reasoning_parser": config.model.reasoning_parser,
        "sampling": asdict(build.training_sampling(config)),
        "agent": asdict(config.agent),
        "sandbox": asdict(config.sandbox),
        "reward": {name: asdict(entry) for name, entry in config.reward.items()},
        "seed": config.seed,
    }
