"""The embedded engine: continuous batching over a `Decoder` that it shares with the trainer, weights and all.

In: requests (`submit`), control (`pause`, `abort`, `drain`, `set_version`), from any thread. Out: finished requests,
through their callbacks on the engine's own thread. One step is one forward pass over the next token of every running
row and a bounded number of prompt tokens; requests join and leave between steps. HTTP is left to
rl360.gateway.embedded.server, the choice of tokens to .sampling, rows to .rows, memory to .kv_cache.

Nothing of the model is copied. `drain` keeps the engine still while the trainer changes the weights, and `set_version`
then gives up every cached key and value, because they belong to the old ones.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl360.gateway.embedded.attention import StepAttention
from rl360.gateway.embedded.kv_cache import KVCache
from rl360.gateway.embedded.memory import WEIGHTS, Memory
from rl360.gateway.embedded.request import Request, new_request
from rl360.gateway.embedded.rows import Rows
from rl360.gateway.embedded.sampling import SamplingParams, sample, uniforms
from rl360.gateway.embedded.stops import read_tokenizer
from rl360.interrupts import leave_signals_to_the_main_thread
from rl360.models.cpu_threads import use_cpu_threads
from rl360.models.decoder import Decoder
from rl360.models.loading import copy_tensors, load_weights

# Prompt tokens of one step, over all requests: long enough for full speed, short enough that rows which are already
# decoding wait only a moment.
PREFILL_TOKENS_PER_STEP = 256
PAUSE_MODES = ("abort", "retract", "in_place")

logger = logging.getLogger(__name__)

STEP_FAILED = 500  # else it would look like an interruption for new weights, and be asked again until a turn's end


class EmbeddedEngine:
    """See the module's docstring.

    `fp32_logits`: final logits of a bf16 decoder are kept in fp32, not in bf16; the trainer must do the same.
    `deterministic`: one request at a time and no reuse of earlier keys and values, so that a rerun is equal bit for
    bit, whatever arrives when. `seed` is for requests that bring no `sampling_seed` (None: a fresh one each run).
    `num_threads` are torch's threads in the engine's thread (None: as many as the thread that calls `start`).
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer_dir: Path | str | None,
        *,
        max_running_requests: int = 64,
        kv_cache_gib: float = 1.0,
        fp32_logits: bool = True,
        deterministic: bool = False,
        version: int = 0,
        seed: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.decoder = decoder
        self.version = version
        self.deterministic = deterministic
        self.fp32_logits = fp32_logits
        self.model_dir = None if tokenizer_dir is None else Path(tokenizer_dir)
        self.tokenizer, self._eos = read_tokenizer(self.model_dir, decoder.config.eos_token_ids)
        self.max_running_requests = 1 if deterministic else max_running_requests
        self._cache = KVCache(decoder.config, kv_cache_gib, self.max_running_requests, decoder.dtype, decoder.device)
        self._seed = secrets.randbits(63) if seed is None else seed
        self._num_threads = num_threads
        self._submitted = 0

        self._rows = Rows(self._cache, reuses=not deterministic)
        self._running = self._rows.requests  # index = row; rows that are decoding come first
        self._waiting: list[Request] = []  # first come, first served
        self._paused = False
        self._closing = False
        self._memory = Memory()
        self._holds = 0  # callers that keep the engine still or are about to
        self._wake = threading.Condition()  # guards _waiting's tail, _paused, _closing, _holds
        self._still = threading.RLock()  # held during a step, and by whoever keeps the engine still
        self._thread: threading.Thread | None = None
        self.steps = self.generated_tokens = self.prefilled_tokens = 0

    # --- from any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._thread is None:
            threads = self._num_threads or torch.get_num_threads()
            self._thread = threading.Thread(target=self._loop, args=(threads,), name="embedded-engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread after the step in hand, and abort what is open."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.abort(None, "The engine is closed.")

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs; a paused or busy engine is alive."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def released(self) -> frozenset[str]:
        """Tags of the memory that somebody else has."""
        return self._memory.released

    @property
    def max_tokens(self) -> int:
        """The most tokens of one request, prompt and output: the model's context, or what the KV cache can hold."""
        return min(self.decoder.config.max_positions, self._cache.longest_row)

    def submit(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        rid: str,
        on_finish: Callable[[], None],
        on_token: Callable[[], None] | None = None,
    ) -> Request:
        """Queue a request. Callbacks come on the engine's thread and must return at once.

        Raises `ValueError` for a request that can never run; the text is for the client.
        """
        request = new_request(
            input_ids,
            params,
            rid,
            on_finish,
            on_token,
            own_seed=self._next_seed,
            vocab_size=self.decoder.config.vocab_size,
            max_tokens=self.max_tokens,
            end_tokens=self._eos,
            tokenizer=self.tokenizer,
        )
        if request.params.max_new_tokens == 0:
            request.finish_reason = {"type": "length", "length": 0}
            on_finish()
            return request
        with self._wake:
            if self._closing:
                raise ValueError("The engine is closed.")
            self._memory.need_all()
            request.after_pause = self._paused
            self._waiting.append(request)
            self._wake.notify_all()
        return request

    def _next_seed(self) -> int:
        with self._wake:
            self._submitted += 1
            return int(uniforms([self._seed], [self._submitted])[0] * 2**53)

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        """Keep the engine still: enter after the step in hand; no step begins before leaving. Nests in one thread."""
        with self._wake:
            self._holds += 1
        try:
            with self._still:
                yield
        finally:
            with self._wake:
                self._holds -= 1
                self._wake.notify_all()

    @contextlib.contextmanager
    def drain(self) -> Iterator[None]:
        """`with engine.drain():` no forward runs inside, so weights may change. Gives the idle cache's memory back.

        Requests that are still running stay; `set_version` makes them go on under the new weights.
        """
        with self._hold():
            if not self._running:
                self._cache.release()
            yield

    def set_version(self, version: int) -> None:
        """Say that the weights are now those of `version`. Running requests compute their history again under them."""
        with self._hold():
            self._retract_all()
            self._cache.forget()
            self.version = version

    def load_weights(self, folder: Path, version: int | None) -> None:
        """Copy a checkpoint into the shared decoder, between steps. Raises `CheckpointError` and changes nothing."""
        self._memory.need_weights()
        with self._hold():
            load_weights(self.decoder, folder)
            self.set_version(self.version if version is None else version)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """No step runs inside: weights can be read. Raises ValueError where their memory is released."""
        self._memory.need_weights()
        with self._hold():
            yield

    def copy_weights(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Copy some HF-named tensors into the decoder, between steps; a tied head is skipped.

        Running requests compute their history again, and cached prefixes are forgotten. Raises `CheckpointError` for a
        name or a shape that the decoder has not, before anything is copied.
        """
        self._memory.need_weights()
        with self._hold():
            copy_tensors(self.decoder, named)
            self.set_version(self.version)

    def pause(self, mode: str = "abort") -> None:
        """Begin no step until `resume`. abort: end every request; retract: free their rows; in_place: keep them."""
        if mode not in PAUSE_MODES:
            raise ValueError(f"Invalid mode: {mode!r}. Expected one of {list(PAUSE_MODES)}.")
        with self._hold():
            with self._wake:
                self._paused = True
            if mode == "abort":
                self.abort(None)
            elif mode == "retract":
                self._retract_all()

    def release_memory(self, tags: Sequence[str] | None) -> None:
        """Give up the cache, the weights or both (None). What was in them is gone: weights are NaN until new ones come.

        For an engine with weights of its own only. Raises ValueError when it is busy, or has released them already.
        """
        with self._hold():
            if self._running or self._waiting:
                raise ValueError("release_memory_occupation should be called only when server is idle.")
            given_up = self._memory.release(tags)
            self._cache.forget()
            self._cache.release()
            if WEIGHTS in given_up:
                with torch.no_grad():
                    for parameter in self.decoder.parameters():
                        parameter.fill_(float("nan"))

    def resume_memory(self, tags: Sequence[str] | None) -> None:
        """Take memory again, empty. Raises ValueError for what was not released."""
        self._memory.resume(tags)

    def resume(self) -> None:
        self._memory.need_all()
        with self._wake:
            self._paused = False
            for request in self._waiting:
                request.after_pause = False
            self._wake.notify_all()

    def abort(self, rid: str | None, message: str = "Aborted", status_code: int | None = None) -> int:
        """End one request, or all with None; they keep what they have generated. Returns how many there were.

        status_code: as SGLang says it of a request that failed; None: whoever asked may ask again for the rest.
        """
        with self._hold():
            with self._wake:
                chosen = [r for r in self._waiting if rid is None or r.rid == rid]
                self._waiting = [r for r in self._waiting if r not in chosen]
            rows = [row for row, r in enumerate(self._running) if rid is None or r.rid == rid]
            chosen += [self._running[row] for row in rows]
            for request in chosen:
                reason = {"type": "abort", "message": message, "status_code": status_code, "err_type": None}
                request.finish_reason = reason
            self._rows.leave(rows)
            for request in chosen:
                request.on_finish()
            return len(chosen)

    def flush(self) -> bool:
        """Forget cached sequences. False, and nothing done, while requests run or wait for a row.

        Requests that came during a pause do not count; those that a pause has retracted do.
        """
        with self._hold():
            with self._wake:
                waiting = any(not request.after_pause for request in self._waiting)
            if self._running or waiting:
                return False
            self._cache.forget()
            self._cache.release()
            return True

    def state(self) -> dict[str, Any]:
        """Counts for /server_info; read without waiting for a step."""
        return {
            "num_running_reqs": len(self._running),
            "num_waiting_reqs": len(self._waiting),
            "is_paused": self._paused,
            "generated_tokens": self.generated_tokens,
            "prefilled_tokens": self.prefilled_tokens,
            "steps": self.steps,
            "kv_used_tokens": self._cache.used_tokens,
            "max_total_num_tokens": self._cache.capacity_tokens,
            "kv_evictions": self._cache.evictions,
        }

    # --- on the engine's thread ------------------------------------------------------------------------------------

    def _loop(self, num_threads: int) -> None:
        leave_signals_to_the_main_thread()
        use_cpu_threads(num_threads)
        while True:
            with self._wake:
                while not self._closing and (self._holds or self._paused or not (self._running or self._waiting)):
                    self._wake.wait()
                if self._closing:
                    return
            with self._still:
                if self._holds or self._paused:  # someone came in between
                    continue
                try:
                    self._step()
                except Exception as error:  # whatever it was, no client may wait for ever
                    logger.exception("engine step failed")
                    self.abort(None, f"The engine failed: {error!r}", STEP_FAILED)
                    self._cache.forget()
                    self._cache.release()

    @torch.inference_mode()
    def _step(self) -> None:
        """Admit, compute one token of every decoding row and some prompt tokens, sample, let finished ones leave."""
        self._admit()
        if not self._running:
            return
        decoding, spans = self._rows.next_spans(PREFILL_TOKENS_PER_STEP)
        batch = self._running[: len(spans)]

        device = self.decoder.device
        ids = np.concatenate([r.tokens[start:end] for r, (start, end) in zip(batch, spans, strict=True)])
        positions = np.concatenate([np.arange(start, end) for start, end in spans])
        attention = StepAttention(self._cache.layers, decoding, spans, device)
        hidden_NC = self.decoder.hidden(
            torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device), attention
        )
        last = np.cumsum([end - start for start, end in spans]) - 1
        for request, (_, end) in zip(batch, spans, strict=True):
            request.computed = end
        self.steps += 1
        self.prefilled_tokens += sum(end - start for start, end in spans[decoding:])
        ready = [row for row, request in enumerate(batch) if request.computed == request.length]
        if ready:
            self._sample(batch, ready, hidden_NC, last)

    def _sample(self, batch: list[Request], ready: list[int], hidden_NC: Tensor, last: np.ndarray) -> None:
        if len(ready) < hidden_NC.shape[0]:
            hidden_NC = hidden_NC[torch.from_numpy(last[ready]).to(hidden_NC.device)]
        requests = [batch[row] for row in ready]
        forbidden = {i: f for i, r in enumerate(requests) if r.params.min_new_tokens and (f := r.forbidden())}
        logits = self.decoder.logits(hidden_NC, self.fp32_logits)
        ids, logprobs = sample(logits, [r.params for r in requests], [r.length for r in requests], forbidden)
        for request, token, logprob in zip(requests, ids, logprobs, strict=True):
            request.append(token, logprob, self.version)
        self.generated_tokens += len(ids)
        finished = [row for row, request in zip(ready, requests, strict=True) if request.finish_reason is not None]
        if not self.deterministic:
            for row in finished:
                if not self._waiting:  # rows that nobody waits for can make room
                    self._cache.shrink([r.computed for r in self._running], batch[row].computed)
                self._cache.keep(row, batch[row].tokens[: batch[row].computed])
        self._rows.leave(finished)
        for request in requests:
            if request.finish_reason is not None:
                request.on_finish()
            elif request.on_token is not None:
                request.on_token()

    def _admit(self) -> None:
        """Give rows to waiting requests, in order, while there is room."""
        with self._wake:
            waiting = list(self._waiting)
        admitted: list[Request] = []
        for request in waiting:
            if len(self._running) >= self.max_running_requests:
                break
            if self._rows.follows_a_prefill(request):
                continue  # a step or two later it copies what is being computed now
            width = max([request.reserve, *(r.reserve for r in self._running)])
            wanted = len(self._running) + len(waiting) - len(admitted)
            lengths = [r.computed for r in self._running]
            if not self._cache.reserve(len(self._running) + 1, width, wanted, lengths):
                break  # first come, first served: a smaller one behind it waits too, so that none starves
            self._rows.join(request)
            admitted.append(request)
        if admitted:
            with self._wake:
                self._waiting = [r for r in self._waiting if r not in admitted]

    def _retract_all(self) -> None:
        retracted = self._rows.retract_all()
        with self._wake:
            self._waiting = retracted + self._waiting
