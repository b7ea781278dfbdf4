"""A tensor-parallel SGLang server that needs no GPU and no SGLang, for tests: every rank's weights, and what it says.

In: the calls of a weight sync, by path. Out: their replies, /weights_checker's with one entry for each rank. The ranks
fill their parameters slice by slice, as SGLang's weight loaders do; hashes are the CPU's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rl360.weight_sync.buckets import tensor_hash
from rl360.weight_sync.wire import opened


class Rank:
    """One rank's parameters."""

    def __init__(self, rank: int, ways: int, kv_heads: int) -> None:
        self.rank, self.ways, self.kv_heads = rank, ways, kv_heads
        self.held: dict[str, Tensor] = {}
        self.parts: dict[str, dict[str, Tensor]] = {}  # of joined parameters
        self.skips: Callable[[str], bool] = lambda hf_name: False

    def load(self, hf_name: str, loaded: Tensor) -> None:
        if self.skips(hf_name):
            return
        base = hf_name.removesuffix(".weight")
        if base.endswith(("o_proj", "down_proj")):
            size = loaded.shape[1] // self.ways
            self.held[hf_name] = loaded.narrow(1, self.rank * size, size).clone()
        elif base.endswith(("embed_tokens", "lm_head")):
            padded = (loaded.shape[0] + 63) // 64 * 64 // self.ways
            mine = loaded[self.rank * padded : (self.rank + 1) * padded]
            self.held[hf_name] = loaded.new_zeros(padded, loaded.shape[1])
            self.held[hf_name][: mine.shape[0]] = mine
        elif base.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            part = base.rpartition(".")[2].removesuffix("_proj")
            replicas = max(1, self.ways // self.kv_heads) if part in "kv" else 1
            size = loaded.shape[0] * replicas // self.ways
            mine = loaded.narrow(0, self.rank // replicas * size, size)
            order = ("q", "k", "v") if part in "qkv" else ("gate", "up")
            name = base.removesuffix(f"{part}_proj") + ("qkv_proj.weight" if part in "qkv" else "gate_up_proj.weight")
            self.parts.setdefault(name, {})[part] = mine.clone()
            if set(self.parts[name]) == set(order):
                self.held[name] = torch.cat([self.parts[name][one] for one in order])
        else:
            self.held[hf_name] = loaded.clone()


class Server:
    """A tensor-parallel server: what its ranks hold, and which of them answer."""

    def __init__(self, ways: int, kv_heads: int) -> None:
        self.ranks = [Rank(rank, ways, kv_heads) for rank in range(ways)]
        self.version = "none"
        self.answers = list(range(ways))
        self.more: dict[str, str] = {}
        self.after_load: Callable[[], None] = lambda: None

    def reply(self, path: str, body: Any) -> dict[str, Any]:
        done = {"success": True, "message": "Success."}
        match path.partition("?")[0]:
            case "/update_weights_from_tensor":
                handles = body["serialized_named_tensors"]
                assert len(handles) == len(self.ranks)
                for rank, handle in zip(self.ranks, handles, strict=True):
                    for name, tensor in opened(handle).tensors():
                        rank.load(name, tensor)
            case "/update_weights_from_disk":
                for name, tensor in load_file(Path(body["model_path"]) / "model.safetensors").items():
                    for rank in self.ranks:
                        rank.load(name, tensor)
            case "/weights_checker":
                self.after_load()
                size = len(self.ranks)
                ranks = [
                    {
                        "checksums": {n: tensor_hash(t) for n, t in self.ranks[at].held.items()} | self.more,
                        "per_gpu_checksum": "",
                        "parallelism_info": {"tp_rank": at, "tp_size": size, "dp_size": 1, "pp_size": 1},
                    }
                    for at in self.answers
                ]
                return {**done, "ranks": ranks, "per_engine_checksum": tensor_hash_of(ranks)}
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/model_info" | "/server_info":
                here = {"engine": "rl360-embedded", "device": "cpu"}  # hashes are the CPU's
                return {"weight_version": self.version, "tp_size": len(self.ranks), **here}
        return done


def tensor_hash_of(ranks: list[dict[str, Any]]) -> str:
    text = json.dumps([rank["checksums"] for rank in ranks], sort_keys=True)
    return tensor_hash(torch.tensor(list(text.encode()), dtype=torch.uint8)) or ""
