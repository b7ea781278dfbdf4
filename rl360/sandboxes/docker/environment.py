"""The Harbor environment: one container per trial, more for a task with a Compose file.

In: Harbor's constructor arguments and the fields of `SandboxConfig` as keywords. Out: Harbor's environment interface.
Left to others: the docker command (client.py), what a container is made of (recipe.py, image.py), archives
(archives.py), and what killed runs left (leftovers.py).

Where this differs from Harbor's own Docker environment: nothing is pulled to forbid the network, which is there only if
the task asks for it in words and `sandbox.network` allows it; images can be built on a base that is here already; a
time-out ends the command inside the container and not only its client; files go through the daemon and never through a
program of the container; the container has limits, fewer capabilities and a lifetime, and ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.definition import should_use_prebuilt_docker_image
from harbor.environments.docker.docker import DockerEnvironment, _sanitize_docker_compose_project_name
from harbor.trial.errors import EnvironmentStartTimeoutError

from rl360.sandboxes.artifact_paths import Artifact
from rl360.sandboxes.docker import abilities, host, image, leftovers
from rl360.sandboxes.docker.afresh import Refusals, collect, removal, restore
from rl360.sandboxes.docker.client import CALL_TIMEOUT_S, DaemonError, DockerError, Done, TooLarge, checked, docker
from rl360.sandboxes.docker.container import Container, State
from rl360.sandboxes.docker.recipe import ENDED_INSIDE, Limits, Recipe, on_base
from rl360.sandboxes.shared import (
    ARTIFACT_LOGS,
    DEFAULT_ARTIFACTS_MIB,
    DEFAULT_WORKDIR,
    VERIFIER_LOGS,
    MemoryLimitExceededError,
    check_artifacts,
    only_root_writes,
    smaller,
    wants_network,
)

ANSWER_S = 10.0  # from a restart until a command runs; a tenth of a second where it was seen


class RuntimeRequestError(RuntimeError):
    """The docker daemon did not answer. The name is one of Harbor's error table: no doing of what runs inside."""


