"""From a checked config to components: the only place that imports a `_target_` and calls it.

In: a `RootConfig` that rl360.config.check has passed, and the run folder. Out: `Components`, started, closed in reverse
order by the context manager. What each component does is its own; what the run does with them is the loop's.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl360.config.schemas import RootConfig
from rl360.config.workers import num_trial_workers
from rl360.engine.gateway_counts import GatewayCounts
from rl360.engine.workers import LocalWorkerGroup
from rl360.errors import ConfigError
from rl360.gateway.generation import LONGEST_BY_EXPRESSION
from rl360.protocols import Algorithm, Gateway, Logger, Reward, Rollout, Trainer, WeightSync
from rl360.rollout.failures import agent_timer_s
from rl360.rollout.queue import RolloutEvents
from rl360.types import Sampling, Task

if TYPE_CHECKING:
    from rl360.serving.fleet import Fleet

log = logging.getLogger(__name__)

REWARD_SCOPES = ("attempt", "group")
OWN_PREFIXES = ("rl360.", "launchers.")
TRIAL_WORKER = "rl360.rollout.trial_worker:TrialWorker"
# Harbor's imports otherwise ask the internet for prices and post telemetry: seconds lost offline, and not ours to send.
TRIAL_ENVIRONMENT = {"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
# Trial workers and the proxy do no maths; their libraries must not spin up threads that take the trainer's cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def asked_directly(host: str) -> dict[str, str]:
    """Of trial workers: agents' model clients (LiteLLM) heed http_proxy, and would ask it for the session proxy."""
    said = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    hosts = [*said.split(","), host, "127.0.0.1", "localhost"]
    alone = "*" if "*" in hosts else ",".join(dict.fromkeys(filter(None, hosts)))  # as one of several * means no host
    return dict.fromkeys(("no_proxy", "NO_PROXY"), alone)


@dataclass(frozen=True, slots=True)
class Components:
    trainer: Trainer
    algorithm: Algorithm
    rollout: Rollout
    sync: WeightSync
    loggers: Mapping[str, Logger]
    gateway_counts: GatewayCounts
    engine_urls: tuple[str, ...]


@contextmanager
def build(
    config: RootConfig, run_dir: Path, run_id: str, events: RolloutEvents, restore_from: Path | None = None
) -> Iterator[Components]:
    """Build and start every component; close them all on the way out, also when a later one fails to start.

    `restore_from` is the trainer's folder of a checkpoint: its weights are in place before any engine reads them.
    """
    with ExitStack() as stack:
        from rl360.engine.engines import own_gpus, require_methods, server_ports

        ports = server_ports(config, stack)  # before anything starts: another run may have them
        algorithm = _make(config, config.algorithm)
        trainer = _make(
            config,
            config.trainer,
            algorithm=algorithm,
            seed=config.seed,
            model_dir=model_dir(config),
            random_init_seed=config.seed if config.model.random_init else None,
            fp32_logits=config.model.fp32_logits,
            log_dir=run_dir / "logs",
        )
        require_methods(config, trainer)
        stack.callback(trainer.close)
        fleet = make_fleet(config, run_dir, stack, ports)
        if fleet is not None and own_gpus(config):
            log.info("servers start while the trainer does: their GPUs are their own")
            fleet.begin()
        trainer.start()
        if restore_from is not None:
            trainer.restore(restore_from)
        engine_urls, sync = make_engines(config, run_dir, trainer, stack, fleet)
        # Servers that run already may hold other weights than a resumed trainer.
        first = sync.sync(trainer, trainer.version)
        serving = tuple(url for url in engine_urls if url not in first.dropped)
        gateway = make_gateway(config, run_dir, serving)
        sync.on_change(lambda urls: _in_a_loop_of_its_own(gateway.set_engines(urls)))
        sync.hold_requests_at(gateway)
        rollout = make_rollout(config, run_dir, run_id, gateway, events)
        stack.callback(rollout.close)
        rollout.start()
        loggers = {name: _make(config, entry, **entry.kwargs) for name, entry in config.logger.items()}
        counts = GatewayCounts(lambda: asyncio.run(gateway.counts()))
        yield Components(trainer, algorithm, rollout, sync, loggers, counts, engine_urls)


