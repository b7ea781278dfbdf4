"""What tensor-parallel ranks hold: against SGLang's own loaders and checker (recorded), and with faults of one rank."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from rl360.errors import EngineError
from rl360.weight_sync.buckets import Expectation, RankHashes, bucketed, tensor_hash
from rl360.weight_sync.engine import WeightEngine
from rl360.weight_sync.shards import held_by, parameter_named, parameter_with
from rl360.weight_sync.sources import TensorSource
from rl360.weight_sync.sync import FixedSet, FleetSync
from rl360.weight_sync.transports import DiskTransport, HandleTransport, Transport
from tests.weight_sync.record_slices import CONFIGS, RECORDING, WAYS, raw_config, weights_of
from tests.weight_sync.sliced_server import Server

Recorded = Mapping[str, Mapping[str, list[dict[str, str]]]]
LAYER = "model.layers.0."


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    found: Recorded = json.loads(RECORDING.read_text())
    return found


def expectation_of(named: Iterable[tuple[str, Tensor]], kv_heads: int | None, *ways: int) -> Expectation:
    expectation = Expectation(ways, kv_heads)
    for bucket in bucketed(named, 2000):
        expectation.add(bucket)
    return expectation


@pytest.mark.parametrize("family", CONFIGS)
def test_slices_are_those_of_sglangs_own_loaders(family: str, recorded: Recorded) -> None:
    weights = weights_of(family)
    kv_heads = CONFIGS[family]["num_key_value_heads"]
    expectation = expectation_of(weights, kv_heads, *WAYS)
    for ways in WAYS[1:]:
        ranks = [RankHashes(hashes, rank, ways) for rank, hashes in enumerate(recorded[family][str(ways)])]
        assert [{name: of[rank] for name, of in expectation.slices[ways].items()} for rank in range(ways)] == [
            dict(of.hashes) for of in ranks
        ]
        assert expectation.problems(ranks) == []
        assert expectation.limit(ranks) is None
    by_name = dict(weights)
    (alone,) = recorded[family]["1"]
    for name, value in alone.items():
        parameter = parameter_named(name)
        assert parameter is not None
        held = held_by(parameter, [by_name[part] for part in parameter.parts], 0, 1, None)
        assert held is not None
        assert tensor_hash(held) == value


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ranks_hold_every_value_once_and_each_key_value_head_equally_often(data: st.DataObject) -> None:
    ways = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    kv_heads = data.draw(st.sampled_from([n for n in range(1, 13) if n % ways == 0 or ways % n == 0]))
    heads = kv_heads * ways * data.draw(st.integers(1, 2))
    head_dim, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    vocabulary = data.draw(st.integers(1, 200))
    ffn = ways * data.draw(st.integers(1, 3))
    shapes = {
        f"{LAYER}self_attn.q_proj.weight": (heads * head_dim, width),
        f"{LAYER}self_attn.k_proj.weight": (kv_heads * head_dim, width),
        f"{LAYER}self_attn.v_proj.weight": (kv_heads * head_dim, width),
        f"{LAYER}self_attn.o_proj.weight": (width, heads * head_dim),
        f"{LAYER}mlp.gate_proj.weight": (ffn, width),
        f"{LAYER}mlp.up_proj.weight": (ffn, width),
        f"{LAYER}mlp.down_proj.weight": (width, ffn),
        "model.embed_tokens.weight": (vocabulary, width),
    }
    ends, tensors = 1, {}
    for name, shape in shapes.items():  # every value of the model is another, and none is 0
        size = shape[0] * shape[1]
        tensors[name] = torch.arange(ends, ends + size).reshape(shape)
        ends += size
    seen: Counter[int] = Counter()
    for parameter in {parameter_with(name) for name in shapes}:
        assert parameter is not None
        parts = [tensors[part] for part in parameter.parts]
        held = [held_by(parameter, parts, rank, ways, kv_heads) for rank in range(ways)]
        if parameter.name == "model.embed_tokens.weight" and 64 * -(-vocabulary // 64) % ways:
            assert held == [None] * ways  # SGLang does not start so
            continue
        for piece in held:
            assert piece is not None
            assert piece.shape == held[0].shape  # type: ignore[union-attr]
            seen.update(piece.flatten().tolist())
        if ways == 1 and parameter.shared != "vocabulary":
            assert held[0] is not None
            assert torch.equal(held[0], torch.cat(parts))  # as SGLang joins them on one rank
    del seen[0]  # rows that no token has
    copies = max(1, ways // kv_heads)
    keys = {v for name in ("k", "v") for v in tensors[f"{LAYER}self_attn.{name}_proj.weight"].flatten().tolist()}
    assert all(count == (copies if value in keys else 1) for value, count in seen.items())
    counted = ends - 1 - (vocabulary * width if 64 * -(-vocabulary // 64) % ways else 0)
    assert len(seen) == counted


def test_what_is_not_understood_is_not_guessed() -> None:
    for name in (
        "model.layers.0.mlp.experts.w13_weight",
        "draft.model.norm.weight",
        "model.layers.0.self_attn.q.weight",
    ):
        assert parameter_with(name) is None
        assert parameter_named(name) is None
    assert parameter_with(f"{LAYER}self_attn.q_proj.bias") is None
    assert parameter_named(f"{LAYER}self_attn.q_proj.weight") is None  # SGLang has none of that name
    qkv = parameter_named(f"{LAYER}self_attn.qkv_proj.weight")
    assert qkv == parameter_with(f"{LAYER}self_attn.k_proj.weight")
    parts = [torch.ones(8, 4), torch.ones(4, 4), torch.ones(4, 4)]
    assert qkv is not None
    assert held_by(qkv, parts, 0, 2, None) is None  # heads are not counted from rows
    assert held_by(qkv, parts, 0, 3, 2) is None
    assert held_by(qkv, parts, 0, 1, None) is not None


class Trainer:
    version = 0

    def __init__(self, family: str, tell_heads: bool = True) -> None:
        self.family, self.weights = family, weights_of(family)
        kv_heads = CONFIGS[family]["num_key_value_heads"] if tell_heads else None
        self.source = TensorSource(lambda: iter(self.weights), kv_heads=kv_heads)

    def weight_sources(self) -> list[TensorSource]:
        return [self.source]

    def publish(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(raw_config(self.family)))
        save_file(dict(self.weights), folder / "model.safetensors")
        return folder


def synchronise(
    servers: list[Server], trainer: Trainer, sync: FleetSync | None = None, transport: Transport | None = None
) -> FleetSync:
    """Send everything to all servers, once; the sync that did it."""
    by_url = {f"http://stand-in-{number}": server for number, server in enumerate(servers)}

    class Client(WeightEngine):
        async def exchange(
            self, method: str, path: str, body: Any, timeout_s: float, headers: Mapping[str, str] | None = None
        ) -> tuple[int, bytes, Mapping[str, str]]:
            await asyncio.sleep(0)
            return 200, json.dumps(by_url[self.url].reply(path, body)).encode(), {}

    sync = sync or FleetSync(FixedSet(tuple(by_url)), transport or HandleTransport(2000, "bfloat16"), Client)
    trainer.version += 1
    sync.sync(trainer, trainer.version)  # type: ignore[arg-type]
    return sync


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("ways", [2, 8])
def test_whole_weights_on_every_rank_pass(
    family: str, ways: int, recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    """And the stand-in holds what SGLang's own models hold."""
    server = Server(ways, CONFIGS[family]["num_key_value_heads"])
    with caplog.at_level(logging.WARNING):
        synchronise([server], Trainer(family))
    held = [{name: tensor_hash(tensor) for name, tensor in rank.held.items()} for rank in server.ranks]
    assert held == recorded[family][str(ways)]
    assert server.version == "1"
    assert caplog.messages == []


