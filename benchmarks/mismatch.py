"""How far a server's logprobs are from the trainer's, and both from the exact model's, by attention backend.

    python benchmarks/mismatch.py --model FOLDER --variants triton fa3 triton+deterministic --out FILE

A variant is a backend of SGLang, with `+deterministic` under --enable-deterministic-inference. One server each samples
the same prompts at temperature 1. Then the trainer's code computes the logprob of every sampled token again, with each
attention kernel that it has on this device, and once more as the `reference`: fp32 throughout with plain attention, on
weights that were rounded to --dtype first, so that it differs from the others by arithmetic alone. Final logits are in
fp32 on all sides. A row compares two of them:

    a variant and a trainer        the mismatch that a run with these two has
    a variant and the reference    the server's part of it
    a trainer and the reference    the trainer's part, on the samples of all variants

A server that does not start, or answers wrongly, has a row with the errors of its log, and the others go on. Tokens/s
say only that a server ran as it should: with --at-once above 1 others start meanwhile.

Axes: A attempts, T sampled tokens of each.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import json
import math
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.final_logits import QUESTIONS  # noqa: E402
from benchmarks.progress import Progress, end_on_sigterm  # noqa: E402
from rl360.errors import InfrastructureError  # noqa: E402
from rl360.gateway.templates import ChatTemplate  # noqa: E402
from rl360.gateway.tokenizer import TextTokenizer  # noqa: E402
from rl360.models.decoder import Attend, Decoder, causal_attend  # noqa: E402
from rl360.models.loading import load_decoder  # noqa: E402
from rl360.models.megatron.attention_cuda import attend_varlen, kernel_name  # noqa: E402
from rl360.serving.command import ServerFlags, launches  # noqa: E402
from rl360.serving.fleet import Fleet, WatchSettings  # noqa: E402
from rl360.serving.ports import claim_ports  # noqa: E402
from rl360.trainers.attention import tree_attend  # noqa: E402
from rl360.trainers.logprobs import Predictions, token_logprobs  # noqa: E402
from rl360.trainers.mismatch import MAX_LOG_RATIO, RANGES, mismatch_means, mismatch_sums  # noqa: E402
from rl360.trainers.packing import Tree, pack  # noqa: E402
from rl360.types import Sequence as TokenSequence  # noqa: E402

REFERENCE = "reference"
DETERMINISTIC = "deterministic"
DETERMINISTIC_FLAG = "--enable-deterministic-inference"
# Attention as a loop over requests cannot be captured; SGLang would drop the graphs by itself, with a warning.
WITHOUT_GRAPHS = ("torch_native", "flex_attention")
MICRO_BATCH_TOKENS = 8192
CHUNK_TOKENS = 512  # logits of so many positions are held at once, 100 MB in fp32 at a vocabulary of 49152
LOG_BYTES = 400_000  # of the end of a server's log, looked through for errors
SHOWN_ERRORS = 4
LONGEST_ERROR = 300  # characters
# The last line of a Python traceback, and what a compiler says of a missing header.
ERROR_LINE = re.compile(r"(?:^(?:\w+\.)*\w*(?:Error|Exception)\b|\bfatal error: ).*")
COMMAND_LINE = "--- "  # how the fleet begins a log: the server's command
PACKAGES = (
    "torch", "triton", "transformers", "sglang", "sglang-kernel", "flash-attn-4", "nvidia-cutlass-dsl",
    "flashinfer-python",
)  # fmt: skip

Logprobs = NDArray[np.float64]  # [A, T]
Look = Callable[[Sequence[TokenSequence]], Logprobs]
"""Sequences of `to_sequences` -> the logprobs of their sampled tokens."""


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    backend: str
    deterministic: bool


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    ids_AT: NDArray[np.int32]
    logprobs_AT: Logprobs
    start_s: float
    sample_s: float


class BadAnswer(Exception):
    """A server answered with an error, or with something else than was asked for."""


class NotSampled(Exception):
    """A variant has no samples; says why, in the server's own words where its log has some."""


