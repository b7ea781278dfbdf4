"""Command lines, ports and devices of a fleet."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rl360.errors import ConfigError, InfrastructureError
from rl360.serving.command import (
    KEPT_TOKENS,
    SEED_STEP,
    ServerFlags,
    cuda_runtime,
    launches,
    server_context,
)
from rl360.serving.ports import claim_ports
from tests.serving.replay import RECORDINGS

PORTS = [(30000, 30001), (30002, 30003)]


def value(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 4096}, 2054),
        ({"max_position_embeddings": 2050}, 2050),
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 1024, "rope_scaling": {"factor": 2.0}}, 2048),  # what is scaled is not known here
        ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048),  # SGLang takes the other one
        ({}, 2048),
        (None, 2048),
    ],
)
def test_a_server_has_room_for_what_it_keeps_to_itself(config: dict[str, object], context: int, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert server_context(2048, tmp_path) == context


def test_what_a_recorded_server_keeps_to_itself() -> None:
    rows = json.loads((RECORDINGS / "sglang-0.5.16.json").read_text())
    info = next(row["reply"] for row in rows if row["call"] == "GET /server_info")
    assert info["context_length"] - info["max_req_input_len"] == KEPT_TOKENS


def test_two_servers_of_two_devices() -> None:
    flags = ServerFlags(
        model_path=Path("/m"),
        context_length=4096,
        tensor_parallel_size=2,
        seed=7,
        weight_version=3,
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        mem_fraction_static=0.5,
        cuda_graph_max_bs=256,
        memory_saver=True,
        external_model_package="rl360.models.sglang_external",
        extra_args=("--page-size", "16"),
    )
    first, second = launches(flags, PORTS, ["4", "5", "6", "7"])
    assert first.command[:3] == (sys.executable, "-m", "sglang.launch_server")
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert first.environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "rl360.models.sglang_external"
    assert first.environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    expected = {
        "--model-path": "/m",
        "--tp-size": "2",
        "--dtype": "bfloat16",
        "--context-length": "4096",
        "--weight-version": "3",
        "--attention-backend": "triton",
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--mem-fraction-static": "0.5",
        "--cuda-graph-max-bs-decode": "256",
        "--page-size": "16",
    }
    assert {flag: value(first.command, flag) for flag in expected} == expected
    assert {"--enable-memory-saver", "--disable-prefill-cuda-graph", "--skip-server-warmup"} <= set(first.command)
    assert (value(first.command, "--random-seed"), value(second.command, "--random-seed")) == ("7", str(7 + SEED_STEP))
    ports = [value(one.command, flag) for one in (first, second) for flag in ("--port", "--nccl-port")]
    assert len(set(ports)) == 4
    assert first.url == f"http://127.0.0.1:{ports[0]}"


def test_what_is_not_set_is_left_to_the_server() -> None:
    (one,) = launches(ServerFlags(Path("/m"), 100, command=("serve",)), PORTS[:1], [])
    assert "CUDA_VISIBLE_DEVICES" not in one.environment
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE" not in one.environment
    assert not {"--attention-backend", "--mem-fraction-static", "--cuda-graph-max-bs-decode"} & set(one.command)
    (without,) = launches(ServerFlags(Path("/m"), 100, cuda_graph_max_bs=0, prefill_cuda_graph=True), PORTS[:1], [])
    assert {"--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"} <= set(without.command)


def test_a_server_computes_on_its_own_devices_and_sees_the_trainers() -> None:
    flags = ServerFlags(Path("/m"), 100)
    first, second = launches(flags, PORTS, ["0", "1"], visible=["0", "1", "2"])
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "1,0,2"
    (alone,) = launches(flags, PORTS[:1], [], visible=["0"])
    assert "CUDA_VISIBLE_DEVICES" not in alone.environment


def test_a_server_that_releases_memory_finds_the_cuda_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "cu13" / "lib" / "libcudart.so.13"
    library.parent.mkdir(parents=True)
    assert cuda_runtime([tmp_path]) is None
    library.touch()
    assert cuda_runtime([tmp_path / "nothing", tmp_path]) == library.parent
    monkeypatch.setattr("rl360.serving.command._nvidia_packages", lambda: [tmp_path])
    monkeypatch.setenv("LD_LIBRARY_PATH", "/a:/b")
    (one,) = launches(ServerFlags(Path("/m"), 100, memory_saver=True), PORTS[:1], [])
    assert one.environment["LD_LIBRARY_PATH"] == f"{library.parent}:/a:/b"
    (other,) = launches(ServerFlags(Path("/m"), 100), PORTS[:1], [])
    assert "LD_LIBRARY_PATH" not in other.environment


def test_fp32_logits_are_two_flags_where_the_dtype_is_narrower() -> None:
    flags = {"--enable-fp32-lm-head", "--enable-tf32-matmul"}
    for dtype, fp32_logits, expected in (
        ("bfloat16", True, flags),
        ("float16", True, flags),
        ("auto", True, flags),  # SGLang takes fp16 where a checkpoint is in fp32
        ("bfloat16", False, set()),
        ("float32", True, set()),  # has fp32 logits anyway, and TF32 would round all its products
    ):
        (one,) = launches(ServerFlags(Path("/m"), 100, dtype=dtype, fp32_logits=fp32_logits), PORTS[:1], [])
        assert set(one.command) & flags == expected, (dtype, fp32_logits)


def test_too_few_devices_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"2 servers of tensor_parallel_size 2 need 4 devices, there are 3 \(0, 1, 2\)"
    ):
        launches(ServerFlags(Path("/m"), 100, tensor_parallel_size=2), PORTS, ["0", "1", "2"])


def _free_block(size: int) -> int:
    """The first of neighbouring ports that are free, below those that the kernel gives to anyone's connections."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for base in random.Random(os.getpid()).sample(range(min(10_000, first // 2), first - size), 200):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(base, base + size):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return base
    raise AssertionError(f"no {size} free neighbouring ports below {first}")


def test_ports_from_a_base_are_neighbours_and_a_taken_one_is_named() -> None:
    port = _free_block(7) + 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(InfrastructureError, match=f"port {port} of rollout.sglang.base_port {port - 1}"):
            claim_ports(1, port - 1)
    with contextlib.closing(claim_ports(3, port)) as ports:
        assert ports.pairs == [(port, port + 1), (port + 2, port + 3), (port + 4, port + 5)]
    with contextlib.closing(claim_ports(20, 0)) as ports:
        found = {p for pair in ports.pairs for p in pair}
        assert len(found) == 40
    # A server that is down for a moment must not find its port given to somebody's outgoing connection.
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert high - low > 50_000 or not [port for port in found if low <= port <= high]


def test_ports_on_which_nobody_listens_yet_are_another_runs_until_that_ends() -> None:
    """A server listens minutes after its run has planned its ports."""
    base = _free_block(6)
    hold = "import sys, time; from rl360.serving.ports import claim_ports; kept = claim_ports(2, int(sys.argv[1]))"
    run = subprocess.Popen(
        [sys.executable, "-c", f"{hold}; print(1, flush=True); time.sleep(1000)", str(base)], stdout=subprocess.PIPE
    )
    try:
        assert run.stdout is not None
        assert run.stdout.readline()
        said = rf"port {base + 2} of .*base_port {base + 2} .*: another run has it, process {run.pid}$"
        with pytest.raises(InfrastructureError, match=said):
            claim_ports(1, base + 2)
    finally:
        run.kill()
        run.wait()
    claim_ports(1, base + 2).close()
