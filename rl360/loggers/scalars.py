"""What each scalar means: its unit and one sentence, for TensorBoard's descriptions and the guide.

In: a scalar's name. Out: its description. Left to others: computing scalars (rl360.engine.metrics, the trainer).
Every scalar has one axis, the iteration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EVALUATION = "eval/"  # the only scalars of an iteration that are logged before its checkpoint


@dataclass(frozen=True, slots=True)
class Scalar:
    """Meaning of one name, or of a family of names: `<part>` stands for one path element."""

    name: str
    unit: str  # "" when the value is a pure number
    meaning: str

    @property
    def description(self) -> str:
        return f"{self.meaning} [{self.unit}]" if self.unit else self.meaning


SCALARS = (
    Scalar("reward/unfiltered_mean", "", "Mean reward of all training attempts that have one, penalties included"),
    Scalar("reward/kept_mean", "", "Mean reward of the attempts that were trained on, after filtering"),
    Scalar("reward/success_rate", "share", "Training attempts that solved their task, of those with a verdict"),
    Scalar("reward/domain/<tag>/mean", "", "Mean reward of the training attempts at tasks of this domain"),
    Scalar("reward/domain/<tag>/count", "attempts", "Training attempts of this domain that have a reward"),
    Scalar("reward/<name>_mean", "", "Mean of what this reward signal adds to an attempt's reward"),
    Scalar("rollout/samples_<outcome>", "attempts", "Training attempts of the iteration with this outcome"),
    Scalar("rollout/masked/<cause>", "attempts", "Masked training attempts with this infrastructure cause"),
    Scalar("rollout/response_tokens_mean", "tokens", "Mean number of sampled tokens of an attempt"),
    Scalar("rollout/turns_mean", "turns", "Mean number of model calls of an attempt"),
    Scalar("rollout/truncated_share", "share", "Attempts in which a turn reached the token cap"),
    Scalar(
        "rollout/format_failures_mean", "replies", "Replies of an attempt that its agent could not read, on average"
    ),
    Scalar("rollout/forks", "segments", "Segments that began because a request did not extend its history"),
    Scalar("rollout/groups", "groups", "Groups that were rolled out"),
    Scalar("rollout/groups_kept", "groups", "Groups that were trained on"),
    Scalar("rollout/staleness_max", "versions", "Training version minus the version of the oldest token, at most"),
    Scalar("rollout/staleness_mean", "versions", "Training version minus the version of a sampled token, on average"),
    Scalar("rollout/mixed_versions_share", "share", "Attempts that went on over new weights"),
    Scalar("gateway/<count>", "", "What the gateway counted in this iteration: resends, moves, engines left out"),
    Scalar("rollout/groups_ahead", "groups", "Finished groups that wait for their iteration"),
    Scalar("mismatch/kl", "nats/token", "Mean difference of the engine's and the trainer's logprobs, as a KL estimate"),
    Scalar("mismatch/ratio_max", "", "Largest probability ratio of trainer and engine over the sampled tokens"),
    Scalar("mismatch/logprob_diff_max", "nats", "Largest absolute difference of engine and trainer logprobs"),
    Scalar("mismatch/position/<range>/kl", "nats/token", "The same KL estimate over tokens at these places"),
    Scalar("mismatch/position/<range>/logprob_diff_mean", "nats/token", "The same difference at these places"),
    Scalar("mismatch/position/<range>/ratio_max", "", "The same largest ratio at these places of the response"),
    Scalar("mismatch/position/<range>/share", "share", "Weight in the loss of the tokens at these places"),
    Scalar("mismatch/alarm", "", "1 when the mismatch is above its limit, or a canary run drifts"),
    Scalar("mismatch/canary_growth", "", "At learning rate 0: recent mean difference over that of the first rows"),
    Scalar("mismatch/logprob_diff_mean", "nats/token", "Mean absolute difference of engine and trainer logprobs"),
    Scalar("mismatch/correction_mean", "", "Mean importance weight that the loss used, after truncation and masking"),
    Scalar("mismatch/truncated_share", "share", "Trained tokens whose importance weight was truncated to the cap"),
    Scalar("mismatch/masked_share", "share", "Trained tokens that the importance band took out of the loss"),
    Scalar("train/loss", "", "The objective that the optimizer stepped on"),
    Scalar("train/grad_norm", "", "Global norm of the gradient before clipping"),
    Scalar("train/entropy", "nats/token", "Mean entropy of the policy at the sampled positions"),
    Scalar("train/clip_fraction", "share", "Trained tokens whose ratio was clipped"),
    Scalar("train/reference_kl", "nats/token", "KL estimate of policy and reference model, when there is one"),
    Scalar("train/lr", "", "Learning rate of the step"),
    Scalar("train/skipped", "steps", "1 when no group was worth training on"),
    Scalar("time/step_s", "s", "Wall time of the whole iteration"),
    Scalar("time/wait_s", "s", "Wall time in which the trainer waited for the iteration's groups"),
    Scalar("time/generate_s", "s", "Mean time of an attempt spent waiting for the engine"),
    Scalar("time/sandbox_s", "s", "Mean time of an attempt until its sandbox was ready"),
    Scalar("time/verify_s", "s", "Mean time of an attempt in the verifier"),
    Scalar("time/queue_s", "s", "Mean time of an attempt before it was started"),
    Scalar("time/train_s", "s", "Wall time of the trainer's step"),
    Scalar("time/publish_s", "s", "Wall time until every engine had the new weights"),
    Scalar("time/sync_stall_s", "s", "Wall time of the weight sync in which no new request reached an engine"),
    Scalar("time/sync_transfer_s", "s", "Wall time of the weight sync in which tensors travelled"),
    Scalar("time/cpu_s", "s", "CPU time of the driver and of every process below it, over the iteration"),
    Scalar("perf/tokens_per_s", "tokens/s", "Sampled tokens a second over the whole iteration"),
    Scalar("perf/train_tokens_per_s", "tokens/s", "Tokens a second through the trainer's forward and backward"),
    Scalar("perf/gpus", "GPUs", "GPUs that train and serve"),
    Scalar("perf/peak_memory_gib_max", "GiB", "Most memory that the step's tensors took on a GPU, the fullest one"),
    Scalar("perf/peak_reserved_gib_max", "GiB", "Most memory that torch held on a GPU during the step"),
    Scalar("perf/trajectories_per_gpu_hour", "1/(GPU h)", "Finished attempts an hour and GPU"),
    Scalar("eval/success_rate", "share", "Evaluation attempts that solved their task, on tasks never trained on"),
    Scalar("eval/reward_mean", "", "Mean reward of the evaluation attempts"),
    Scalar("eval/samples", "attempts", "Evaluation attempts with a verdict"),
    Scalar("eval/version", "", "Weight version that the evaluation was pinned to"),
    Scalar("eval/task/<task>/success_rate", "share", "Evaluation attempts that solved this task"),
    Scalar("final/<key>", "", "This key of summary.json, so that runs compare in the hparams view"),
)

_PATTERNS = [
    (re.compile(re.sub(r"<\w+>", "[^/]+", re.escape(s.name).replace(r"\<", "<").replace(r"\>", ">"))), s)
    for s in SCALARS
]


def before_the_checkpoint(old: Mapping[str, Any], new: Mapping[str, float]) -> dict[str, Any]:
    """Of the scalars of an iteration that a resume begins with, those that it does not make again: the evaluation, as
    long as `new`, what it logs, has none of its own."""
    if any(name.startswith(EVALUATION) for name in new):
        return {}
    return {name: value for name, value in old.items() if name.startswith(EVALUATION)}


def describe(name: str) -> str:
    """The description of a scalar; empty for a name that nobody described."""
    for pattern, scalar in _PATTERNS:
        if pattern.fullmatch(name):
            return scalar.description
    return ""