def main() -> int:
    asked = _arguments()
    end_on_sigterm()
    torch.set_float32_matmul_precision("highest")  # an environment variable may have asked for TF32
    found: dict[str, Any] = {
        "model": asked.model.name,
        "device": torch.cuda.get_device_name(asked.device) if asked.device.type == "cuda" else "cpu",
        "versions": _versions(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("SGLANG_")},
        "dtype": asked.dtype,
        "attempts": asked.attempts,
        "tokens": asked.tokens,
        "extra": asked.extra,
        "at_once": asked.at_once,
        "servers": {},
        "rows": [],
    }
    progress = Progress(found, asked.out)
    order = [variant.name for variant in asked.variants]
    try:
        measure(asked, progress)
    finally:  # what there is, also of a run that is ended by a signal
        reached = {one["behaviour"] for one in found["rows"]}
        found["rows"] += [{"behaviour": name, "error": "not reached"} for name in order if name not in reached]
        found["rows"].sort(key=lambda one: order.index(one["behaviour"]) if one["behaviour"] in order else len(order))
        progress.write()
        print(table(found["rows"], found["servers"]), flush=True)
    return 0 if any("kl" in one for one in found["rows"]) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="HF folder with weights, tokenizer and chat template")
    parser.add_argument(
        "--variants", type=to_variant, nargs="+", required=True, help="BACKEND or BACKEND+deterministic"
    )
    parser.add_argument("--command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--extra", default="", help="more flags of every server")
    parser.add_argument("--dtype", default="bfloat16", help="of servers and trainers")
    parser.add_argument("--device", type=torch.device, help="of the trainer; default: cuda where there is one, or cpu")
    parser.add_argument("--attempts", type=int, default=64, help="all open at once; questions take turns")
    parser.add_argument("--tokens", type=int, default=256, help="sampled in each, whatever they are")
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--at-once", type=int, default=1, help="servers on the machine; they sample one after another")
    parser.add_argument("--start-timeout-s", type=float, default=600.0, help="of a server, its first answer included")
    parser.add_argument("--sample-timeout-s", type=float, default=300.0, help="of a variant")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/rl360-mismatch"), help="a folder for each variant")
    parser.add_argument("--out", type=Path, help="JSON, written after every stage")
    found = parser.parse_args()
    found.device = found.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [variant.name for variant in found.variants]
    if len(set(names)) < len(names):
        parser.error("--variants: one is named twice")
    if found.device.type == "cuda" and found.dtype == "float32":
        parser.error("--dtype float32: the trainers' kernels on CUDA take bfloat16 or float16; or take --device cpu")
    return found


def to_variant(name: str) -> Variant:
    backend, *options = name.split("+")
    if not backend or options not in ([], [DETERMINISTIC]):
        raise argparse.ArgumentTypeError(f"{name!r}: expected BACKEND or BACKEND+{DETERMINISTIC}")
    return Variant(name, backend, bool(options))


def measure(asked: argparse.Namespace, progress: Progress) -> None:
    """Fills `rows` and `servers` of what the progress writes."""
    rows, servers = progress.found["rows"], progress.found["servers"]
    prompts = make_prompts(asked.model, asked.attempts)
    with progress.stage("trainers"):
        looks = make_looks(asked.model, asked.device, getattr(torch, asked.dtype))
    seen: dict[str, list[Logprobs]] = {name: [] for name in looks}
    try:
        with closing(sample_all(asked, prompts, progress)) as sampled:
            for variant, samples in sampled:
                if isinstance(samples, NotSampled):
                    rows.append({"behaviour": variant.name, "error": str(samples)})
                    continue
                tokens_per_s = samples.logprobs_AT.size / samples.sample_s
                servers[variant.name] = {"start_s": round(samples.start_s, 1), "tokens_per_s": round(tokens_per_s, 1)}
                with progress.stage(f"{variant.name}: logprobs again"):
                    _look_with_all(variant, samples, to_sequences(prompts, samples), looks, seen, rows)
    finally:  # of what there is, also when a signal ends this
        exact = seen.pop(REFERENCE, [])
        rows += [
            compare(name, REFERENCE, np.concatenate(parts[: len(exact)]), np.concatenate(exact[: len(parts)]))
            for name, parts in seen.items()
            if parts and exact
        ]


