"""The part of SGLang's protocol that a weight sync needs, on top of the engine client.

In: buckets as handles or names, versions. Out: nothing, or an `EngineError` naming what the engine did not do. The
order of the calls is rl360.weight_sync.sync's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl360.errors import EngineError
from rl360.gateway.engine_client import FOLDER_FORMAT, HttpEngine
from rl360.weight_sync.buckets import GPU_KERNEL, SHA256, RankHashes
from rl360.weight_sync.sources import BucketSpec

BUCKET_FORMAT = "flattened_bucket"


class WeightEngine(HttpEngine):
    """An engine whose weights change. `transfer_timeout_s` bounds one bucket; `load_timeout_s` a whole folder.

    straggler_s: how much longer than the first engine that answers the same call it may be silent; None: as long as the
        call's own timeout (see rl360.weight_sync.calls).
    """

    def __init__(
        self, url: str, *, transfer_timeout_s: float = 60.0, straggler_s: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(url, **kwargs)
        self._transfer_timeout_s = transfer_timeout_s
        self.straggler_s = straggler_s
        self._end = math.inf

    def end_in(self, seconds: float) -> None:
        """No call of this client lasts longer than until then, whatever its own timeout."""
        self._end = time.monotonic() + seconds

    async def exchange(
        self, method: str, path: str, body: Any, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, Mapping[str, str]]:
        left_s = max(0.0, self._end - time.monotonic())
        return await super().exchange(method, path, body, min(timeout_s, left_s), headers)

    async def tensor_parallel_size(self) -> int:
        return int((await self.info()).get("tp_size") or 1)

    async def hash_kind(self) -> str:
        """How it hashes its tensors: see rl360.weight_sync.buckets.tensor_hash."""
        info = await self.info()
        on_cpu = info.get("engine") == "rl360-embedded" and info.get("device") == "cpu"
        return SHA256 if on_cpu else GPU_KERNEL

    async def load_unnamed(self, path: Path) -> None:
        """Load a folder without saying which version it is: the version is set when it was checked."""
        body = {"model_path": str(path), "load_format": FOLDER_FORMAT, "flush_cache": False}
        await self._succeed("/update_weights_from_disk", body, self._load_timeout_s)

    async def take_handles(self, handles: Sequence[str]) -> None:
        """One bucket, a handle for each of the engine's tensor-parallel ranks."""
        body = {"serialized_named_tensors": list(handles), "load_format": BUCKET_FORMAT, "flush_cache": False}
        await self._succeed("/update_weights_from_tensor", body, self._transfer_timeout_s)

    async def join(self, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str) -> None:
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._succeed("/init_weights_update_group", body, self._transfer_timeout_s)

    async def receive(self, spec: BucketSpec, group_name: str) -> None:
        """Take part in the broadcast of one bucket; returns when it is loaded."""
        body = {
            "names": list(spec.names),
            "dtypes": list(spec.dtypes),
            "shapes": [list(shape) for shape in spec.shapes],
            "group_name": group_name,
            "load_format": BUCKET_FORMAT,
            "flush_cache": False,
        }
        await self._succeed("/update_weights_from_distributed", body, self._transfer_timeout_s)

    async def leave(self, group_name: str) -> None:
        await self._succeed("/destroy_weights_update_group", {"group_name": group_name}, self._control_timeout_s)

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Give memory back. What it held is gone. SGLang's scheduler dies of this call unless it is idle, and a
        request whose answer has come may still be in its last batch: `flush` waits for that."""
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)}, self._transfer_timeout_s)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory again; what is in it comes from elsewhere."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)}, self._transfer_timeout_s)

    async def checksums(self) -> tuple[list[RankHashes], str]:
        """(what each rank holds, one hash of it all)."""
        reply = await self._succeed("/weights_checker", {"action": "checksum"}, self._transfer_timeout_s)
        try:
            ranks = [_rank_hashes(rank, at, len(reply["ranks"])) for at, rank in enumerate(reply["ranks"])]
            return ranks, str(reply["per_engine_checksum"])
        except (KeyError, TypeError):
            raise EngineError("engine_reply", f"{self.url}/weights_checker: no checksums in {sorted(reply)}") from None

    async def set_version(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._succeed("/update_weight_version", body, self._control_timeout_s)
        served = (await self.info())["weight_version"]
        if str(served) != str(version):
            raise EngineError("engine_reply", f"{self.url} says version {served!r} after it was set to {version}")

    async def _succeed(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        reply = await self._json("POST", path, body, timeout_s)
        if reply.get("success") is not True:
            raise EngineError("engine_reply", f"{self.url}{path}: {reply.get('message', reply)}")
        return reply


def _rank_hashes(said: Mapping[str, Any], at: int, count: int) -> RankHashes:
    """One entry of a /weights_checker reply. One that does not say which rank it is counts as the one at its place."""
    place = said.get("parallelism_info") or {"tp_rank": at, "tp_size": count}
    alone = place.get("dp_size", 1) == place.get("pp_size", 1) == 1
    return RankHashes(said["checksums"], int(place["tp_rank"]), int(place["tp_size"]), alone)
