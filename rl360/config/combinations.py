"""Which values and which combinations make an experiment, as a pure function of the typed config.

In: a `RootConfig` whose keys and types are right. Out: problems as `key: what; expected; try`, and warnings. Looks at
no file, no machine and no source: those are rl360.config.files and rl360.config.targets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from urllib.parse import urlsplit

from omegaconf import OmegaConf

from rl360.config.arguments import argument_value_problems
from rl360.config.compose import SECRET_KEY
from rl360.config.forecast import keeps_best
from rl360.config.gateway import gateway_problems
from rl360.config.megatron import megatron_problems
from rl360.config.names import suggestion
from rl360.config.schemas import RootConfig
from rl360.config.serving import serving_problems

CHOICES = {
    "model.tool_parser": ("none", "hermes", "qwen25", "k2_horizon"),
    "model.reasoning_parser": ("none", "qwen3", "k2_horizon"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "algorithm.reducer": ("token_mean", "sequence_mean"),
    "algorithm.filter": ("differing_rewards", "none"),
    "algorithm.importance_level": ("token", "sequence"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.recompute": ("none", "core_attn", "full"),
    "gateway.policy": ("manual", "consistent_hashing"),
    "rollout.engine": ("embedded", "sglang", "external"),
    "rollout.sync": ("shared", "disk", "ipc", "nccl"),
    "rollout.sync_mode": ("interrupt", "drain"),
    "rollout.sglang.dtype": ("auto", "bfloat16", "float16", "float32"),
}

TOOL_AGENT = "rl360.agents.bash:BashAgent"

# key -> (least, most, whether the least itself is excluded); None: no bound. Here and above, a key that only some
# options of a group have is looked at where it is.
RANGES: dict[str, tuple[float | None, float | None, bool]] = {
    "seed": (0, 2**63 - 1, False),
    "iterations": (1, None, False),
    "group_size": (1, None, False),
    "tasks_per_iteration": (1, None, False),
    "model.max_context_tokens": (2, None, False),
    "algorithm.clip_low": (0, 1, False),
    "algorithm.clip_high": (0, None, False),
    "algorithm.kl_coef": (0, None, False),
    "algorithm.updates_per_batch": (1, None, False),
    "algorithm.importance_cap": (0, None, True),
    "algorithm.importance_mask_below": (0, 1, True),
    "algorithm.importance_mask_above": (1, None, False),
    "rollout.sglang.num_servers": (1, None, False),
    "rollout.sglang.tensor_parallel_size": (1, None, False),
    "rollout.sglang.base_port": (0, 65535, False),
    "rollout.sglang.mem_fraction_static": (0, 1, True),
    "rollout.sglang.max_running_requests": (1, None, False),
    "rollout.sglang.cuda_graph_max_bs": (0, None, False),
    "rollout.sglang.start_timeout_s": (0, None, True),
    "rollout.sglang.health_interval_s": (0, None, True),
    "rollout.sglang.health_timeout_s": (0, None, True),
    "rollout.sglang.health_failures": (1, None, False),
    "rollout.sglang.straggler_s": (0, None, True),
    "rollout.sglang.max_restarts": (0, None, False),
    "rollout.sglang.bucket_gib": (0, None, True),
    "rollout.sglang.engines_per_group": (0, None, False),
    "trainer.learning_rate": (0, None, False),
    "trainer.warmup_steps": (0, None, False),
    "trainer.eps": (0, None, True),
    "trainer.weight_decay": (0, None, False),
    "trainer.max_grad_norm": (0, None, False),
    "trainer.max_tokens_per_gpu": (1, None, False),
    "trainer.logprob_chunk_tokens": (1, None, False),
    "trainer.num_threads": (0, 4096, False),  # torch starts every one of them
    "trainer.step_timeout_s": (0, None, True),
    "trainer.start_timeout_s": (0, None, True),
    "rollout.temperature": (0, None, True),
    "rollout.max_new_tokens": (1, None, False),
    "rollout.max_context_tokens": (2, None, False),
    "rollout.max_staleness": (0, None, False),
    "rollout.concurrency": (1, None, False),
    "rollout.num_workers": (0, None, False),
    "rollout.start_interval_s": (0, None, False),
    "rollout.max_tries": (1, None, False),
    "rollout.max_masked_share": (0, 1, False),
    "rollout.max_running_requests": (1, None, False),
    "rollout.kv_cache_gib": (0, None, True),
    "rollout.request_timeout_s": (0, None, True),
    "rollout.drain_timeout_s": (0, None, True),
    "gateway.port": (0, 65535, False),
    "gateway.smg_port": (0, 65535, False),
    "gateway.metrics_port": (0, 65535, False),
    "gateway.start_timeout_s": (0, 110, True),  # its worker has 120 s
    "gateway.stop_timeout_s": (0, 60, True),  # the gateway as a whole has 90 s
    "gateway.health_interval_s": (0, None, True),
    "agent.max_turns": (1, None, False),
    "sandbox.memory_mib": (0, None, False),
    "sandbox.cpus": (0, None, False),
    "sandbox.pids": (0, None, False),
    "sandbox.disk_mib": (0, None, False),
    "sandbox.start_timeout_s": (0, None, True),
    "sandbox.verifier_timeout_s": (0, None, True),
    "evaluation.every": (0, None, False),
    "evaluation.k": (1, None, False),
    "evaluation.temperature": (0, None, False),
    "checkpoint.every": (0, None, False),
    "checkpoint.keep_last": (1, None, False),
    "checkpoint.keep_every": (0, None, False),
    "mismatch.max_kl": (0, None, True),
    "mismatch.max_ratio": (1, None, True),
    "mismatch.canary_growth": (1, None, True),
    "cluster.gpu_memory_gib": (0, None, True),
    "cluster.no_progress_s": (0, None, True),
}

# Deadlines from the inside out: each must end before the next, so that the inner one can say what happened.
DEADLINES = (
    ("model call", "rollout.request_timeout_s"),
    ("turn", "rollout.turn_timeout_s"),
    ("agent", "agent.timeout_s"),
    ("trial", "cluster.trial_timeout_s"),
    ("client", "cluster.client_timeout_s"),
    ("sandbox lifetime", "sandbox.lifetime_s"),
)

# What an agent waits for an answer itself when agent.kwargs.request_timeout_s is not given: our agents, and OpenAI's
# client in most others.
AGENT_REQUEST_TIMEOUT_S = 600.0

# Names become folders and files: no separators, nothing hidden.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# What the keys of well-known services begin with; a value like that is a secret wherever it stands.
_SECRET_VALUE = re.compile(r"^(sk-|hf_|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|AIza|dtn_)[A-Za-z0-9_\-]{8,}")


def combination_problems(config: RootConfig) -> list[str]:
    """Everything wrong with values and combinations, in the order of the config."""
    return [
        *_names(config),
        *_choices(config),
        *_ranges(config),
        *_batch(config),
        *_sampling(config),
        *_engine(config),
        *gateway_problems(config),
        *megatron_problems(config),
        *_agent(config),
        *argument_value_problems(config),
        *_deadlines(config),
        *_secrets(config),
        *_evaluation(config),
    ]


def combination_warnings(config: RootConfig) -> Iterator[str]:
    """What fits together and is yet hardly meant."""
    kept = config.checkpoint
    between = 0 < kept.every <= config.iterations
    if not (kept.at_end or kept.hf or between or keeps_best(config)) and config.trainer.learning_rate > 0:
        yield (
            "checkpoint: nothing would be kept of the weights: no checkpoint (checkpoint.at_end=false, none by "
            "checkpoint.every or of an evaluation) and no HF folder (checkpoint.hf=false)"
        )


def _select(config: RootConfig, key: str) -> object:
    """The value; None also for a key that the chosen option of its group does not have."""
    node: object = config
    for part in key.split("."):
        node = getattr(node, part, None)
    return node


def _names(config: RootConfig) -> Iterator[str]:
    for key, value in (("name", config.name), ("model.name", config.model.name)):
        if value and not _NAME.fullmatch(value):
            yield f"{key}: {value!r} becomes a folder; expected letters, digits, '.', '_' and '-'"


def _choices(config: RootConfig) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        value = _select(config, key)
        if value is not None and value not in allowed and (not key.startswith("algorithm.") or _ours(config)):
            yield f"{key}: {value!r} is none of {', '.join(allowed)}{_did_you_mean(str(value), allowed)}"


def _did_you_mean(word: str, allowed: tuple[str, ...]) -> str:
    text = suggestion(word, allowed)
    return text if "did you mean" in text else ""


def _ours(config: RootConfig) -> bool:
    return config.algorithm._target_.startswith("rl360.")


def _ranges(config: RootConfig) -> Iterator[str]:
    for key, (least, most, excluded) in RANGES.items():
        value = _select(config, key)
        if not isinstance(value, int | float):
            continue
        if least is not None and (value < least or (excluded and value == least)):
            yield f"{key}: {value}; expected {'more than' if excluded else 'at least'} {least}"
        elif most is not None and value > most:
            yield f"{key}: {value}; expected at most {most}"
    betas = config.trainer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"trainer.betas: {list(betas)}; expected two numbers from 0 to below 1"
    if config.algorithm.clip_high < config.algorithm.clip_low:
        yield (
            f"algorithm.clip_high: {config.algorithm.clip_high} is below clip_low {config.algorithm.clip_low}; "
            "expected clip_high >= clip_low"
        )


def _batch(config: RootConfig) -> Iterator[str]:
    if config.group_size == 1 and _ours(config):
        yield (
            "group_size: 1 leaves nothing to compare: advantages are relative to the group's mean, so every one would "
            "be 0; expected at least 2, try 8"
        )
    attempts = config.group_size * config.tasks_per_iteration
    if config.algorithm.updates_per_batch > attempts > 0:
        yield (
            f"algorithm.updates_per_batch: {config.algorithm.updates_per_batch} updates from {attempts} attempts "
            "(group_size x tasks_per_iteration); expected at most one update an attempt"
        )
    if not config.reward:
        yield "reward: no reward at all; expected at least one, try reward=[verifier]"
    for name in sorted(set(config.reward) & {"kept", "unfiltered"}):
        yield f"reward.{name}: its scalar would take the place of reward/{name}_mean; expected another name"
    if not config.logger:
        yield "logger: no logger at all; expected at least one, try logger=[jsonl]"


def _sampling(config: RootConfig) -> Iterator[str]:
    rollout = config.rollout
    hint = "the trainer's logprobs are of the whole distribution, so truncated sampling would bias every ratio"
    if rollout.top_p != 1.0:
        yield f"rollout.top_p: {rollout.top_p} in training; {hint}; expected 1.0"
    if rollout.top_k != -1:
        yield f"rollout.top_k: {rollout.top_k} in training; {hint}; expected -1 (all tokens)"
    if rollout.max_new_tokens >= rollout.max_context_tokens:
        yield (
            f"rollout.max_new_tokens: {rollout.max_new_tokens} leaves no room for a prompt in "
            f"rollout.max_context_tokens {rollout.max_context_tokens}; expected less"
        )
    if rollout.max_context_tokens > config.model.max_context_tokens:
        yield (
            f"rollout.max_context_tokens: {rollout.max_context_tokens} is more than the model was trained for "
            f"(model.max_context_tokens {config.model.max_context_tokens}); expected at most that"
        )


def _engine(config: RootConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine == "external":
        if not rollout.engine_urls:
            yield "rollout.engine_urls: empty with engine external; expected at least one URL, such as http://host:30000"
        if rollout.sync != "disk":
            needs = "the embedded engine (one process)" if rollout.sync == "shared" else "servers of the run (sglang)"
            yield f"rollout.sync: {rollout.sync} needs {needs}; expected disk with engine external"
    elif rollout.engine == "sglang":
        yield from serving_problems(config)
    elif rollout.engine == "embedded":
        if rollout.engine_urls:
            yield "rollout.engine_urls: given with engine embedded; expected none, or try rollout=external"
        if rollout.max_staleness > 0:
            yield (
                f"rollout.max_staleness: {rollout.max_staleness} with the embedded engine, which shares the trainer's "
                "weights and is drained before each step; expected 0"
            )
        if rollout.sync != "shared":
            yield f"rollout.sync: {rollout.sync} with the embedded engine, which has the trainer's; expected shared"
    if rollout.sglang.colocated and rollout.engine != "sglang":
        yield f"rollout.sglang.colocated: true with engine {rollout.engine}; expected engine sglang, try rollout=sglang"
    if rollout.max_staleness > 0 and rollout.engine != "embedded":
        yield from _asynchronous(config)
    for url in rollout.engine_urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(url):
            yield f"rollout.engine_urls: {url!r} is not a URL; expected http://host:port"
    if len({url.rstrip("/") for url in rollout.engine_urls}) != len(rollout.engine_urls):
        yield "rollout.engine_urls: the same URL twice; expected each engine once"


def _has_port(url: str) -> bool:
    """Whether its port can be one; none at all is the scheme's."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _asynchronous(config: RootConfig) -> Iterator[str]:
    staleness = f"rollout.max_staleness {config.rollout.max_staleness}"
    if config.rollout.deterministic:
        yield (
            f"rollout.deterministic: true with {staleness}: which tokens an update finds sampled is a matter of time, "
            "so no rerun is bit-equal; expected false"
        )
    if _ours(config) and config.algorithm.importance_cap is None:
        yield (
            f"algorithm.importance_cap: null with {staleness}: tokens of older weights would count as those of today; "
            "expected a cap, such as 2.0"
        )


