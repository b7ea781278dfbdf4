"""New weights for the embedded engine over HTTP, with SGLang's calls: tensors, a process group, checksums.

In: request bodies of /update_weights_from_tensor, /init_weights_update_group, /update_weights_from_distributed,
/destroy_weights_update_group, /weights_checker. Out: their replies. A bucket is checked against the decoder's names
and shapes before its first value is copied; what a bucket leaves out stays as it was.

Where SGLang takes CUDA IPC handles and NCCL, this takes memory of the sending process and gloo.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl360.gateway.embedded.engine import EmbeddedEngine
from rl360.weight_sync.buckets import TensorMeta, tensor_hash, unflatten
from rl360.weight_sync.groups import join_group, leave_group
from rl360.weight_sync.wire import opened

GROUP_TIMEOUT_S = 60.0  # for the others of a group to come, and for one broadcast
BUCKET_FORMAT = "flattened_bucket"


class WeightReceiver:
    """Calls block; the server runs them on helper threads. Failures are ValueError or CheckpointError."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._groups: dict[str, Any] = {}
        self._lock = threading.Lock()  # one transfer at a time

    def from_tensor(self, body: Mapping[str, Any]) -> str:
        payloads = body.get("serialized_named_tensors")
        if body.get("load_format") != BUCKET_FORMAT or not isinstance(payloads, list) or len(payloads) != 1:
            raise ValueError(f"expected load_format {BUCKET_FORMAT} and one entry of serialized_named_tensors")
        bucket = opened(payloads[0])
        with self._lock:
            self._engine.copy_weights(list(bucket.tensors()))
        return "Success"

    def init_group(self, body: Mapping[str, Any]) -> str:
        name = str(body.get("group_name") or "weight_update_group")
        with self._lock:
            if name in self._groups:
                raise ValueError(f"the group {name} exists")
            backend = "gloo" if self._engine.decoder.device.type == "cpu" else str(body.get("backend", "nccl"))
            self._groups[name] = join_group(
                str(body["master_address"]),
                int(body["master_port"]),
                int(body["rank_offset"]),
                int(body["world_size"]),
                name,
                backend,
                GROUP_TIMEOUT_S,
            )
        return "Succeeded to initialize custom process group."

    def destroy_group(self, body: Mapping[str, Any]) -> str:
        name = str(body.get("group_name") or "weight_update_group")
        with self._lock:
            if name not in self._groups:
                raise ValueError("The group to be destroyed does not exist.")
            leave_group(self._groups.pop(name))
        return "Succeeded to destroy custom process group."

    def from_distributed(self, body: Mapping[str, Any]) -> str:
        """Receive one bucket from rank 0 of the group."""
        import torch.distributed as dist

        name = str(body.get("group_name") or "weight_update_group")
        metas = _layout(body["names"], body["dtypes"], body["shapes"])
        with self._lock:
            if name not in self._groups:
                raise ValueError(f"Group {name} not in {list(self._groups)}. Call init_weights_update_group first.")
            device = self._engine.decoder.device
            if body.get("load_format") == BUCKET_FORMAT:
                flat_B = torch.empty(metas[-1].end_idx, dtype=torch.uint8, device=device)
                dist.broadcast(flat_B, src=0, group=self._groups[name])
                named = list(unflatten(flat_B, metas))
            else:
                named = [(meta.name, torch.empty(meta.shape, dtype=meta.dtype, device=device)) for meta in metas]
                for _, tensor in named:
                    dist.broadcast(tensor, src=0, group=self._groups[name])
            self._engine.copy_weights(named)
        return "Succeeded to update parameter online."

    def checksums(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """SGLang's reply to action `checksum`, with HF names, because nothing is joined here."""
        if body.get("action", "checksum") != "checksum":
            raise ValueError(f"Unsupported action={body['action']!r}")
        with self._engine.still():
            parameters = self._engine.decoder.named_parameters()
            found = {name: tensor_hash(parameter) or "" for name, parameter in parameters}
        whole = hashlib.sha256()
        for name in sorted(found):
            whole.update(name.encode())
            whole.update(found[name].encode())
        one = dict.fromkeys(("tp_size", "dp_size", "pp_size", "size"), 1)
        info = dict.fromkeys(("tp_rank", "dp_rank", "pp_rank", "rank"), 0) | one
        rank = {"checksums": found, "per_gpu_checksum": whole.hexdigest(), "parallelism_info": info}
        return {
            "success": True,
            "message": "Success.",
            "ranks": [rank],
            "per_engine_checksum": hashlib.sha256(whole.hexdigest().encode()).hexdigest(),
        }

    def close(self) -> None:
        with self._lock:
            for group in self._groups.values():
                leave_group(group)
            self._groups.clear()


def _layout(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorMeta]:
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise ValueError("names, dtypes and shapes must be as many as one another, and at least one")
    metas = []
    at = 0
    for name, text, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, text.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name}: dtype {text!r} is none of torch's")
        size = dtype.itemsize * torch.Size(shape).numel()
        metas.append(TensorMeta(name, tuple(shape), dtype, at, at + size))
        at += size
    return metas
