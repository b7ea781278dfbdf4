"""Real sandboxes for tests: one cache for the session, and Harbor environments made as a trial makes them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

os.environ.setdefault("HARBOR_TELEMETRY", "0")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

StartSandbox = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="session")
def sandbox_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sandbox-cache")


@pytest_asyncio.fixture
async def start_sandbox(sandbox_cache: Path, tmp_path: Path) -> AsyncIterator[StartSandbox]:
    """`await start_sandbox(dockerfile=..., task={...}, files={...}, **SandboxConfig fields)`; stopped at the end."""
    from harbor.models.task.config import EnvironmentConfig, NetworkPolicy
    from harbor.models.trial.paths import TrialPaths

    from rl360.sandboxes.local import environment, host

    started = []

    async def start(
        dockerfile: str = "FROM x\nWORKDIR /app\n",
        task: dict[str, Any] | None = None,
        files: dict[str, str] | None = None,
        **fields: Any,
    ) -> Any:
        folder = tmp_path / f"environment{len(started)}"
        folder.mkdir()
        for name, text in {"Dockerfile": dockerfile, **(files or {})}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        paths = TrialPaths(tmp_path / f"trial{len(started)}")
        paths.mkdir()
        config = EnvironmentConfig(**(task or {}))
        sandbox = environment.LocalSandbox(
            environment_dir=folder,
            environment_name="test",
            session_id=f"test{len(started)}__env",
            trial_paths=paths,
            task_env_config=config,
            auto_mounts=[
                {"type": "bind", "source": str(paths.trial_dir / name), "target": f"/logs/{name}"}
                for name in ("agent", "verifier", "artifacts")
            ],
            network_policy=NetworkPolicy(network_mode=config.network_mode),
            cache_dir=sandbox_cache,
            run_id="tests",
            **fields,
        )
        started.append(sandbox)
        await sandbox.start(force_build=False)
        return sandbox

    yield start
    for sandbox in started:
        await sandbox.stop(delete=True)
    host.close_hosts()