def flip(server: Server, rank: int, name: str) -> None:
    server.ranks[rank].held[name].view(torch.uint8)[-1, -1] ^= 1


def swap(server: Server) -> None:
    first, second = server.ranks[:2]
    first.held, second.held = second.held, first.held


QKV = rf"{LAYER}self_attn\.qkv_proj\.weight \(q_proj, k_proj, v_proj\)"


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (
            lambda s: flip(s, 1, f"{LAYER}self_attn.o_proj.weight"),
            r"rank 1 of 2: bucket 4: \S+o_proj\.weight is \w{16}, s",
        ),
        (
            lambda s: flip(s, 0, f"{LAYER}self_attn.qkv_proj.weight"),
            rf"rank 0 of 2: buckets 2, 3: {QKV} is \w{{16}}, s",
        ),
        (lambda s: flip(s, 1, "lm_head.weight"), r"rank 1 of 2: bucket \d+: lm_head\.weight is \w{16}, sent \w{16}"),
        (swap, r"rank 0 of 2: bucket 0: model\.embed_tokens\.weight is \w{16}, which is rank 1's, sent \w{16}"),
        (lambda s: s.answers.remove(1), r"rank 1 of 2 is not among those that answered"),
        (lambda s: s.ranks[1].held.pop("model.norm.weight"), r"rank 1 of 2: bucket \d+: model\.norm\.weight is not in"),
    ],
    ids=["column slice", "joined", "head", "swapped", "silent", "absent"],
)
def test_a_fault_of_one_rank_is_named(fault: Callable[[Server], Any], problem: str, others: int) -> None:
    """Also where no other server could say it."""
    servers = [Server(2, 2) for _ in range(1 + others)]
    servers[0].after_load = lambda: fault(servers[0])
    with pytest.raises(EngineError, match="http://stand-in-0 did not take the new weights") as caught:
        synchronise(servers, Trainer("llama"))
    assert caught.match(problem)