def _look_with_all(
    variant: Variant,
    samples: Samples,
    sequences: Sequence[TokenSequence],
    looks: dict[str, Look],
    seen: dict[str, list[Logprobs]],
    rows: list[dict[str, Any]],
) -> None:
    """A row for each of `looks`; what they saw goes to `seen`. One that fails is taken out of both."""
    for name in list(looks):
        try:
            again_AT = looks[name](sequences)
        except Exception as error:  # a kernel's compiler and its launch fail in many ways
            problem = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
            rows.append({"behaviour": variant.name, "proximal": name, "error": problem})
            del looks[name], seen[name]  # it would fail again
            continue
        rows.append(compare(variant.name, name, samples.logprobs_AT, again_AT))
        seen[name].append(again_AT)


# -- sampling ----------------------------------------------------------------------------------------------------------


def make_prompts(model: Path, attempts: int) -> list[tuple[int, ...]]:
    """One of each attempt."""
    template = ChatTemplate(TextTokenizer.from_folder(model))
    questions = [{"role": "user", "content": f"Write a Python function that {question}."} for question in QUESTIONS]
    ids = [tuple(template.start([question], [], {}).token_ids) for question in questions]
    return list(itertools.islice(itertools.cycle(ids), attempts))


def sample_all(
    asked: argparse.Namespace, prompts: Sequence[tuple[int, ...]], progress: Progress
) -> Generator[tuple[Variant, Samples | NotSampled]]:
    """As they come, whatever becomes of the others. Closed early, it ends every server."""
    turn = threading.Lock()
    fleets: list[Fleet] = []
    with ThreadPoolExecutor(asked.at_once) as pool:
        futures = {pool.submit(_sample, asked, one, prompts, turn, fleets, progress): one for one in asked.variants}
        try:
            for future in as_completed(futures):
                try:
                    yield futures[future], future.result()
                except NotSampled as error:
                    progress.say(f"{futures[future].name}: {error}")
                    yield futures[future], error
        finally:
            for future in futures:
                future.cancel()
            for fleet in fleets:
                fleet.close()


def _sample(
    asked: argparse.Namespace,
    variant: Variant,
    prompts: Sequence[tuple[int, ...]],
    turn: threading.Lock,
    fleets: list[Fleet],
    progress: Progress,
) -> Samples:
    """A server's whole life."""
    logs = asked.logs / variant.name
    for old in logs.glob("*.log"):
        old.unlink()
    watch = WatchSettings(start_timeout_s=asked.start_timeout_s, health_interval_s=3600.0, max_restarts=0)
    with closing(claim_ports(1, 0)) as ports:
        fleet = Fleet(launches(server_flags(asked, variant), ports.pairs, []), logs, watch)
        fleets.append(fleet)
        try:
            progress.say(f"{variant.name}: starts")
            began = time.perf_counter()
            (url,) = fleet.start()
            start_s = time.perf_counter() - began
            with turn:
                progress.say(f"{variant.name}: ready after {start_s:.0f} s, samples")
                began = time.perf_counter()
                replies = asyncio.run(_ask(url, prompts, asked.tokens, asked.sample_timeout_s))
                sample_s = time.perf_counter() - began
            taken = [take(reply, asked.tokens) for reply in replies]
            progress.say(f"{variant.name}: sampled in {sample_s:.1f} s")
            ids, logprobs = zip(*taken, strict=True)
            return Samples(np.array(ids, np.int32), np.array(logprobs, np.float64), start_s, sample_s)
        except (InfrastructureError, BadAnswer, aiohttp.ClientError, TimeoutError) as error:
            said = str(error).partition("; its log")[0] or type(error).__name__
            raise NotSampled("; ".join([said, *errors_in(_end_of_log(logs))])) from None
        finally:
            fleet.close()


def server_flags(asked: argparse.Namespace, variant: Variant) -> ServerFlags:
    return ServerFlags(
        asked.model,
        asked.context_length,
        command=tuple(shlex.split(asked.command)),
        dtype=asked.dtype,
        fp32_logits=True,
        attention_backend=variant.backend,
        cuda_graph_max_bs=0 if variant.backend in WITHOUT_GRAPHS else None,
        extra_args=(*shlex.split(asked.extra), *([DETERMINISTIC_FLAG] if variant.deterministic else [])),
    )


