"""Buckets, their hashes, and handles of them."""

from __future__ import annotations

import base64
import hashlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.weight_sync.buckets import (
    HASH_KERNEL,
    Expectation,
    RankHashes,
    _hash_kernel,
    bucketed,
    flatten,
    tensor_hash,
)
from rl360.weight_sync.wire import exported, opened


def named(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"t{i}", torch.randn(shape, generator=generator).to(dtype)) for i, shape in enumerate(shapes)]


def test_a_bucket_is_the_tensors_one_after_the_other() -> None:
    bucket = flatten([("a", torch.tensor([1.0, 2.0])), ("b", torch.tensor([[3.0], [4.0]]))])
    assert bucket.flat_B.view(torch.float32).tolist() == [1, 2, 3, 4]
    assert [(m.name, m.shape, m.start_idx, m.end_idx, m.numel) for m in bucket.metas] == [
        ("a", (2,), 0, 8, 8),
        ("b", (2, 1), 8, 16, 8),
    ]
    assert dict(bucket.tensors())["b"].tolist() == [[3], [4]]


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), max_size=12), max_bytes=st.integers(1, 120))
def test_buckets_hold_every_tensor_once_in_order_within_their_size(sizes: list[int], max_bytes: int) -> None:
    tensors = named(*((size,) for size in sizes))
    groups = list(bucketed(iter(tensors), max_bytes))
    assert [name for group in groups for name, _ in group] == [name for name, _ in tensors]
    assert all(len(group) == 1 or sum(2 * t.numel() for _, t in group) <= max_bytes for group in groups)
    for group in groups:
        assert all(
            torch.equal(back, sent) for (_, back), (_, sent) in zip(flatten(group).tensors(), group, strict=True)
        )


def test_a_bucket_has_one_dtype() -> None:
    mixed = [*named((3,), (5,)), *named((2,), dtype=torch.float32)]
    assert [[name for name, _ in group] for group in bucketed(iter(mixed), 1000)] == [["t0", "t1"], ["t0"]]


def test_the_hash_is_the_beginning_of_sha256_of_the_memory() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
    assert tensor_hash(tensor) == expected
    assert tensor_hash(tensor.T) != expected  # as it lies when contiguous


def test_the_hash_kernel_is_read_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`import sglang` patches transformers: a trainer must not do that to itself."""
    file = tmp_path / "sglang" / HASH_KERNEL
    file.parent.mkdir(parents=True)
    (tmp_path / "sglang/__init__.py").write_text("raise AssertionError('imported')")
    file.write_text("def gpu_tensor_hash(tensor):\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    _hash_kernel.cache_clear()
    try:
        kernel = _hash_kernel()
        assert kernel is not None
        assert kernel(torch.zeros(1)) == 42
        assert "sglang" not in sys.modules
        file.write_text("import a_module_that_nobody_has\n")
        _hash_kernel.cache_clear()
        assert _hash_kernel() is None  # engines are then compared with one another only
    finally:
        _hash_kernel.cache_clear()


def test_an_expectation_names_what_is_wrong() -> None:
    sent = named((4,), (2, 3))
    expectation = Expectation()
    expectation.add(sent[:1])
    expectation.add(sent[1:])
    right = {name: tensor_hash(tensor) or "" for name, tensor in sent}

    def problems(reported: dict[str, str]) -> list[str]:
        return expectation.problems([RankHashes(reported)])

    assert problems(right) == []
    assert problems({**right, "rotary.cos_sin_cache": "1", "lm_head.weight": "2"}) == []
    assert problems({**right, "t1": "0" * 16}) == [f"bucket 1: t1 is {'0' * 16}, sent {right['t1']}"]
    assert problems({"t0": right["t0"]}) == ["bucket 1: t1 is not in the engine"]
    assert problems({**right, "t2": "x"}) == ["t2 was not sent"]
    assert expectation.limit([RankHashes({**right, "t2": "x"})]) is None


def test_names_that_an_engine_joins_are_not_missed() -> None:
    """Hashes of joined tensors of one rank are not computed on a CPU, where only engines with HF's own names are."""
    parts = [(f"model.layers.0.self_attn.{p}_proj.weight", torch.ones(2, 2)) for p in "qkv"]
    joined = [RankHashes({"model.layers.0.self_attn.qkv_proj.weight": "whatever"})]
    expectation = Expectation()
    expectation.add(parts)
    assert expectation.problems(joined) == []
    assert expectation.limit(joined) == "there is no hash of model.layers.0.self_attn.qkv_proj.weight"
    assert len(expectation.problems([RankHashes({})])) == 3
    expectation = Expectation()
    expectation.add(parts[:2])
    (problem,) = expectation.problems(joined)
    assert problem.endswith("(q_proj, k_proj, v_proj): model.layers.0.self_attn.v_proj.weight was not sent")


