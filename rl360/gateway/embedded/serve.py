"""`python -m rl360.gateway.embedded.serve`: the embedded engine as a server of its own, started as SGLang is.

In: the flags of `python -m sglang.launch_server`. Out: a process that speaks SGLang's protocol on --host and --port
until SIGTERM. Flags that mean something to a GPU only are taken and named in the log (without their values: one may be
a secret), so that a fleet runs the same command line on a CPU. Weights come from --model-path, and later over HTTP.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import yaml

from rl360.errors import RL360Error
from rl360.interrupts import use_a_signal_stack

log = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("python -m rl360.gateway.embedded.serve", description=__doc__.splitlines()[0])
    found.add_argument("--model-path", required=True, type=Path, help="HF folder")
    found.add_argument("--host", default="127.0.0.1")
    found.add_argument("--port", type=int, default=30000)
    found.add_argument("--api-key", help="asked for everywhere but at /health; better in the file of --config")
    found.add_argument("--config", help="YAML: further flags without their dashes; those of the command line win")
    found.add_argument("--dtype", default="auto", choices=DTYPES, help="auto: float32 on a CPU, else bfloat16")
    found.add_argument("--load-format", default="auto", help="dummy: random weights from --random-seed")
    found.add_argument("--weight-version", type=int, default=0)
    found.add_argument("--random-seed", type=int, default=None)
    found.add_argument("--max-running-requests", type=int, default=64)
    found.add_argument("--device", default="cpu")
    found.add_argument("--kv-cache-gib", type=float, default=1.0, help="not SGLang's: memory of the KV cache")
    found.add_argument("--threads", type=int, default=0, help="not SGLang's: torch's threads; 0: every core")
    found.add_argument("--skip-tokenizer-init", action="store_true", help="no strings: no text, no stops by string")
    found.add_argument("--enable-deterministic-inference", action="store_true")
    found.add_argument("--enable-fp32-lm-head", action="store_true", help="final logits in fp32, whatever --dtype is")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asked, ignored = parser().parse_known_args(_with_config(sys.argv[1:] if arguments is None else arguments))
    if named := [word.partition("=")[0] for word in ignored if word.startswith("--")]:
        log.info("without meaning here: %s", " ".join(named))
    use_a_signal_stack()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        server = _server(asked)
        url = server.start()
    except RL360Error as error:
        log.error("%s", error)
        return 1
    log.info("the embedded engine serves %s on %s", asked.model_path, url)
    stop.wait()
    server.close()
    return 0


def _with_config(arguments: Sequence[str]) -> list[str]:
    """The flags of the file behind --config, where there is one, come first, as in SGLang."""
    words = list(arguments)
    if "--config" not in words[:-1]:
        return words
    at = words.index("--config")
    found = yaml.safe_load(Path(words[at + 1]).read_text()) or {}
    flags = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in found.items()]
    return [*chain.from_iterable(flags), *words[:at], *words[at + 2 :]]


def _server(asked: argparse.Namespace):  # type: ignore[no-untyped-def]  # its type would import torch
    import torch

    from rl360.gateway.embedded.engine import EmbeddedEngine
    from rl360.gateway.embedded.server import EngineServer
    from rl360.models.cpu_threads import use_cpu_threads
    from rl360.models.loading import load_decoder

    use_cpu_threads(asked.threads)
    names = {"auto": "float32" if asked.device == "cpu" else "bfloat16", "half": "float16", "float": "float32"}
    decoder = load_decoder(
        asked.model_path,
        asked.device,
        getattr(torch, names.get(asked.dtype, asked.dtype)),
        random_init_seed=(asked.random_seed or 0) if asked.load_format == "dummy" else None,
    )
    engine = EmbeddedEngine(
        decoder.requires_grad_(False),
        None if asked.skip_tokenizer_init else asked.model_path,
        max_running_requests=asked.max_running_requests,
        kv_cache_gib=asked.kv_cache_gib,
        fp32_logits=asked.enable_fp32_lm_head,
        deterministic=asked.enable_deterministic_inference,
        version=asked.weight_version,
        seed=asked.random_seed,
    )
    return EngineServer(engine, asked.host, asked.port, asked.api_key)


if __name__ == "__main__":
    sys.exit(main())
