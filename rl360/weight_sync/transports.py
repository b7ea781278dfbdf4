"""How tensors get from a trainer into paused engines: a folder, handles to its memory, or a broadcast.

In: the trainer, the engines. Out: which engines failed, and why; an `Expectation` of what the others hold now. All
engines are paused when `send` is called; checking, flushing and versions are the caller's.

An engine that fails is left behind, not waited for. In a broadcast it takes its group with it: the others of that group
are then sent everything again, each in a group of its own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rl360.errors import EngineError
from rl360.weight_sync.buckets import Expectation
from rl360.weight_sync.calls import Failures, each
from rl360.weight_sync.engine import WeightEngine
from rl360.weight_sync.folder import folder_expectation
from rl360.weight_sync.sources import BucketSpec, WeightSource, sources_of
from rl360.weight_sync.threads import in_thread

log = logging.getLogger(__name__)

WAYS = (1, 2, 4, 8)  # tensor-parallel sizes that a first folder is hashed for: no engine has said its own yet
CONNECTING_S = 60.0  # of a first bucket; no clock, since a call's own timeout is not longer
LEAVE_TIMEOUT_S = 5.0  # for an engine to leave a group that is given up
SOURCE_LEAVE_TIMEOUT_S = 30.0  # for the trainer's rank, which may stand still: the end of a run waits for this


class Transport(Protocol):
    """`prepare` is what can happen before the engines are paused, `send` the transfer to those that are."""

    # of all tensors that would be sent, before there are engines; the trainer has its memory
    async def names(self, trainer: Any, version: int) -> frozenset[str]: ...
    async def prepare(self, trainer: Any, version: int, engines: Sequence[WeightEngine]) -> None: ...
    async def send(self, engines: Sequence[WeightEngine]) -> Failures: ...
    def expectation(self, kind: str) -> Expectation | None: ...  # of what was sent; None: no hashes of that kind
    async def close(self) -> None: ...


async def tensor_parallel_sizes(engines: Sequence[WeightEngine]) -> tuple[dict[str, int], Failures]:
    """Ranks of each engine that says it, by URL, and who does not."""
    sizes: dict[str, int] = {}

    async def ask(engine: WeightEngine) -> None:
        sizes[engine.url] = await engine.tensor_parallel_size()

    return sizes, await each(engines, ask)


class DiskTransport:
    """The trainer writes an HF folder, and every engine loads it. Both sides must see `folder`.

    The trainer hashes its tensors as it writes them (`publish_hashed`): a folder that holds something else is noticed.
    `dtype` is what the engines hold; None: as the folder says.
    """

    def __init__(self, folder: Path, dtype: str | None = None) -> None:
        self._folder = folder
        self._dtype = dtype
        self._path: Path | None = None
        self._version: int | None = None
        self._sizes: set[int] = set()  # tensor-parallel sizes that engines have said
        self._written: Expectation | None = None  # of the trainer's tensors; None: it did not hash them
        self._told = False  # that nothing but the folder can be compared with

    async def names(self, trainer: Any, version: int) -> frozenset[str]:
        """Of the folder as it is written; the first transfer takes the same one."""
        from rl360.models.weight_files import tensor_shapes, weight_files

        await self.prepare(trainer, version, ())
        assert self._path is not None
        return frozenset(name for file in weight_files(self._path) for name, _ in tensor_shapes(file))

    async def prepare(self, trainer: Any, version: int, engines: Sequence[WeightEngine]) -> None:
        if self._version != version:
            self._path, self._written = await in_thread(self._publish, trainer, self._folder / f"version-{version}")
            self._version = version
            for old in self._folder.glob("version-*"):
                if old != self._path:
                    await in_thread(_remove_tree, old)

    async def send(self, engines: Sequence[WeightEngine]) -> Failures:
        path = self._path
        assert path is not None
        sizes, failures = await tensor_parallel_sizes(engines)
        self._sizes |= set(sizes.values())
        there = [engine for engine in engines if engine.url not in failures]
        return failures | await each(there, lambda engine: engine.load_unnamed(path), slow=True)

    def expectation(self, kind: str) -> Expectation | None:
        assert self._path is not None
        written = self._written
        if written is not None and written.kind == kind and self._sizes <= set(written.ways):
            return written
        if written is None and not self._told:
            self._told = True
            log.warning("the trainer does not hash what it writes: engines are compared with the folder alone")
        return folder_expectation(self._path, kind, self._dtype, tuple(sorted({1, *self._sizes})), written)

    def _publish(self, trainer: Any, folder: Path) -> tuple[Path, Expectation | None]:
        if not hasattr(trainer, "publish_hashed"):
            return trainer.publish(folder), None
        written: Expectation = trainer.publish_hashed(folder, self._dtype, tuple(sorted({1, *(self._sizes or WAYS)})))
        return folder, None if None in written.hashes.values() else written

    async def close(self) -> None: ...


class _Streamed:
    """What handles and broadcasts share: a pass over the sources, the next bucket gathered while one is on its way."""

    def __init__(self, bucket_bytes: int, dtype: str | None = None) -> None:
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._sources: Sequence[WeightSource] = ()
        self._ways: set[int] = set()  # tensor-parallel sizes of those that are sent to
        self._expectation: Expectation | None = None

    async def names(self, trainer: Any, version: int) -> frozenset[str]:
        found: set[str] = set()
        for source in sources_of(trainer):
            found.update(await in_thread(source.names))
        return frozenset(found)

    async def _pass(self, deliver: Callable[[WeightSource, BucketSpec], Awaitable[bool]]) -> None:
        """`deliver` sends one bucket and says whether anyone is left to send to."""
        self._expectation = None
        ways = tuple(sorted(self._ways))
        expectation = Expectation(ways)
        for source in self._sources:
            await in_thread(source.begin, self._bucket_bytes, self._dtype, ways)
            spec = await in_thread(source.prepare)
            while spec is not None:
                following = asyncio.create_task(in_thread(source.prepare))
                try:
                    wanted = await deliver(source, spec)
                finally:
                    upcoming = await following
                await in_thread(source.release, spec.index)
                if not wanted:
                    if upcoming is not None:
                        await in_thread(source.release, upcoming.index)
                    return
                spec = upcoming
            expectation.merge(await in_thread(source.expectation))
        self._expectation = expectation

    def expectation(self, kind: str) -> Expectation | None:
        known = self._expectation is not None and self._expectation.kind == kind
        return self._expectation if known else None


class HandleTransport(_Streamed):
    """`ipc`: engines on this machine open the trainer's memory themselves (CUDA IPC; shared memory on a CPU)."""

    async def prepare(self, trainer: Any, version: int, engines: Sequence[WeightEngine]) -> None:
        self._sources = sources_of(trainer)

    async def send(self, engines: Sequence[WeightEngine]) -> Failures:
        ranks, failures = await tensor_parallel_sizes(engines)
        self._ways = set(ranks.values())

        async def deliver(source: WeightSource, spec: BucketSpec) -> bool:
            async def give(engine: WeightEngine) -> None:
                handles = await in_thread(source.export, spec.index, ranks[engine.url])
                await engine.take_handles(handles)

            failures.update(await each([e for e in engines if e.url not in failures], give, slow=True))
            return len(failures) < len(engines)

        await self._pass(deliver)
        return failures

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    source: WeightSource
    engines: tuple[WeightEngine, ...]