def test_a_handle_opens_in_another_process_and_is_gone_afterwards() -> None:
    bucket = flatten(named((7, 3), (1000,)))
    with exported(bucket) as text:
        assert len(text) < 4000  # a handle, not the data
        back = opened(text)
        assert [m.name for m in back.metas] == ["t0", "t1"]
        for (_, got), (_, sent) in zip(back.tensors(), bucket.tensors(), strict=True):
            assert torch.equal(got, sent)
        back.flat_B.zero_()  # the reader's own copy
        assert not torch.equal(bucket.flat_B, back.flat_B)
        with exported(bucket) as other:
            assert other != text
    with pytest.raises(ValueError, match="not a flattened bucket"):
        opened(text)
    with exported(flatten(named((8,)))), pytest.raises(ValueError, match="any more"):
        opened(text)  # of the same number, perhaps, and never of the bucket that has it now


def test_nothing_is_left_of_a_sender_that_is_killed() -> None:
    """A file of a bucket's size in /dev/shm, which nobody removes."""
    code = (
        "import sys, torch\n"
        "from rl360.weight_sync.buckets import flatten\n"
        "from rl360.weight_sync.wire import exported\n"
        "with exported(flatten([('a', torch.arange(1000.0))])) as text:\n"
        "    print(text, flush=True); sys.stdin.read()\n"
    )
    before = set(Path("/dev/shm").iterdir())
    root, pipe = Path(__file__).parents[2], subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, cwd=root) as sender:
        assert sender.stdout is not None
        text = sender.stdout.readline()
        ((name, tensor),) = opened(text.strip()).tensors()
        sender.kill()
    assert name == "a"
    assert torch.equal(tensor, torch.arange(1000.0))  # what a reader has opened stays
    assert {path for path in set(Path("/dev/shm").iterdir()) - before if "rl360" in path.name} == set()
    with pytest.raises(ValueError, match="not a flattened bucket"):
        opened(text.strip())


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.unlink, (Path("/tmp/precious"),)


def test_nothing_but_a_bucket_is_unpickled() -> None:
    for bad in (Evil(), {"flattened_tensor": Evil()}, {"metadata": []}):
        with pytest.raises(ValueError, match="not a flattened bucket"):
            opened(base64.b64encode(pickle.dumps(bad)).decode())
    with pytest.raises(ValueError):
        opened("no base64")


def test_metadata_is_what_sglang_reads() -> None:
    """SGLang takes these six fields off each entry, and unpickles only names of modules that it knows."""
    bucket = flatten(named((2, 2)))
    with exported(bucket) as text:
        raw = base64.b64decode(text)
        loaded = pickle.loads(raw)
    (meta,) = loaded["metadata"]
    assert (meta.name, meta.shape, meta.dtype) == ("t0", torch.Size([2, 2]), torch.bfloat16)
    assert (meta.start_idx, meta.end_idx, meta.numel) == (0, 8, 8)
    import pickletools

    modules = {arg.split()[0] for op, arg, _ in pickletools.genops(raw) if op.name == "GLOBAL" and arg}
    strings = [arg for op, arg, _ in pickletools.genops(raw) if op.name == "SHORT_BINUNICODE"]
    assert "types" in strings
    assert not modules & {"builtins", "os"}
