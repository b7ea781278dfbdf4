"""Harbor trials of tasks that do not change: what Harbor computes of a task's folder is computed once.

In: a task folder and a trial's config. Out: a Harbor `Trial`. Left to others: running it (trial_worker.py).

`Trial.create` reads, validates and hashes the whole task folder three times over for each trial, about 25 ms of Python
on the event loop. A group runs the same task many times, so `TaskCache` keeps the loaded task with its hashes for as
long as the stamp of the folder (names, sizes, modes, modification times) is the same; a changed task is loaded anew.
Everything else is Harbor's own: the trial class differs in where its lock's hashes come from, and, for environments
that cannot change over to a new sandbox themselves, in what the task says of its verifier (verification.py). Tasks with
several steps go through `Trial.create`.
"""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harbor.models.job.lock import TrialLock, VerifierLock, build_trial_lock
from harbor.models.task.file_filter import TaskFileFilter
from harbor.models.task.task import Task
from harbor.models.trial.config import TrialConfig
from harbor.tasks.client import TaskDownloadResult
from harbor.trial.single_step import SingleStepTrial
from harbor.trial.trial import Trial
from harbor.utils.file_selection import FileSelection

from rl360.rollout import verification

_LOCK_FILE_INDENT = 4  # as Harbor writes it

Stamp = tuple[tuple[str, int, int, int], ...]


def stamp_of(folder: Path) -> Stamp:
    """(path, size, mode, mtime_ns) of every file and folder: what changes when a task is edited."""
    rows = []
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = os.path.join(parent, name)
            info = os.lstat(path)
            rows.append((path, info.st_size, info.st_mode, info.st_mtime_ns))
    return tuple(sorted(rows))


class _Filter(TaskFileFilter):
    """Remembers which files of the task `.harborignore` leaves, which the verifier asks for in each trial."""

    def __init__(self, task_dir: Path):
        super().__init__(task_dir)
        self._excluded: dict[Path, bool] = {}
        self._selected: dict[Path, FileSelection] = {}

    def is_excluded(self, path: Path) -> bool:
        if path not in self._excluded:
            self._excluded[path] = super().is_excluded(path)
        return self._excluded[path]

    def select(self, source_dir: Path) -> FileSelection:
        if source_dir not in self._selected:
            self._selected[source_dir] = super().select(source_dir)
        return self._selected[source_dir]


class _Task(Task):
    """A task whose checksum is computed once."""

    def __init__(self, task_dir: Path):
        super().__init__(task_dir)
        self.file_filter = _Filter(task_dir)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Harbor itself still asks for it in each trial
            self._known_checksum = super().checksum

    @property
    def checksum(self) -> str:
        return self._known_checksum

    def for_one_trial(self) -> _Task:
        """A copy that a trial may change: overrides of resources are written into the environment's config."""
        twin = copy.copy(self)
        environment = self.config.environment.model_copy()
        twin.config = self.config.model_copy(update={"environment": environment})
        return twin


@dataclass
class _Loaded:
    stamp: Stamp
    task: _Task
    download: TaskDownloadResult
    lock: TrialLock | None = None  # of the first trial; later ones differ in their agent's URL only


class _Trial(SingleStepTrial):
    """A single-step trial that takes its lock from the cache."""

    def __init__(self, config: TrialConfig, loaded: _Loaded):
        self._loaded = loaded
        super().__init__(config, _task=loaded.task.for_one_trial(), _task_download_result=loaded.download)

    def _write_trial_lock(self) -> TrialLock:
        first = self._loaded.lock
        if first is None:
            lock = build_trial_lock(trial_config=self.config, task_download_result=self._task_download_result)
            self._loaded.lock = lock
        else:
            config = self.config
            verifier = VerifierLock(**config.verifier.model_dump(), environment_mode=first.verifier.environment_mode)
            lock = first.model_copy(
                update={"agent": config.agent, "environment": config.environment, "verifier": verifier}
            )
        self.paths.lock_path.write_text(lock.model_dump_json(indent=_LOCK_FILE_INDENT, exclude_none=True))
        return lock


class TaskCache:
    """Loaded tasks of one worker, by folder. `swaps`: the environment changes over before verification by itself."""

    def __init__(self, swaps: bool = True) -> None:
        self._swaps = swaps
        self._loaded: dict[Path, _Loaded] = {}

    async def create(self, config: TrialConfig) -> Trial:
        """As `Trial.create`. Raises what Harbor raises for a wrong task or an impossible setting."""
        if not _plain(config):
            return await Trial.create(config)
        path = Path(config.task.path).resolve() if config.task.path else Path()
        stamp = stamp_of(path)
        loaded = self._loaded.get(path)
        if loaded is None or loaded.stamp != stamp:
            if not path.is_dir():
                raise FileNotFoundError(f"task folder {path} does not exist")
            task = _Task(path)
            if not self._swaps:
                task.config = verification.separated(task.config, path)
            loaded = _Loaded(stamp, task, TaskDownloadResult(path=path, download_time_sec=0.0, cached=True))
            self._loaded[path] = loaded
        verification.check(loaded.task.config)
        if loaded.task.has_steps:
            return await Trial.create(config)
        return _Trial(config, loaded)


def _plain(config: TrialConfig) -> bool:
    """Whether the trial uses only what the cached lock covers."""
    unused: tuple[Any, ...] = (
        config.source_trial, config.user_agent, config.agent.skills, config.extra_instruction_paths,
        config.extra_instructions, config.environment.extra_docker_compose, config.install_only,
    )  # fmt: skip
    return config.task.path is not None and config.task.git_url is None and not any(unused)