def _agent(config: RootConfig) -> Iterator[str]:
    if config.agent.import_path == TOOL_AGENT and config.model.tool_parser == "none":
        yield (
            "model.tool_parser: none with agent=bash, whose every turn is a tool call: all of them would be malformed; "
            "expected hermes or k2_horizon, or try agent=bash_text"
        )


def _deadlines(config: RootConfig) -> Iterator[str]:
    for (inner, inner_key), (outer, outer_key) in pairwise(DEADLINES):
        inner_s, outer_s = float(str(_select(config, inner_key))), float(str(_select(config, outer_key)))
        if inner_s >= outer_s:
            yield (
                f"{outer_key}: {outer_s:g} s for the {outer} is not more than {inner_key} {inner_s:g} s for the "
                f"{inner}; deadlines nest: {' < '.join(name for name, _ in DEADLINES)}"
            )
    phases_s = config.sandbox.start_timeout_s + config.agent.timeout_s + config.sandbox.verifier_timeout_s
    if config.cluster.trial_timeout_s < phases_s:
        yield (
            f"cluster.trial_timeout_s: {config.cluster.trial_timeout_s:g} s is less than sandbox start, agent and "
            f"verifier together ({phases_s:g} s); expected at least that"
        )
    elif config.cluster.trial_timeout_s < phases_s + config.rollout.request_timeout_s:
        yield (
            f"cluster.trial_timeout_s: {config.cluster.trial_timeout_s:g} s leaves an agent that uses its whole time "
            f"no room to wait for the engine; expected at least sandbox start, agent, verifier and one model call, "
            f"{phases_s + config.rollout.request_timeout_s:g} s"
        )
    yield from _agent_deadlines(config)
    if config.cluster.no_progress_s <= config.cluster.client_timeout_s:
        yield (
            f"cluster.no_progress_s: {config.cluster.no_progress_s:g} s would end a run during one slow trial "
            f"(cluster.client_timeout_s {config.cluster.client_timeout_s:g} s); expected more"
        )


