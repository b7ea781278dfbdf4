"""A tiny K2 Horizon served by a real SGLang through rl360.models.sglang_external, against transformers on the same GPU.

In: a folder to work in and a port. Out: on standard output, one JSON document; exit 1 when something is further away
than it should be. Compared: the norm's Triton kernel with the reference in bfloat16; logprobs of prompts and of what
the server samples, greedy and at temperature 1, with a float32 reference, from a checkpoint and again after
`update_weights_from_disk` with other weights. How far bfloat16 alone is from float32, transformers says on the same
tokens. As a control, a reference whose norms have one group instead of four must be far away.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch

from rl360.models.sglang_external import server_environment, server_flags
from rl360.models.tiny import write_tiny

READY_TIMEOUT_S = 400.0
REQUEST_TIMEOUT_S = 120.0
# Head width 64 and groups of 128 are what the kernels of a real model see; everything else is small.
SHAPE: dict[str, Any] = {
    "hidden": 512,
    "layers": 4,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 1024,
    "max_positions": 4096,
}
PROMPT_LENGTHS = (1, 7, 64, 257, 1000)
NEW_TOKENS = 48
# The server rounds to bfloat16 as often as transformers does, in other places: as far from float32, not twice as far.
NOISE_FACTOR = 2.0
CONTROL_FACTOR = 3.0  # on a CPU the control is 6.7 times as far as bfloat16


def main() -> int:
    work, port = Path(sys.argv[1]), int(sys.argv[2])
    first, second = (write_tiny(work / f"k2-{seed}", "k2_horizon", seed=seed, **SHAPE) for seed in (0, 1))
    import sglang

    found: dict[str, Any] = {"sglang": sglang.__version__, "torch": torch.__version__, "shape": SHAPE}
    found["kernel"] = kernel_differences()
    url = f"http://127.0.0.1:{port}"
    server = start(first, port, sglang.__version__, work / "server.log")
    try:
        wait_until_ready(url, server)
        found["first"] = differences(url, first)
        call(f"{url}/update_weights_from_disk", {"model_path": str(second), "flush_cache": True, "weight_version": "1"})
        found["after_update"] = differences(url, second)
    finally:
        server.terminate()
        server.wait(timeout=60)
    problems = complaints(found)
    print(json.dumps({**found, "problems": problems}, indent=1))
    return 1 if problems else 0


def start(model: Path, port: int, version: str, log: Path) -> subprocess.Popen[bytes]:
    """The server, with what the model needs of it, and the kernels that the bundle has."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--skip-server-warmup"]
    command += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    command += ["--disable-prefill-cuda-graph", "--cuda-graph-max-bs", "8", *server_flags("k2_horizon", version)]
    environment = {**os.environ, **server_environment("k2_horizon", version)}
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}; see server.log")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"no /health within {READY_TIMEOUT_S:.0f} s; see server.log")


def kernel_differences() -> dict[str, float]:
    """Largest difference of the Triton norm to the reference, in bfloat16's last places (2^-8 of the value)."""
    from rl360.models.k2_horizon_hf import GroupedRMSNorm as Reference
    from rl360.models.sglang_external.grouped_norm import GroupedRMSNorm

    generator = torch.Generator("cuda").manual_seed(0)
    result = {}
    for width, groups in ((512, 4), (4096, 4), (96, 2)):
        norm = GroupedRMSNorm(width, groups, 1e-6).to("cuda", torch.bfloat16)
        reference = Reference(width, groups, 1e-6).to("cuda", torch.bfloat16)
        with torch.no_grad():
            norm.weight.copy_(torch.rand(width, generator=generator, device="cuda") + 0.5)
            reference.weight.copy_(norm.weight)
            x, residual = (torch.randn(1000, width, generator=generator, device="cuda").bfloat16() for _ in range(2))
            kept = residual.clone()
            alone = ((norm(x) - reference(x)).abs() / reference(x).abs().clamp(min=1e-3)).max()
            normed, total = norm(x, residual)
            expected = reference(x + kept)
            fused = ((normed - expected).abs() / expected.abs().clamp(min=1e-3)).max()
        result[f"{width}/{groups}"] = float(max(alone, fused) * 2**8)
        result[f"{width}/{groups} sum"] = float((total - (x + kept)).abs().max())
    return result


def differences(url: str, folder: Path) -> dict[str, Any]:
    """Absolute logprob differences between the server and transformers, over prompts and sampled tokens."""
    from transformers import AutoModelForCausalLM

    from rl360.models.k2_horizon_hf import register

    register()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval().cuda()
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    sequences = []
    for length in PROMPT_LENGTHS:
        for temperature in (0.0, 1.0):
            prompt = torch.randint(4, vocab, (length,), generator=generator).tolist()
            sampling = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
            meta = call(f"{url}/generate", body)["meta_info"]
            given = [row[0] for row in meta["input_token_logprobs"][1:]]
            sampled = [row[1] for row in meta["output_token_logprobs"]]
            assert len(sampled) == NEW_TOKENS
            sequences.append((prompt + sampled, given, [row[0] for row in meta["output_token_logprobs"]]))
    served = [torch.tensor([*given, *sampled]) for _, given, sampled in sequences]
    exact = [logprobs(model, ids) for ids, _, _ in sequences]
    rounded = [logprobs(model.to(torch.bfloat16), ids) for ids, _, _ in sequences]
    control: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    control.eval().cuda()
    for module in control.modules():
        if hasattr(module, "groups"):
            module.groups = 1
    plain = [logprobs(control, ids) for ids, _, _ in sequences]
    result: dict[str, Any] = {}
    for part in ("prompt", "sampled"):
        cut = [slice(0, len(given)) if part == "prompt" else slice(len(given), None) for _, given, _ in sequences]
        for name, one, other in (("server", served, exact), ("bfloat16", rounded, exact), ("control", served, plain)):
            apart = torch.cat([(a - b).abs()[c] for a, b, c in zip(one, other, cut, strict=True)])
            result[f"{part}_{name}"] = {"mean": float(apart.mean()), "max": float(apart.max()), "tokens": len(apart)}
    return result


@torch.no_grad()
def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Of every token but the first, given those before it."""
    logits = model(torch.tensor([ids], device="cuda")).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:], device="cuda")[:, None])[:, 0].cpu()


def complaints(found: dict[str, Any]) -> list[str]:
    problems = [
        f"kernel {key}: {value}" for key, value in found["kernel"].items() if value > (0 if "sum" in key else 2)
    ]
    for stage in ("first", "after_update"):
        for part in ("prompt", "sampled"):
            server, noise, control = (
                found[stage][f"{part}_{name}"]["mean"] for name in ("server", "bfloat16", "control")
            )
            if not server < NOISE_FACTOR * noise:
                problems.append(f"{stage} {part}: {server:.4f} from float32, bfloat16 alone is {noise:.4f}")
            if not control > CONTROL_FACTOR * server:
                problems.append(f"{stage} {part}: the control is only {control:.4f} away, the server {server:.4f}")
    return problems


def call(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        return json.loads(response.read())


if __name__ == "__main__":
    sys.exit(main())