def _in_a_loop_of_its_own(call: Coroutine[Any, Any, None]) -> None:
    """Run to its end, wherever this is called from: a server's thread, or a sync's event loop that drops an engine."""
    thread = threading.Thread(target=asyncio.run, args=(call,), name="serving-set")
    thread.start()
    thread.join()


def model_dir(config: RootConfig) -> Path:
    return Path(config.model.path or Path(config.paths.models) / config.model.name)


def training_sampling(config: RootConfig) -> Sampling:
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        max_context_tokens=rollout.max_context_tokens,
        max_turns=config.agent.max_turns,
        stop=tuple(rollout.stop),
        stop_at_code_block=rollout.stop_at_code_block,
    )


def load_class(target: str, allow: Sequence[str] = ()) -> Any:
    """Import `package.module.Class`. Raises `ConfigError` for a target that is not allowed or not there."""
    prefixes = (*OWN_PREFIXES, *(f"{name.rstrip('.')}." for name in allow))
    if not target.startswith(prefixes):
        raise ConfigError(f"_target_ {target}: not allowed; expected one of {', '.join(prefixes)} (see allow_targets)")
    module_name, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"_target_ {target}: {error}") from error


def _make(config: RootConfig, entry: Any, **collaborators: Any) -> Any:
    """Call an entry's target with its own fields, and with those collaborators that its signature names."""
    fields = {k: v for k, v in asdict(entry).items() if k not in ("_target_", "kwargs")}
    cls = load_class(entry._target_, config.allow_targets)
    accepted = inspect.signature(cls).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    return cls(**fields, **{k: v for k, v in collaborators.items() if takes_all or k in accepted})


def make_fleet(
    config: RootConfig, run_dir: Path, stack: ExitStack, ports: Sequence[tuple[int, int]] = ()
) -> Fleet | None:
    """The run's own servers, not started; None where it starts none. `ports`: none, they are claimed here."""
    if config.rollout.engine != "sglang":
        return None
    from rl360.engine.engines import server_ports, sglang_fleet

    return sglang_fleet(
        config, model_dir(config), run_dir, _api_key(config), stack, ports or server_ports(config, stack)
    )


def make_engines(
    config: RootConfig, run_dir: Path, trainer: Any, stack: ExitStack, fleet: Fleet | None = None
) -> tuple[tuple[str, ...], WeightSync]:
    """The engines' URLs and how weights reach them: the embedded engine, servers of the run, or of somebody else.

    fleet: servers of the run, from `make_fleet`; None: made here.
    """
    rollout = config.rollout
    if rollout.engine == "embedded":
        from rl360.gateway.embedded.engine import EmbeddedEngine
        from rl360.gateway.embedded.server import EngineServer
        from rl360.weight_sync.shared import SharedSync

        engine = EmbeddedEngine(
            trainer.decoder,
            model_dir(config),
            max_running_requests=rollout.max_running_requests,
            kv_cache_gib=rollout.kv_cache_gib,
            fp32_logits=config.model.fp32_logits,
            deterministic=rollout.deterministic,
            version=trainer.version,
        )
        server = EngineServer(engine, config.gateway.host)
        stack.callback(server.close)
        return (server.start(),), SharedSync(engine)

    from rl360.engine.engines import external_engines, sglang_engines

    key, fleet = _api_key(config), fleet or make_fleet(config, run_dir, stack)
    if fleet is not None:
        return sglang_engines(config, model_dir(config), run_dir, key, stack, trainer, fleet)
    return external_engines(config, model_dir(config), run_dir, key)


def _api_key(config: RootConfig) -> str | None:
    return os.environ.get(config.gateway.api_key_env) if config.gateway.api_key_env else None