class DockerSandbox(DockerEnvironment):
    """Keywords beyond Harbor's are the fields of `SandboxConfig` and `run_id`, `build_timeout_s`, `artifacts_mib`
    (0: as much as the disk limit) and `runtime` (of the daemon, such as runsc; null: its default).

    base: auto (what FROM names, pulled when it is not here) or an image that is here, which then stands in for every
    image that the Dockerfile takes from a registry. The smaller of a task's own limit and the configured one holds;
    0 means no limit.
    """

    def __init__(
        self,
        *args: Any,
        run_id: str = "run",
        network: bool = False,
        memory_mib: int = 1024,
        cpus: float = 1.0,
        pids: int = 256,
        disk_mib: int = 512,
        lifetime_s: float = 900.0,
        start_timeout_s: float = 60.0,
        build_timeout_s: float = 600.0,
        base: str = "auto",
        runtime: str | None = None,
        artifacts_mib: int = 0,
        **kwargs: Any,
    ):
        self._run_id = run_id
        self._network_allowed = network
        self._memory_mib, self._cpus, self._pids, self._disk_mib = memory_mib, cpus, pids, disk_mib
        self._lifetime_s = lifetime_s
        self._start_timeout_s, self._build_timeout_s = start_timeout_s, build_timeout_s
        self._base = "" if base == "auto" else base
        self._runtime = runtime
        self._artifacts_mib = artifacts_mib
        self._overlay: Path | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._container: Container | None = None
        self._image_user = ""
        self._image_workdir = "/"
        self._tests_in_image = False
        self.carried: Refusals | None = None  # what did not come along into the verifier's container
        # After stop too: memory | lifetime | artifacts: a limit that it ran into; sandbox: something inside ended it.
        self.exhausted = ""
        self.interrupted = ""  # what ended it before we did, and no limit of its own: no verdict counts
        super().__init__(*args, **kwargs)
        self._project = _sanitize_docker_compose_project_name(self.session_id)
        self._has_services = self._environment_docker_compose_path.exists() or bool(self.extra_docker_compose_paths)

    @classmethod
    def _egress_control_kernel_support(cls) -> bool:
        """Harbor would pull an image to find out. The network is either there or not; see `recipe`."""
        return False

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, docker_compose=True, gpus=True)

    @classmethod
    def preflight(cls) -> None:
        if missing := abilities.problems(abilities.probe()):
            raise SystemExit("\n".join(missing))

    @property
    def _docker_compose_paths(self) -> list[Path]:
        paths = super()._docker_compose_paths
        return [*paths, self._overlay] if self._overlay is not None else paths

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Raises SandboxBuildFailedError or EnvironmentStartTimeoutError."""
        network = wants_network(
            self.environment_name, self.task_env_config, self._network_policy.network_mode, self._network_allowed
        )
        try:
            await host.daemon().ask(self.logger)
            await self._prepare(network, force_build)
            async with asyncio.timeout(self._start_timeout_s):
                await self._up()
        except TimeoutError as error:
            raise EnvironmentStartTimeoutError(f"container did not start in {self._start_timeout_s} s") from error
        except (DockerError, OSError) as error:
            raise SandboxBuildFailedError(f"container did not start: {error}") from error
        await self._upload_environment_dir_after_start()

    async def _prepare(self, network: bool, force_build: bool) -> None:
        """The image, and every file that Compose reads."""
        self._scratch = tempfile.TemporaryDirectory(prefix="rl360-docker-")
        scratch = Path(self._scratch.name)
        self._use_prebuilt = should_use_prebuilt_docker_image(
            self.environment_dir, docker_image=self.task_env_config.docker_image, force_build=force_build
        )
        dockerfile = None
        tag = None
        if not self._use_prebuilt:
            base_id = await image.base_id(self._base)
            named = f"{self.environment_id} {base_id} {self._network_allowed}"
            tag = f"rl360-task:{hashlib.sha256(named.encode()).hexdigest()[:24]}"
            if self._base:
                dockerfile = scratch / "Dockerfile"
                dockerfile.write_text(on_base(self._dockerfile_path.read_text(), self._base))
        recipe = Recipe(
            limits=Limits(
                memory_mib=smaller(self._memory_mib, self._effective_memory_mb),
                cpus=smaller(self._cpus, self._effective_cpus),
                pids=self._pids,
                disk_mib=smaller(self._disk_mib, self._effective_storage_mb),
                disk_quota=host.daemon().disk_quota,
            ),
            labels={leftovers.OWNER: leftovers.owner(), leftovers.RUN: self._run_id},
            lifetime_s=self._lifetime_s,
            network=network,
            services=self._has_services,
            image=tag,
            dockerfile=str(dockerfile) if dockerfile else None,
            build_network=self._network_allowed,
            ready_image=self._base or None if self._use_prebuilt else None,
            runtime=self._runtime,
        )
        self._overlay = scratch / "rl360.json"
        self._overlay.write_text(json.dumps(recipe.compose()))
        self._mounts_compose_path = self._write_mounts_compose_file()
        self._env_compose_path = self._write_env_compose_file()
        if network and not self._has_services:
            await host.make_shared_network()
        if tag is not None:
            compose = partial(self._compose, timeout_s=self._build_timeout_s)
            await image.ensure(tag, compose, self._build_timeout_s, force=force_build, has_base=bool(self._base))

    async def _up(self) -> None:
        wait = ("--wait",) if self._has_services else ()
        done = await self._compose("up", "--detach", "--no-build", *wait, timeout_s=self._start_timeout_s)
        if done.return_code != 0:
            raise DockerError(f"docker compose up: {done.message}")
        await self._find_container()
        await self._make_folders()

    async def _find_container(self) -> None:
        assert self._scratch is not None
        self._container = await Container.of_project(self._project, Path(self._scratch.name))
        self._image_user, self._image_workdir = await self._container.image_user_and_workdir()

    async def _make_folders(self) -> None:
        """Harbor's log folders, and the working directory. Raises DockerError: the image needs bash."""
        logs = [shlex.quote(folder) for folder in self._mount_targets(writable_only=True)]
        await self._running().as_root(f"mkdir -p {shlex.quote(self._workdir)} {' '.join(logs)}")
        if logs:
            await self._running().as_root(f"chmod 777 {' '.join(logs)}")
        tests = await self._running().run("test -e /tests", user="root", timeout_s=CALL_TIMEOUT_S)
        self._tests_in_image = tests.return_code == 0

    @property
    def _workdir(self) -> str:
        return self.task_env_config.workdir or self._image_workdir

    async def stop(self, delete: bool) -> None:
        """End the sandbox at once. Nothing of it is kept, whatever `delete` says; images stay for the next trial."""
        try:
            if self._container is not None:
                await self._note_end(self._container)
            if self._scratch is not None:  # it got as far as having something
                await leftovers.remove_project(self._project, services=self._has_services)
        except (DockerError, TimeoutError) as error:
            self.logger.warning("removing containers of %s: %s", self._project, error)
        finally:
            self._container = None
            self._overlay = None
            self._cleanup_mounts_compose_file()
            self._cleanup_env_compose_file()
            if self._scratch is not None:
                self._scratch.cleanup()
                self._scratch = None

    # -- before the verifier ------------------------------------------------------------------------------------

    async def start_afresh(self, declared: Sequence[Artifact], verifier_user: str | int | None) -> None:
        """Before verification: end the agent's container and go on in a new one, with the artifacts only.

        The artifacts are the working directory, /logs/artifacts and what the task declares. Services of a task's
        Compose file go on as they are. Raises RuntimeError when they are larger than the limit (then `exhausted` says
        so), or what a start raises.
        """
        old, artifacts = self._running().id, self._artifacts(declared)
        assert self._scratch is not None
        try:
            await checked("kill", old, timeout_s=CALL_TIMEOUT_S)
            self._container = None  # ended by us
            carried = await collect(old, artifacts, Path(self._scratch.name), self._most_artifact_bytes())
            await checked("rm", "--force", "--volumes", old, timeout_s=CALL_TIMEOUT_S)
            await self._up()
            await self._upload_environment_dir_after_start()
            await self.run_healthcheck()
            await self._running().as_root(removal(carried))
            await restore(self._running().id, carried)
            await self._make_reward_folder(verifier_user)
        except TooLarge as error:
            self.exhausted = "artifacts"
            raise RuntimeError(str(error)) from error
        except TimeoutError as error:
            raise RuntimeRequestError("the docker daemon did not answer in time") from error
        except DaemonError as error:
            raise RuntimeRequestError(str(error)) from error
        self.carried = Refusals.of(carried)
        if self.carried.num_refused:
            self.logger.warning("%d artifacts refused: %s", self.carried.num_refused, "; ".join(self.carried.refused))

    def _artifacts(self, declared: Sequence[Artifact]) -> list[Artifact]:
        """Raises SandboxBuildFailedError for paths that cannot be carried."""
        workdir = DEFAULT_WORKDIR if self._workdir == "/" else self._workdir
        artifacts = [Artifact(workdir, required=True), Artifact(ARTIFACT_LOGS, required=True)]
        artifacts += [replace(a, path=self._absolute(a.path)) for a in declared]
        check_artifacts(self.environment_name, artifacts)
        return artifacts

    def _most_artifact_bytes(self) -> int:
        disk_mib = smaller(self._disk_mib, self._effective_storage_mb)
        return (self._artifacts_mib or disk_mib or DEFAULT_ARTIFACTS_MIB) * 2**20

    async def settle_for_verifier(self, verifier_user: str | int | None) -> None:
        """For tasks that ask for the shared state: no process of the agent is left, the verifier's folders are new.

        `/tests` goes unless the image brought it, so that planted hooks go with it. Altered programs stay.
        """
        # Not `restart`: a container with a busy process came back in a state that no command could enter (20.10).
        await checked("kill", self._running().id, timeout_s=CALL_TIMEOUT_S)
        await checked("wait", self._running().id, timeout_s=CALL_TIMEOUT_S)
        await checked("start", self._running().id, timeout_s=CALL_TIMEOUT_S)
        await self._until_it_answers()
        await self._running().as_root(f"rm -rf /logs/verifier {'' if self._tests_in_image else '/tests'}")
        await self._make_reward_folder(verifier_user)

    async def _until_it_answers(self) -> None:
        """A daemon calls a container started a moment before its root file system is in place. Raises DockerError."""
        until = time.monotonic() + ANSWER_S
        while True:
            try:
                return await self._running().as_root("true")
            except DockerError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.05)

    async def _make_reward_folder(self, verifier_user: str | int | None) -> None:
        """Writable for the verifier's user only: a test that runs the answer as another user is not graded by it."""
        mode = "755" if only_root_writes(verifier_user, self._image_user) else "777"
        await self._running().as_root(f"mkdir -p {VERIFIER_LOGS} && chmod {mode} {VERIFIER_LOGS}")

    # -- commands -----------------------------------------------------------------------------------------------

    def _running(self) -> Container:
        if self._container is None:
            raise RuntimeError("the sandbox is not running")
        return self._container

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Raises RuntimeError on a time-out, an unknown user or a dead container; MemoryLimitExceededError."""
        who, container = self._resolve_user(user), self._running()
        where = cwd or self.task_env_config.workdir
        try:
            done = await container.run(command, cwd=where, env=self._merge_env(env), user=who, timeout_s=timeout_sec)
        except TimeoutError:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None
        if done.return_code != 0:
            await self._explain(done, who)
        callback = self._output_callback()
        if callback is not None:
            if done.stdout:
                await callback(done.stdout, "stdout")
            if done.stderr:
                await callback(done.stderr, "stderr")
        return ExecResult(stdout=done.stdout or None, stderr=done.stderr or None, return_code=done.return_code)

    async def _explain(self, done: Done, user: str | int | None) -> None:
        """Raise when a command failed because its container is gone, or its user does not exist."""
        if "unable to find user" in done.stderr:
            raise RuntimeError(f"user {user!r} is not in the sandbox's /etc/passwd")
        of_docker = done.stderr.startswith("Error") or "docker daemon" in done.stderr
        if done.return_code != 137 and not of_docker:
            return
        if not await self._has_ended() and not (done.return_code == 137 and await self._is_ending()):
            return
        if self.exhausted == "memory":
            raise MemoryLimitExceededError(f"sandbox ended (memory limit {self._memory_mib} MiB)")
        raise RuntimeError(f"sandbox ended{f' ({self.exhausted} limit)' if self.exhausted else ''}")

    async def _has_ended(self) -> bool:
        """Whether the container is gone; then the rest goes too, and `exhausted` says what it ran into."""
        if self._container is None:
            return False
        try:
            state = await self._container.state()
        except TimeoutError:
            raise RuntimeRequestError("the docker daemon does not answer") from None
        if state.running:
            return False
        self._note(state)
        await self.stop(delete=True)
        return True

    async def _is_ending(self) -> bool:
        """A command dies with its container a moment before the daemon knows of that; then no other can begin."""
        until = time.monotonic() + ANSWER_S
        while time.monotonic() < until:
            try:
                done = await self._running().run("true", cwd="/", user="root", timeout_s=ANSWER_S)
            except TimeoutError:  # one began; it is the agent's doing where its bash does not end, or has no turn
                return await self._has_ended()
            if done.return_code == 0:
                return False
            if await self._has_ended():
                return True
            await asyncio.sleep(0.05)
        return False

    async def _note_end(self, container: Container) -> None:
        """How it is before we end it: files of a dead one can still be read, so its verdict was too."""
        try:
            self._note(await container.state())
        except TimeoutError:
            self.interrupted = self.interrupted or "the docker daemon does not say whether it had ended"
            raise

    def _note(self, state: State) -> None:
        if state.running or self.exhausted:
            return
        ends = {0: "lifetime", ENDED_INSIDE: "" if self._has_services else "sandbox"}  # of our own first process
        self.exhausted = "memory" if state.out_of_memory else ends.get(state.exit_code, "")
        if not self.exhausted:
            self.interrupted = self.interrupted or f"the container had ended with {state.exit_code}"

    # -- files --------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _transfer(self) -> AsyncIterator[Container]:
        try:
            yield self._running()
        except (DockerError, TooLarge, OSError) as error:
            if await self._has_ended():
                raise RuntimeError(f"sandbox ended during a file transfer: {error}") from error
            if isinstance(error, DaemonError):
                raise RuntimeRequestError(f"file transfer failed: {error}") from error
            raise RuntimeError(f"file transfer failed: {error}") from error

    def _absolute(self, path: str | Path) -> str:
        return str(PurePosixPath(self._workdir, str(path)))

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source = Path(source_path)
        target = self._absolute(target_path)
        if str(target_path).endswith("/") or await self.is_dir(target, user="root"):
            target = f"{target}/{source.name}"
        async with self._transfer() as container:
            await container.put(source, target)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        source = Path(source_dir)
        if not source.is_dir():
            raise RuntimeError(f"file transfer failed: {source} is no folder")
        target = self._absolute(target_dir)
        async with self._transfer() as container:
            await container.as_root(f"mkdir -p {shlex.quote(target)}")
            await container.put(source, target)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        async with self._transfer() as container:
            await container.get_file(self._absolute(source_path), Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        async with self._transfer() as container:
            skipped = await container.get_folder(self._absolute(source_dir), Path(target_dir))
        if skipped:
            self.logger.warning("download of %s left out %d entries, e.g. %s", source_dir, len(skipped), skipped[0])

    # -- Compose ------------------------------------------------------------------------------------------------

    async def _compose(self, *arguments: str, timeout_s: float) -> Done:
        """Compose with Harbor's files and variables, and our override after them. Raises TimeoutError."""
        folder = str(self.environment_dir.resolve())
        files = [part for path in self._docker_compose_paths for part in ("--file", str(path.resolve()))]
        where = ("--project-name", self._project, "--project-directory", folder)
        env = self._compose_env_vars(include_os_env=True)
        return await docker("compose", *where, *files, *arguments, timeout_s=timeout_s, env=env)