async def _ask(url: str, prompts: Sequence[tuple[int, ...]], tokens: int, timeout_s: float) -> list[bytes]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:

        async def one(number: int, prompt: tuple[int, ...]) -> bytes:
            params = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True, "sampling_seed": number}
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": False}
            async with client.post(f"{url}/generate", json=body) as response:
                raw = await response.read()
                if response.status != 200:
                    raise BadAnswer(f"HTTP {response.status} {raw[:LONGEST_ERROR].decode(errors='replace')}")
                return raw

        return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


def take(reply: bytes, tokens: int) -> tuple[list[int], list[float]]:
    """Ids and logprobs of a /generate reply. Raises BadAnswer unless they are `tokens` of each, all finite."""
    try:
        answer = json.loads(reply)
        ids = list(answer["output_ids"])
        pairs = [(float(row[0]), row[1]) for row in answer["meta_info"]["output_token_logprobs"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BadAnswer(f"an answer without ids and logprobs: {error!r}") from None
    if len(ids) != tokens or [token for _, token in pairs] != ids:
        raise BadAnswer(f"{len(ids)} ids, {len(pairs)} logprobs; expected {tokens} ids and the logprob of each")
    if not all(math.isfinite(logprob) for logprob, _ in pairs):
        raise BadAnswer("a logprob that is not finite")
    return ids, [logprob for logprob, _ in pairs]


def errors_in(log: str) -> list[str]:
    """The last different errors of a log, in order; its last lines where it has none."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith(COMMAND_LINE)]
    errors = dict.fromkeys(match.group()[:LONGEST_ERROR] for line in lines if (match := ERROR_LINE.search(line)))
    return list(errors)[-SHOWN_ERRORS:] or [line[:LONGEST_ERROR] for line in lines[-SHOWN_ERRORS:]]


def _end_of_log(folder: Path) -> str:
    return "\n".join(log.read_text(errors="replace")[-LOG_BYTES:] for log in sorted(folder.glob("*.log")))


# -- logprobs again ----------------------------------------------------------------------------------------------------


def to_sequences(prompts: Sequence[tuple[int, ...]], samples: Samples) -> list[TokenSequence]:
    """For the trainer's packing. An advantage is the number of its attempt: it tells where a packed token came from."""
    attempts, tokens = samples.logprobs_AT.shape
    sequences = []
    for number, prompt in enumerate(prompts):
        ids = np.concatenate((np.array(prompt, np.int32), samples.ids_AT[number]))
        mask = np.arange(ids.size) >= len(prompt)
        behaviour = np.zeros(ids.size, np.float32)
        behaviour[mask] = samples.logprobs_AT[number]
        numbers = np.full(ids.size, number, np.float32)
        weights = mask.astype(np.float32) / (attempts * tokens)
        sequences.append(TokenSequence(ids, mask, behaviour, numbers, weights, 1.0, str(prompt), str(number)))
    return sequences


def make_looks(model: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Look]:
    """The trainer's ways to logprobs on this device, by name, and the reference."""
    decoder = load_decoder(model, device, dtype).requires_grad_(False)
    exact = copy.deepcopy(decoder).float()
    looks: dict[str, Look]
    if device.type == "cpu":
        looks = {"trainer": partial(look_again, decoder, partial(tree_attend, dtype=dtype), share_prompts=True)}
    else:
        kernels = dict.fromkeys((kernel_name(device), "torch"))
        looks = {
            f"trainer {kernel}": partial(look_again, decoder, partial(_varlen, device, kernel)) for kernel in kernels
        }
    return {**looks, REFERENCE: partial(look_again, exact, _plain)}


def _varlen(device: torch.device, kernel: str, trees: Sequence[Tree]) -> Attend:
    """`rl360.trainers.attention.varlen_attend` with a kernel by name."""
    lengths = torch.tensor([0, *(length for tree in trees for length in tree.branch_lengths)], dtype=torch.int32)
    bounds, longest = lengths.cumsum(0, dtype=torch.int32).to(device), int(lengths.max())

    def attend(layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        return attend_varlen(q_NHD, k_NKD, v_NKD, bounds, bounds, longest, longest, kernel)

    return attend


def _plain(trees: Sequence[Tree]) -> Attend:
    """Scores, softmax and weighted sum of each sequence, in the dtype of its input, with no fused kernel."""
    causal = causal_attend([length for tree in trees for length in tree.branch_lengths])

    def attend(layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return causal(layer, q_NHD, k_NKD, v_NKD)

    return attend


@torch.no_grad()
def look_again(
    decoder: Decoder,
    attend: Callable[[Sequence[Tree]], Attend],
    sequences: Sequence[TokenSequence],
    share_prompts: bool = False,
) -> Logprobs:
    """Logprobs of the sampled tokens, with fp32 logits. Raises FloatingPointError where one is not finite."""
    tokens = int(sequences[0].loss_mask_T.sum())
    found = np.full((len(sequences), tokens), np.nan)
    for micro in pack(sequences, MICRO_BATCH_TOKENS, share_prompts):
        ids, positions, rows, *predicted = (
            torch.from_numpy(part).to(decoder.device)
            for part in (
                micro.token_ids_N, micro.positions_N, micro.rows_U, micro.temperatures_U, micro.slots_M, micro.targets_M
            )
        )  # fmt: skip
        hidden = decoder.hidden(ids, positions, attend(micro.trees))[rows]
        logprobs = token_logprobs(hidden, decoder.head_weight, Predictions(*predicted), CHUNK_TOKENS, fp32_logits=True)
        found[micro.advantages_M.astype(np.int64), micro.places_M] = logprobs.cpu().numpy()
    if not np.isfinite(found).all():
        raise FloatingPointError("a logprob is not finite")
    return found


# -- numbers -----------------------------------------------------------------------------------------------------------


def compare(behaviour: str, proximal: str, behaviour_AT: Logprobs, proximal_AT: Logprobs) -> dict[str, Any]:
    """One row: the numbers of rl360.trainers.mismatch with every token weighing the same, and their standard errors
    (`_se`) from attempt to attempt. Of a single attempt there are none."""
    attempts, tokens = behaviour_AT.shape
    places_AT = np.tile(np.arange(tokens), (attempts, 1))
    parts = (proximal_AT, behaviour_AT, np.full(behaviour_AT.shape, 1 / behaviour_AT.size), places_AT)
    sums = mismatch_sums(*(torch.from_numpy(part.ravel()) for part in parts))
    means = mismatch_means({name: float(value) for name, value in sums.items()})
    difference_AT = proximal_AT - behaviour_AT
    kl_AT = np.expm1(np.minimum(difference_AT, MAX_LOG_RATIO)) - difference_AT
    names = ("logprob_diff_mean", "logprob_diff_max", "ratio_max", "kl")
    row: dict[str, Any] = {"behaviour": behaviour, "proximal": proximal}
    row |= {name: _rounded(means[f"mismatch/{name}"]) for name in names}
    if attempts > 1:
        for name, values_AT in (("logprob_diff_mean_se", np.abs(difference_AT)), ("kl_se", kl_AT)):
            row[name] = _rounded(float(values_AT.mean(axis=1).std(ddof=1)) / math.sqrt(attempts))
    row["by_position"] = {
        place: {
            name: _rounded(means[f"mismatch/position/{place}/{name}"])
            for name in ("share", "logprob_diff_mean", "ratio_max", "kl")
        }
        for place in RANGES
        if f"mismatch/position/{place}/share" in means
    }
    return row


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def table(rows: Sequence[Mapping[str, Any]], servers: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown. Behind ± one standard error; in the ranges the mean difference."""
    places = [place for place in RANGES if any(place in row.get("by_position", {}) for row in rows)]
    heads = ["sampled by", "computed by", "mean difference", "largest", "largest ratio", "KL", *places, "tokens/s"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["behaviour"], row.get("proximal", "")]
        if "error" in row:
            cells += [row["error"].replace("|", "/").replace("\n", " "), *[""] * (len(heads) - 3)]
        else:
            cells += [_with_error(row, "logprob_diff_mean"), f"{row['logprob_diff_max']:.3g}"]
            cells += [f"{row['ratio_max']:.3g}", _with_error(row, "kl")]
            cells += [f"{row['by_position'][place]['logprob_diff_mean']:.3g}" for place in places]
            rate = servers.get(row["behaviour"], {}).get("tokens_per_s")
            cells.append("" if rate is None else f"{rate:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _with_error(row: Mapping[str, Any], name: str) -> str:
    error = row.get(f"{name}_se")
    return f"{row[name]:.3g}" + ("" if error is None else f" ± {error:.1g}")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