def make_gateway(config: RootConfig, run_dir: Path, engine_urls: Sequence[str]) -> Gateway:
    def make_workers(target: str, size: int, kwargs: Mapping[str, Any], name: str) -> LocalWorkerGroup:
        return LocalWorkerGroup(target, size, kwargs, name=name, log_dir=run_dir / "logs", env=ONE_THREAD)

    return _make(
        config,
        config.gateway,
        engine_urls=list(engine_urls),
        tokenizer_dir=model_dir(config),
        tool_parser=config.model.tool_parser,
        reasoning_parser=config.model.reasoning_parser,
        request_timeout_s=config.rollout.request_timeout_s,
        split_above=_split_above(config),
        log_dir=run_dir / "logs",
        worker_group_factory=make_workers,
    )


def _split_above(config: RootConfig) -> int | None:
    """From how many tokens on a turn may be several requests: never where it must be of one version, and to no purpose
    where the engine's own look at every token is cheap."""
    whole = config.rollout.sync_mode == "drain" or config.rollout.engine == "embedded"
    return None if whole else LONGEST_BY_EXPRESSION


def make_rollout(config: RootConfig, run_dir: Path, run_id: str, gateway: Gateway, events: RolloutEvents) -> Rollout:
    rollout = config.rollout
    num_workers = num_trial_workers(rollout)
    workers = LocalWorkerGroup(
        TRIAL_WORKER,
        num_workers,
        {
            "agent": {**asdict(config.agent), "timeout_s": agent_timer_s(*agent_deadlines(config))},
            "sandbox": asdict(config.sandbox),
            "cache_dir": Path(config.paths.cache),
            "trials_dir": run_dir / "trials",
            "trial_timeout_s": config.cluster.trial_timeout_s,
            "model_name": config.model.name,
            "max_concurrent": -(-rollout.concurrency // num_workers),
            "start_interval_s": rollout.start_interval_s,
            "run_id": run_id,
            "keep_trial_dirs": rollout.keep_trial_dirs,
        },
        name="trial",
        log_dir=run_dir / "logs",
        env={**TRIAL_ENVIRONMENT, **ONE_THREAD, **asked_directly(config.gateway.host)},
    )
    rewards: dict[str, Reward] = {
        name: _make(config, entry, name=name, **entry.kwargs) for name, entry in config.reward.items()
    }
    for name, reward in rewards.items():
        if getattr(reward, "scope", None) not in REWARD_SCOPES:
            raise ConfigError(
                f"reward.{name}: scope {getattr(reward, 'scope', None)!r} of {type(reward).__name__}; expected one of "
                f"{', '.join(REWARD_SCOPES)}"
            )
        if not inspect.iscoroutinefunction(getattr(reward, "score", None)):
            raise ConfigError(
                f"reward.{name}: {type(reward).__name__} has no `async def score`; see docs/guide/rewards.md"
            )
    cls = load_class(rollout._target_, config.allow_targets)
    return cls(
        gateway=gateway,
        workers=workers,
        rewards=rewards,
        events=events,
        concurrency=rollout.concurrency,
        max_tries=rollout.max_tries,
        agent_timeout_s=config.agent.timeout_s,
        client_timeout_s=config.cluster.client_timeout_s,
        deterministic=rollout.deterministic,
    )


def agent_deadlines(config: RootConfig) -> tuple[float, float, float, float]:
    """The agent's budget, the trial's deadline, and the sandbox's start and verifier within it: seconds."""
    sandbox = config.sandbox
    return config.agent.timeout_s, config.cluster.trial_timeout_s, sandbox.start_timeout_s, sandbox.verifier_timeout_s


def build_tasks(config: RootConfig) -> tuple[list[Task], list[Task]]:
    """Training and evaluation tasks. Raises `TaskError` with every problem of both."""
    from rl360.tasks.manifest import load_tasks

    training = load_tasks(Path(config.tasks.path), config.tasks.include, config.tasks.exclude)
    chosen = config.evaluation.tasks
    if config.evaluation.every == 0 or chosen is None:
        return training, []
    return training, load_tasks(Path(chosen.path), chosen.include, chosen.exclude)
