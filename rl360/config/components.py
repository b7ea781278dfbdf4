"""What each group's class must be: how it is named, which keywords it is given, which methods the run will call.

In: a typed config. Out: problems as `key: what; expected; try`, read from source text, so that nothing is imported and
no GPU waits for a class that cannot be used. Left to others: reading the source (targets), what values mean
(combinations, arguments).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rl360.config.schemas import MegatronTrainerConfig, RootConfig
from rl360.config.targets import (
    OWN_PREFIXES,
    Constructor,
    TargetError,
    allowed,
    argument_problems,
    constructor,
    methods,
)

# Keywords that the run passes besides the config's own keys (rl360.engine.build). A class is given those that it takes.
PROVIDED: dict[str, tuple[str, ...]] = {
    "reward": ("name",),
    "logger": (),
    "algorithm": (),
    "trainer": ("algorithm", "seed", "model_dir", "random_init_seed", "fp32_logits", "log_dir"),
    "gateway": (
        "engine_urls",
        "tokenizer_dir",
        "tool_parser",
        "reasoning_parser",
        "request_timeout_s",
        "split_above",
        "log_dir",
        "worker_group_factory",
    ),
    "cluster": (),
}
# A rollout is given these and nothing of its section.
ROLLOUT_KEYWORDS = (
    "gateway",
    "workers",
    "rewards",
    "events",
    "concurrency",
    "max_tries",
    "agent_timeout_s",
    "client_timeout_s",
    "deterministic",
)
# Of agents and sandboxes what Harbor and the trial worker pass: a second one is an error, or wins without a word.
HARBORS_OWN: dict[str, tuple[str, ...]] = {
    "agent": ("logs_dir", "model_name", "base_url", "logger", "skip_model_parsing", "environment_logs_dir"),
    "sandbox": (
        "environment_dir",
        "environment_name",
        "session_id",
        "trial_paths",
        "task_env_config",
        "logger",
        "network_policy",
        "phase_network_policies",
    ),
}
# Of our own sandboxes (rl360.rollout.trial_worker); a class of somebody else's gets its kwargs and nothing besides.
OUR_SANDBOXES, LOCAL_SANDBOX = "rl360.sandboxes.", "rl360.sandboxes.local:"
FOR_OUR_SANDBOXES = ("cache_dir", "run_id")
# Keys of the group itself, which would stand twice.
OF_THE_GROUP = {
    "sandbox": ("network", "memory_mib", "cpus", "pids", "disk_mib", "lifetime_s", "start_timeout_s", "unprivileged"),
}

# What the run calls: of rl360.protocols, of launchers.local.LocalLauncher and of Harbor's base classes.
METHODS: dict[str, tuple[str, ...]] = {
    "reward": ("score",),
    "logger": ("start", "log", "log_text", "finish"),
    "algorithm": ("keep", "prepare", "loss"),
    "trainer": ("start", "step", "publish", "save", "restore", "close"),
    "rollout": ("start", "submit", "next", "drain", "state", "restore", "waiting_for", "close"),
    "gateway": (
        *("start", "verify", "open", "set_engines", "hold", "idle", "release", "close_session", "discard", "counts"),
        *("health", "close"),
    ),
    "cluster": ("plan", "submit"),
    "agent": ("setup", "run"),
    "sandbox": ("start", "stop", "exec", "upload_file", "download_file"),
}
AWAITED = {
    "reward": METHODS["reward"],
    "gateway": METHODS["gateway"],
    "agent": METHODS["agent"],
    "sandbox": METHODS["sandbox"],
}


def entry_problems(group: str, name: str, entry: Any, prefixes: list[str]) -> Iterator[str]:
    """Of one reward or logger."""
    path = f"{group}.{name}"
    if not isinstance(entry, Mapping):
        yield f"{path}: {entry!r}; expected a section with _target_ and its arguments"
        return
    target = entry.get("_target_")
    if not isinstance(target, str) or target == "???":
        yield f"{path}._target_: needs a value; expected the class, such as rl360.rewards.verifier.VerifierReward"
        return
    found = yield from _checked_target(group, f"{path}._target_", target, prefixes)
    if found is not None:
        arguments = {key: value for key, value in entry.items() if key != "_target_"}
        yield from (f"{path}.{p}" for p in argument_problems(found, arguments, PROVIDED[group]))


def target_problems(config: RootConfig) -> Iterator[str]:
    """Of every other class that the config names."""
    prefixes = list(config.allow_targets)
    for group in ("algorithm", "trainer", "rollout", "gateway", "cluster"):
        section = getattr(config, group)
        found: Constructor | None = yield from _checked_target(group, f"{group}._target_", section._target_, prefixes)
        if found is None:
            continue
        given = {key: value for key, value in vars(section).items() if key != "_target_"}
        if group == "algorithm":
            yield from (f"{group}.{p}" for p in argument_problems(found, given, PROVIDED[group]))
        elif group == "rollout":
            yield from _takes(group, found, ROLLOUT_KEYWORDS, ())
        else:
            yield from _takes(group, found, tuple(given), PROVIDED[group])
    if isinstance(config.trainer, MegatronTrainerConfig):
        yield from _checked_target("rank", "trainer.rank_target", config.trainer.rank_target, prefixes)
    for group in ("agent", "sandbox"):
        yield from _harbors_class(group, getattr(config, group), prefixes)


def _harbors_class(group: str, section: Any, prefixes: list[str]) -> Iterator[str]:
    own = section.import_path.startswith(OWN_PREFIXES)
    ours = section.import_path.startswith(OUR_SANDBOXES)
    twice = OF_THE_GROUP["sandbox"] if ours else ()
    by_the_run = (*HARBORS_OWN[group], *(FOR_OUR_SANDBOXES if ours else ()))
    if section.import_path.startswith(LOCAL_SANDBOX):
        twice = (*twice, "base")  # of other sandboxes it is one of their own, with other values
    for key in section.kwargs:
        if key in twice:
            yield f"{group}.kwargs.{key}: would stand beside {group}.{key} and win over it; expected {group}.{key}"
        elif key in by_the_run:
            yield f"{group}.kwargs.{key}: is given by the run; expected none"
    found = yield from _checked_target(group, f"{group}.import_path", section.import_path, prefixes)
    if found is None:
        return
    # Harbor passes its own arguments besides; only names that nothing takes are wrong. Its classes take any name and
    # drop it: of ours whose bases could all be read, a name that none of them has is a slip.
    if own and found.all_named:
        found = replace(found, accepts_any=False)
    provided = (*found.required, *by_the_run, *twice)
    yield from (f"{group}.kwargs.{p}" for p in argument_problems(found, section.kwargs, provided))


def _checked_target(group: str, path: str, target: str, prefixes: list[str]) -> Any:
    """A generator of problems that returns the `Constructor`, or None."""
    if not allowed(target, prefixes):
        yield f"{path}: {target} is not allowed; expected rl360. or launchers., or add its module to allow_targets"
        return None
    harbors = not path.endswith("_target_") or group == "rank"
    if (":" in target) != harbors:
        module, _, name = target.replace(":", ".").rpartition(".")
        yield f"{path}: {target}; expected {module}{':' if harbors else '.'}{name}"
        return None
    try:
        found = constructor(target)
        yield from (f"{path}: {problem}" for problem in _method_problems(group, found.name, target))
    except TargetError as error:
        yield f"{path}: {error}"
    except (OSError, SyntaxError) as error:
        yield f"{path}: {target} cannot be read ({error})"
    else:
        return found
    return None


def _method_problems(group: str, name: str, target: str) -> Iterator[str]:
    has = methods(target)
    missing = [method for method in METHODS.get(group, ()) if method not in has.kinds]
    if missing and has.all_read:
        words = "one that the run can use" if group in ("agent", "sandbox") else f"a class for {group}"
        yield f"{name} has no {', '.join(missing)}; expected {words}, with {', '.join(METHODS[group])}"
    # Of rewards the run wants `async def` itself (rl360.engine.build); elsewhere one that is passed on will do.
    refused = ("plain", "passed_on") if group == "reward" else ("plain",)
    not_awaited = [method for method in AWAITED.get(group, ()) if has.kinds.get(method) in refused]
    if not_awaited:
        yield f"{name}.{', '.join(not_awaited)}: no `async def`; expected one, because the run awaits it"


def _takes(group: str, found: Constructor, given: tuple[str, ...], offered: tuple[str, ...]) -> Iterator[str]:
    """Whether the constructor can be called. given: what it always gets; offered: what it gets where it takes it."""
    if not found.accepts_any and (refused := [key for key in given if key not in found.annotations]):
        yield (
            f"{group}._target_: {found.name} takes no {', '.join(refused)}, which every {group} of this kind is given; "
            "expected keywords of these names, or **others"
        )
    if needed := [key for key in found.required if key not in (*given, *offered)]:
        yield f"{group}._target_: {found.name} needs {', '.join(needed)}, which nothing gives; expected a default"
