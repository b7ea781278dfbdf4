"""The embedded engine as a server that is wrong on purpose: PERTURB=temperature samples at another one, PERTURB=weights
says that it loads new weights and keeps the old ones. Once in a run, and not before it serves version PERTURB_FROM:
PERTURB=dies is killed while weights arrive, PERTURB=dies_generating while requests run on it, PERTURB=hangs_generating
stands still there, and PERTURB=hangs when it is to pause."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rl360.gateway.embedded import sampling, serve
from rl360.gateway.embedded.engine import EmbeddedEngine

FACTOR = 0.5


def main() -> int:
    kind = os.environ["PERTURB"]
    if kind == "temperature":
        read = sampling.SamplingParams.from_json

        def tampered(raw: dict[str, Any]) -> sampling.SamplingParams:
            return read({**raw, "temperature": FACTOR * raw.get("temperature", 1.0)})

        sampling.SamplingParams.from_json = staticmethod(tampered)  # type: ignore[method-assign, assignment]
    elif kind == "weights":
        EmbeddedEngine.copy_weights = lambda engine, named: None  # type: ignore[method-assign]
    elif kind == "dies":
        copy = EmbeddedEngine.copy_weights

        def killed(engine: EmbeddedEngine, named: Any) -> None:
            die_once(engine)
            copy(engine, named)

        EmbeddedEngine.copy_weights = killed  # type: ignore[method-assign]
    elif kind in ("dies_generating", "hangs_generating"):
        signum = signal.SIGKILL if kind == "dies_generating" else signal.SIGSTOP
        sample = EmbeddedEngine._sample

        def cut_off(engine: EmbeddedEngine, batch: list[Any], *args: Any) -> None:
            sample(engine, batch, *args)
            if any(request.decoding and request.finish_reason is None for request in batch):
                die_once(engine, signum)

        EmbeddedEngine._sample = cut_off  # type: ignore[method-assign]
    elif kind == "hangs":
        pause = EmbeddedEngine.pause

        def hanging(engine: EmbeddedEngine, *args: Any) -> None:
            die_once(engine, signal.SIGSTOP)
            pause(engine, *args)

        EmbeddedEngine.pause = hanging  # type: ignore[method-assign]
    return serve.main()


def die_once(engine: EmbeddedEngine, signum: int = signal.SIGKILL) -> None:
    if engine.version >= int(os.environ["PERTURB_FROM"]):
        try:
            Path(os.environ["PERTURB_ONCE"]).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signum)
        time.sleep(1.0)  # another thread may be the one that the signal reaches, and this one would answer meanwhile


if __name__ == "__main__":
    sys.exit(main())