def _agent_deadlines(config: RootConfig) -> Iterator[str]:
    """What the agent itself waits for: longer than the proxy for an answer, and for a tool within its turn."""
    call_s, turn_s = config.rollout.request_timeout_s, config.rollout.turn_timeout_s
    waits_s = config.agent.kwargs.get("request_timeout_s", AGENT_REQUEST_TIMEOUT_S)
    if isinstance(waits_s, int | float) and waits_s <= call_s:
        key = "agent.kwargs.request_timeout_s"
        yield (
            f"{key}: the agent gives up on an answer after {waits_s:g} s, before the proxy does "
            f"(rollout.request_timeout_s {call_s:g} s), and what was sampled is lost; expected more"
        )
    command_s = config.agent.kwargs.get("command_timeout_s", 0)
    if isinstance(command_s, int | float) and call_s < turn_s < call_s + command_s:
        yield (
            f"agent.kwargs.command_timeout_s: {command_s:g} s for a command and {call_s:g} s for a model call "
            f"(rollout.request_timeout_s) are more than a turn (rollout.turn_timeout_s {turn_s:g} s); expected "
            f"at most {turn_s - call_s:g}"
        )


def _secrets(config: RootConfig) -> Iterator[str]:
    """Names of variables may stand in a config, secrets may not: resolved.yaml is kept and shared."""
    values = OmegaConf.to_container(OmegaConf.structured(config), resolve=False)
    for path, value in _leaves(values):
        if not isinstance(value, str):
            continue
        if _SECRET_VALUE.match(value):
            yield f"{path}: looks like a secret; put it into an environment variable and name that"
        elif path.endswith("_env") and not _VARIABLE.fullmatch(value):
            yield f"{path}: is not the name of an environment variable; the secret itself is never stored"
        elif SECRET_KEY.search(path) and not path.startswith(("reward.", "tasks.")) and value:
            yield f"{path}: would store a secret; name the variable instead, as in gateway.api_key_env"


def _leaves(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _leaves(value, f"{path}[{i}]")
    else:
        yield path, node


def _evaluation(config: RootConfig) -> Iterator[str]:
    if config.evaluation.every > 0 and config.evaluation.tasks is None:
        yield (
            f"evaluation.tasks: null with evaluation.every {config.evaluation.every}; expected a folder of tasks that "
            "are not trained on, or evaluation.every=0"
        )
    if config.evaluation.at_start and config.evaluation.every == 0:
        yield (
            "evaluation.at_start: true with evaluation.every 0, which turns every evaluation off; expected an every of "
            "at least 1, above iterations for the one at the start alone"
        )
    if config.evaluation.k > 1 and config.evaluation.temperature == 0:
        yield f"evaluation.k: {config.evaluation.k} greedy attempts are all the same; expected k 1 or a temperature"