def test_a_rank_that_took_nothing_of_a_sync_is_named() -> None:
    """It serves the weights of before: whole, and wrong."""
    server, trainer = Server(4, 2), Trainer("qwen3")
    sync = synchronise([server], trainer)
    trainer.weights = [(name, tensor + 1) for name, tensor in trainer.weights]
    server.ranks[2].skips = lambda hf_name: True
    with pytest.raises(EngineError, match=r"rank 2 of 4: bucket 0: model\.embed_tokens\.weight is") as caught:
        synchronise([server], trainer, sync)
    assert "rank 1 of" not in str(caught.value)
    assert str(caught.value).endswith("and 5 more")


def test_part_of_a_joined_tensor_that_stayed_as_it_was_is_named() -> None:
    server, trainer = Server(2, 2), Trainer("llama")
    sync = synchronise([server], trainer)
    trainer.weights = [(name, tensor + 1) for name, tensor in trainer.weights]
    server.ranks[1].skips = lambda hf_name: hf_name.endswith("up_proj.weight")
    with pytest.raises(
        EngineError, match=r"rank 1 of 2: buckets? \d(, \d)*: \S+gate_up_proj\.weight \(gate_proj, up_proj\) is"
    ):
        synchronise([server], trainer, sync)


def test_a_tensor_that_no_rank_was_sent_is_named() -> None:
    server, trainer = Server(2, 2), Trainer("llama")
    sync = synchronise([server], trainer)
    trainer.weights = [(n, t) for n, t in trainer.weights if not n.endswith("v_proj.weight")]
    with pytest.raises(
        EngineError, match=rf"rank 0 of 2: buckets? \d(, \d)*: {QKV}: {LAYER}self_attn.v_proj.weight was not"
    ):
        synchronise([server], trainer, sync)


def test_servers_of_unlike_sizes_are_each_compared_with_their_own_slices() -> None:
    servers = [Server(ways, 4) for ways in (1, 2, 4, 2)]
    servers[2].after_load = lambda: flip(servers[2], 3, f"{LAYER}mlp.down_proj.weight")
    with pytest.raises(EngineError, match=r"stand-in-2 did not.*rank 3 of 4: bucket \d+: \S+down_proj\.weight"):
        synchronise(servers, Trainer("k2_horizon"))
    servers[2].after_load = lambda: None
    synchronise(servers, Trainer("k2_horizon"))
    assert {server.version for server in servers} == {"1"}


def test_a_parameter_that_nobody_knows_is_no_alarm_but_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    """Such servers are compared with each other, as long as there are several."""
    servers, trainer = [Server(2, 2) for _ in range(3)], Trainer("llama")
    for server in servers:
        server.more = {"model.layers.0.mlp.experts.w13_weight": "0" * 16}
    sync = synchronise(servers, trainer)
    synchronise(servers, trainer, sync)
    (warning,) = caplog.messages
    assert "how ranks share model.layers.0.mlp.experts.w13_weight is not known here" in warning
    servers[1].after_load = lambda: flip(servers[1], 1, "lm_head.weight")
    with pytest.raises(EngineError, match=r"stand-in-1 did not.*its 2 ranks hold other weights than those of other"):
        synchronise(servers, trainer, sync)


def test_a_folder_that_ranks_load_is_compared_too(tmp_path: Path) -> None:
    servers, trainer = [Server(4, 2)], Trainer("qwen3")
    sync = synchronise(servers, trainer, transport=DiskTransport(tmp_path, "bfloat16"))
    servers[0].after_load = lambda: flip(servers[0], 3, f"{LAYER}self_attn.qkv_proj.weight")
    with pytest.raises(EngineError, match=rf"rank 3 of 4: buckets? \d+(, \d+)*: {QKV} is"):
        synchronise(servers, trainer, sync)


def test_without_the_number_of_heads_everything_but_q_k_v_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    server, trainer = Server(4, 2), Trainer("llama", tell_heads=False)
    sync = synchronise([server], trainer)
    (warning,) = caplog.messages
    assert f"there is no hash of {LAYER}self_attn.qkv_proj.weight" in warning
    server.after_load = lambda: flip(server, 3, f"{LAYER}mlp.gate_up_proj.weight")
    with pytest.raises(EngineError, match=r"rank 3 of 4: buckets? \d+(, \d+)*: \S+gate_up_proj"):
        synchronise([server], trainer, sync)


def test_stages_and_data_parallel_attention_are_not_guessed() -> None:
    expectation = expectation_of(weights_of("llama"), 2, 2)
    ranks = [RankHashes({"model.norm.weight": "0" * 16}, rank, 2, only_tensor_parallel=False) for rank in range(2)]
    assert expectation.problems(ranks) == []
    assert expectation.limit(ranks) == "it has pipeline stages or data-parallel attention"