class BroadcastTransport(_Streamed):
    """`nccl`: each bucket is broadcast from the source to the ranks of the engines (gloo on a CPU).

    Groups are made anew in each sync: their set changes when an engine is replaced, and making one takes less than the
    pause does. `engines_per_group` 0: all in one, the fewest bytes sent; 1: the failure of one never touches another.
    """

    def __init__(
        self,
        bucket_bytes: int,
        dtype: str | None = None,
        backend: str = "nccl",
        engines_per_group: int = 0,
    ) -> None:
        super().__init__(bucket_bytes, dtype)
        self._backend = backend
        self._engines_per_group = engines_per_group
        self._groups: list[_Group] = []
        self._failures: Failures = {}
        self._longest_s: float | None = None  # that one bucket has taken, of all transfers

    async def prepare(self, trainer: Any, version: int, engines: Sequence[WeightEngine]) -> None:
        """Make the groups while the engines still generate."""
        self._sources = sources_of(trainer)
        self._ways = set()
        size = self._engines_per_group or len(engines)
        self._failures = await self._form([engines[at : at + size] for at in range(0, len(engines), size)])

    async def send(self, engines: Sequence[WeightEngine]) -> Failures:
        said = self._failures
        said |= await self._round(engines)
        alone = [engine for engine in engines if engine.url in said and not _is_gone(said[engine.url])]
        failures = {engine.url: said[engine.url] for engine in engines if engine.url in said and engine not in alone}
        if alone:
            failed_again = await self._form([[engine] for engine in alone])
            failures |= failed_again | await self._round([e for e in alone if e.url not in failed_again])
        return failures

    async def _round(self, engines: Sequence[WeightEngine]) -> Failures:
        """Send everything to the groups there are, and end them; what the engines in broken ones said, by URL.

        An engine is reached when none of its groups broke; one that is not among `engines` breaks its group.
        """
        wanted = {engine.url for engine in engines}
        whole = [group for group in self._groups if all(engine.url in wanted for engine in group.engines)]
        broken = await self._broadcast(whole)
        failures: Failures = {}
        for group in self._groups:
            if group not in whole:
                broken.setdefault(group.name, {})
            for engine in group.engines if group.name in broken else ():
                failures[engine.url] = broken[group.name].get(engine.url, "another engine of its group failed")
        reached = {engine.url for group in whole for engine in group.engines}
        failures.update({url: "it was in no group" for url in wanted - reached if url not in failures})
        await self._disband(broken, {url for url, problem in failures.items() if _is_gone(problem)})
        return failures

    async def _form(self, parts: Sequence[Sequence[WeightEngine]]) -> Failures:
        """A group of every source with each part. An engine that does not come spoils its part's group."""
        failures: Failures = {}
        for source in self._sources:
            for part in parts:
                failures.update(await self._meet(source, [e for e in part if e.url not in failures]))
        return failures

    async def _meet(self, source: WeightSource, engines: Sequence[WeightEngine]) -> Failures:
        if not engines:
            return {}
        known, failures = await tensor_parallel_sizes(engines)
        self._ways |= set(known.values())
        engines = [engine for engine in engines if engine.url not in failures]
        sizes = [known[engine.url] for engine in engines]
        world_size = 1 + sum(sizes)
        name, port = f"rl360-{secrets.token_hex(6)}", free_port(source.address)
        offsets = {engine.url: 1 + sum(sizes[:at]) for at, engine in enumerate(engines)}
        came = asyncio.create_task(
            each(engines, lambda e: e.join(source.address, port, offsets[e.url], world_size, name, self._backend))
        )
        problem = await _outcome(in_thread(source.join, name, port, world_size, self._backend))
        missing = await came
        if problem is None and not missing:
            self._groups.append(_Group(name, source, tuple(engines)))
        else:
            for engine in engines:
                failures[engine.url] = missing.get(engine.url) or f"its group did not form: {problem or missing}"
        return failures

    async def _broadcast(self, groups: Sequence[_Group]) -> dict[str, Failures]:
        """Send everything to these groups; the broken ones by name, with what each engine in them said.

        One that hangs holds up its whole group, so nobody in it may be done: what buckets have taken before says how
        long to wait. Before the first one only the call's own timeout does, because ranks connect in it.
        """
        broken: dict[str, Failures] = {}

        async def give_up(group: _Group, said: Failures) -> None:
            """Nobody may wait for a rank that is gone: neither the source nor the engines beside it."""
            first = group.name not in broken
            broken.setdefault(group.name, {}).update(said)
            if first:
                await in_thread(group.source.leave, group.name, True)

        async def broadcast(group: _Group, spec: BucketSpec) -> None:
            problem = await _outcome(in_thread(group.source.broadcast, spec.index, group.name))
            if problem is not None:
                await give_up(group, {})

        async def receive(going: Sequence[_Group], spec: BucketSpec) -> None:
            of = {engine.url: group for group in going for engine in group.engines}

            async def one(engine: WeightEngine) -> None:
                try:
                    await engine.receive(spec, of[engine.url].name)
                except EngineError as error:
                    await give_up(of[engine.url], {engine.url: str(error)})
                    raise

            everyone = [engine for group in going for engine in group.engines]
            usual_s = CONNECTING_S if self._longest_s is None else self._longest_s
            for url, problem in (await each(everyone, one, slow=True, usual_s=usual_s)).items():
                await give_up(of[url], {url: problem})

        async def deliver(source: WeightSource, spec: BucketSpec) -> bool:
            going = [group for group in groups if group.source is source and group.name not in broken]
            began = time.monotonic()
            await asyncio.gather(receive(going, spec), *(broadcast(group, spec) for group in going))
            if not any(group.name in broken for group in going):
                self._longest_s = max(time.monotonic() - began, self._longest_s or 0.0)
            return any(group.name not in broken for group in groups)

        if groups:
            await self._pass(deliver)
        return broken

    async def _disband(self, broken: Collection[str] = (), gone: Collection[str] = ()) -> None:
        """End all groups. gone: engines that need not be asked to leave."""

        async def leave(group: _Group) -> None:
            async def ask(engine: WeightEngine) -> None:
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await engine.leave(group.name)

            asked = asyncio.gather(
                *(ask(engine) for engine in group.engines if engine.url not in gone), return_exceptions=True
            )
            leaving = in_thread(group.source.leave, group.name, group.name in broken)
            await _outcome(asyncio.wait_for(leaving, SOURCE_LEAVE_TIMEOUT_S))
            await asked

        groups, self._groups = self._groups, []
        await asyncio.gather(*(leave(group) for group in groups))

    async def close(self) -> None:
        await self._disband()


async def _outcome(waited: Awaitable[None]) -> str | None:
    """None, or what it raised: torch's errors of a group are RuntimeErrors and others."""
    try:
        await waited
    except Exception as error:
        return repr(error)
    return None


def _is_gone(text: str) -> bool:
    """Whether an engine's failure says that nobody answers there any more."""
    return text.startswith(("engine_refused", "engine_timeout"))


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _remove_tree(path: Path) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
