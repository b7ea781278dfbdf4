"""The backends of the contract suite: what each one needs to start a sandbox, and where it honestly differs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Backend:
    """One kind of sandbox under test. `fields` are the keywords that every sandbox of it gets."""

    name: str
    make: type
    fields: dict[str, Any] = field(default_factory=dict)
    has_users: bool = True  # commands can run as another user
    limits: frozenset[str] = frozenset()  # memory | pids | disk | lifetime, of those that this machine can hold
    isolates: bool = True  # what runs inside cannot mount or make devices; a service's own affair otherwise
    shares_with_verifier: bool = True  # it can be cleaned for a verifier that runs where the agent did
    has_contexts: bool = True  # COPY works; the stand-in has no object storage for build contexts


def new_sandbox(
    backend: Backend, folder: Path, dockerfile: str, task: dict[str, Any], files: dict[str, str], fields: dict[str, Any]
) -> Any:
    """A Harbor environment, made as a trial makes it. Not started."""
    from harbor.models.task.config import EnvironmentConfig, NetworkPolicy
    from harbor.models.trial.paths import TrialPaths

    environment = folder / "environment"
    environment.mkdir(parents=True)
    for name, text in {"Dockerfile": dockerfile, **files}.items():
        (environment / name).parent.mkdir(parents=True, exist_ok=True)
        (environment / name).write_text(text)
    paths = TrialPaths(folder / "trial")
    paths.mkdir()
    config = EnvironmentConfig(**task)
    return backend.make(
        environment_dir=environment,
        environment_name="contract",
        session_id=f"contract-{folder.parent.name}-{folder.name}__env".lower(),
        trial_paths=paths,
        task_env_config=config,
        auto_mounts=[
            {"type": "bind", "source": str(paths.trial_dir / name), "target": f"/logs/{name}"}
            for name in ("agent", "verifier", "artifacts")
        ],
        network_policy=NetworkPolicy(network_mode=config.network_mode),
        run_id="contract",
        **{**backend.fields, **fields},
    )
