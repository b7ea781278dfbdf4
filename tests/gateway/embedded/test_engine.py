"""The engine against transformers and against a fresh forward; joining, leaving, sharing, stopping, versions."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from rl360.errors import ConfigError
from rl360.gateway.embedded.engine import PREFILL_TOKENS_PER_STEP
from rl360.models.decoder import causal_attend
from rl360.models.loading import load_decoder, save_hf

from .conftest import EOS, Run

MARGIN = 1e-4  # where the two likeliest tokens are closer, rounding may choose


def random_prompt(seed, size):
    return np.random.default_rng(seed).integers(0, 256, size).tolist()


@torch.no_grad()
def fresh_logits(engine, ids):
    ids = torch.tensor(ids)
    return engine.decoder.logits(engine.decoder.hidden(ids, torch.arange(len(ids)), causal_attend()))


def assert_greedy(engine, request):
    """Each token is the likeliest one of a fresh forward, or within the margin of it."""
    ids = request.tokens[: request.length].tolist()
    rows = fresh_logits(engine, ids)[request.prompt_tokens - 1 : -1]
    for row, token in zip(rows, request.output_ids, strict=True):
        assert row.max() - row[token] < MARGIN


def test_greedy_equals_transformers(make_engine, tiny_folder):
    from transformers import AutoModelForCausalLM

    engine = make_engine()
    prompts = [random_prompt(seed, 3 + 11 * seed) for seed in range(6)]
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    requests = Run(engine).all(prompts, temperature=0, max_new_tokens=20, ignore_eos=False)
    for prompt, request in zip(prompts, requests, strict=True):
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=EOS, pad_token_id=EOS
        )
        assert request.output_ids == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_fresh_forward(make_engine, temperature):
    engine = make_engine()
    prompts = [random_prompt(seed, size) for seed, size in enumerate((1, 2, 40, 300, 41, 7))]
    for request in Run(engine).all(prompts, temperature=temperature, max_new_tokens=25):
        rows = fresh_logits(engine, request.tokens[: request.length].tolist())[request.prompt_tokens - 1 : -1]
        expected = torch.log_softmax(rows / temperature, -1).gather(1, torch.tensor(request.output_ids)[:, None])
        torch.testing.assert_close(torch.tensor(request.logprobs), expected[:, 0], atol=1e-4, rtol=0)


def test_requests_join_and_leave_midway(make_engine):
    engine = make_engine(max_running_requests=5)
    run = Run(engine)
    requests = []
    generator = np.random.default_rng(0)
    for number in range(24):
        requests.append(
            run.submit(
                random_prompt(number % 9, int(generator.integers(1, 90))),
                temperature=0,
                max_new_tokens=int(generator.integers(1, 30)),
            )
        )
        if number % 3 == 0:
            time.sleep(0.004)
    for request in requests:
        run.wait(request)
        assert len(request.output_ids) == request.params.max_new_tokens
        assert_greedy(engine, request)
    assert engine.state()["num_running_reqs"] == 0


def test_order_of_the_batch_does_not_change_greedy_output(make_engine):
    engine = make_engine()
    prompts = [random_prompt(seed, 5 + 13 * seed) for seed in range(8)]
    forward = Run(engine).all(prompts, temperature=0, max_new_tokens=15)
    engine.flush()
    backward = Run(engine).all(prompts[::-1], temperature=0, max_new_tokens=15)[::-1]
    for first, second in zip(forward, backward, strict=True):
        assert first.output_ids == second.output_ids
        assert_greedy(engine, first)


def test_a_group_shares_one_prefill(make_engine):
    engine = make_engine()
    prompt = random_prompt(1, 60)
    requests = Run(engine).all([prompt] * 8, temperature=1.0, max_new_tokens=6)
    assert engine.prefilled_tokens == 60
    assert sorted(r.cached_tokens for r in requests) == [0] + [59] * 7
    assert len({tuple(r.output_ids) for r in requests}) > 1  # without seeds, every member has its own
    for request in requests:
        rows = fresh_logits(engine, request.tokens[: request.length].tolist())[request.prompt_tokens - 1 : -1]
        expected = torch.log_softmax(rows, -1).gather(1, torch.tensor(request.output_ids)[:, None])
        torch.testing.assert_close(torch.tensor(request.logprobs), expected[:, 0], atol=1e-4, rtol=0)


def test_long_prompts_go_in_pieces_while_others_decode(make_engine):
    engine = make_engine()
    run = Run(engine)
    tokens_seen = []
    short = run.submit([1, 2, 3], temperature=0, max_new_tokens=200, on_token=lambda: tokens_seen.append(engine.steps))
    while not tokens_seen:
        time.sleep(0.001)
    long = run.submit(random_prompt(3, 3 * PREFILL_TOKENS_PER_STEP + 17), temperature=0, max_new_tokens=5)
    assert_greedy(engine, run.wait(long))
    assert_greedy(engine, run.wait(short))
    assert max(np.diff(tokens_seen)) == 1  # a token in every step


def test_next_turn_reuses_the_session(make_engine):
    engine = make_engine()
    run = Run(engine)
    first = run.one(random_prompt(1, 50), temperature=0, max_new_tokens=20)
    history = first.tokens[: first.length].tolist()
    second = run.one([*history, 9, 8, 7], temperature=0, max_new_tokens=10)
    assert second.cached_tokens == 69  # all but the last sampled token, which was never fed back
    assert engine.prefilled_tokens == 50 + 4
    assert_greedy(engine, second)
    third = run.one([*history[:30], 1, 2], temperature=0)
    assert third.cached_tokens == 30
    assert_greedy(engine, third)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_seeds_give_the_same_tokens_in_any_company(make_engine, temperature):
    prompt = random_prompt(2, 20)
    alone = Run(make_engine()).one(prompt, temperature=temperature, sampling_seed=77, max_new_tokens=20)
    engine = make_engine(seed=6)
    run = Run(engine)
    with engine.drain():
        others = [run.submit(random_prompt(s, 30), max_new_tokens=9) for s in range(3)]
        same = run.submit(prompt, temperature=temperature, sampling_seed=77, max_new_tokens=20)
        other_seed = run.submit(prompt, temperature=temperature, sampling_seed=78, max_new_tokens=20)
    for request in (*others, same, other_seed):
        run.wait(request)
    assert same.output_ids == alone.output_ids
    assert other_seed.output_ids != alone.output_ids
    # A request that goes on from partial ids continues the same stream of draws.
    resumed = run.one([*prompt, *alone.output_ids[:8]], temperature=temperature, sampling_seed=77, max_new_tokens=12)
    assert resumed.output_ids == alone.output_ids[8:]


def test_stop_tokens_and_end_of_text(make_engine):
    run = Run(make_engine())
    prompt = random_prompt(4, 10)
    free = run.one(prompt, temperature=0, max_new_tokens=12)
    stop = free.output_ids[5]
    at = free.output_ids.index(stop)
    stopped = run.one(prompt, temperature=0, max_new_tokens=12, stop_token_ids=[stop], ignore_eos=False)
    assert stopped.output_ids == free.output_ids[: at + 1]
    assert stopped.finish_reason == {"type": "stop", "matched": stop}
    ignored = run.one(prompt, temperature=0, max_new_tokens=12, stop_token_ids=[stop])
    assert ignored.output_ids == free.output_ids
    assert ignored.finish_reason == {"type": "length", "length": 12}
    later = run.one(
        prompt, temperature=0, max_new_tokens=12, stop_token_ids=[stop], ignore_eos=False, min_new_tokens=at + 3
    )
    assert stop not in later.output_ids[: at + 3]
    exact = run.one(prompt, temperature=0, max_new_tokens=at + 1, stop_token_ids=[stop], ignore_eos=False)
    assert exact.finish_reason["type"] == "stop"


def test_stop_strings_across_tokens_stay_in_the_ids(make_engine):
    engine = make_engine()
    run = Run(engine)
    prompt = random_prompt(6, 10)
    free = run.one(prompt, temperature=1.0, sampling_seed=4, max_new_tokens=40)
    texts = [engine.tokenizer.decode(free.output_ids[:n], skip_special_tokens=False) for n in range(41)]
    clean = next(i for i in range(5, 38) if all(0x20 < ord(c) < 0x7F for c in texts[i + 2][-3:]))
    stop = texts[clean + 2][-3:]  # three bytes, three tokens
    expected = next(n for n in range(41) if stop in texts[n])
    stopped = run.one(prompt, temperature=1.0, sampling_seed=4, max_new_tokens=40, stop=["never this", stop])
    assert stopped.output_ids == free.output_ids[:expected]
    assert stopped.finish_reason == {"type": "stop", "matched": stop}
    reply = stopped.reply(0, engine.tokenizer, True)
    assert reply["text"] == engine.tokenizer.decode(stopped.output_ids).partition(stop)[0]
    import re

    pattern = re.escape(stop[:2]) + r"\S"
    by_pattern = run.one(prompt, temperature=1.0, sampling_seed=4, max_new_tokens=40, stop_regex=pattern)
    assert by_pattern.finish_reason == {"type": "stop", "matched": pattern}
    assert re.search(pattern, engine.tokenizer.decode(by_pattern.output_ids, skip_special_tokens=False))


def test_abort_keeps_what_there_is(make_engine):
    engine = make_engine()
    run = Run(engine)
    going = threading.Event()
    long = run.submit(random_prompt(1, 10), max_new_tokens=1000 - 10, rid="long", on_token=going.set)
    other = run.submit(random_prompt(2, 10), max_new_tokens=50, temperature=0, rid="long-2")
    assert going.wait(10)
    assert engine.abort("long") == 1
    run.wait(long)
    assert long.finish_reason["type"] == "abort"
    assert 0 < len(long.output_ids) == len(long.logprobs) < 990
    run.wait(other)
    assert other.finish_reason["type"] == "length"
    assert_greedy(engine, other)
    assert engine.abort("unknown") == 0


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_modes(make_engine, mode):
    engine = make_engine()
    run = Run(engine)
    going = threading.Event()
    request = run.submit(random_prompt(1, 10), max_new_tokens=60, temperature=0, on_token=going.set)
    assert going.wait(10)
    engine.pause(mode)
    steps = engine.steps
    queued = run.submit(random_prompt(2, 10), temperature=0)
    time.sleep(0.02)
    assert engine.steps == steps
    assert engine.flush() is (mode == "abort")  # what was retracted still waits; what came later does not count
    assert engine.alive
    engine.resume()
    run.wait(request)
    run.wait(queued)
    assert len(queued.output_ids) == 8
    assert_greedy(engine, queued)
    assert_greedy(engine, request)
    if mode == "abort":
        assert request.finish_reason["type"] == "abort"
    else:
        assert len(request.output_ids) == 60
        assert request.retractions == (mode == "retract")


def test_new_version_flushes_and_running_requests_go_on_under_it(make_engine):
    engine = make_engine(version=3)
    run = Run(engine)
    prompt = random_prompt(1, 40)
    going = threading.Event()
    request = run.submit(prompt, max_new_tokens=200, temperature=0, on_token=going.set)
    assert going.wait(10)
    with engine.drain():
        before = len(request.output_ids)
        with torch.no_grad():
            for parameter in engine.decoder.parameters():
                parameter.mul_(1.02)
        engine.set_version(4)
    run.wait(request)
    assert request.version_spans() == [
        {"version": 3, "start": 0, "end": before},
        {"version": 4, "start": before, "end": 200},
    ]
    rows = fresh_logits(engine, request.tokens[: request.length].tolist())[39:-1]
    for row, token in list(zip(rows, request.output_ids, strict=True))[before:]:
        assert row.max() - row[token] < MARGIN
    again = run.one(prompt, temperature=0)
    assert again.reply(engine.version, None, False)["meta_info"]["weight_version"] == "4"
    assert_greedy(engine, again)
    engine.set_version(5)
    assert run.one(prompt, temperature=0).cached_tokens == 0


def test_no_forward_runs_while_drained(make_engine):
    engine = make_engine()
    run = Run(engine)
    requests = [run.submit(random_prompt(s, 10), max_new_tokens=300) for s in range(3)]
    for _ in range(5):
        with engine.drain():
            steps = engine.steps
            time.sleep(0.005)
            assert engine.steps == steps
    for request in requests:
        run.wait(request)


def test_loaded_weights_are_the_ones_that_decode(make_engine, tiny_folder, tmp_path):
    engine = make_engine()
    other = load_decoder(tiny_folder, random_init_seed=9)
    folder = save_hf(other, tmp_path / "other", source=tiny_folder)
    engine.load_weights(folder, 7)
    assert engine.version == 7
    request = Run(engine).one(random_prompt(1, 20), temperature=0)
    expected = make_engine(folder=folder)
    assert request.output_ids == Run(expected).one(random_prompt(1, 20), temperature=0).output_ids


def test_cache_is_bounded_queues_and_evicts(make_engine):
    # 2 layers, 2 key/value heads of 8, fp32: 256 bytes a token; 640 tokens in all.
    engine = make_engine(kv_cache_gib=640 * 256 / 2**30, max_running_requests=16)
    assert engine.state()["max_total_num_tokens"] == 640
    run = Run(engine)
    most = 0

    def watch():
        nonlocal most
        most = max(most, engine.state()["kv_used_tokens"])

    requests = [run.submit(random_prompt(s, 100), max_new_tokens=27, temperature=0, on_token=watch) for s in range(12)]
    for request in requests:
        assert_greedy(engine, run.wait(request))
    assert 0 < most <= 640
    big = run.one(random_prompt(50, 600), temperature=0, max_new_tokens=40)
    assert_greedy(engine, big)
    assert engine.state()["kv_evictions"] > 0
    clipped = run.one(random_prompt(50, 600), temperature=0, max_new_tokens=500)
    assert clipped.finish_reason == {"type": "length", "length": 40}
    with pytest.raises(ValueError, match="longer than the model's context"):
        run.submit(random_prompt(1, 640))
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        make_engine(kv_cache_gib=1e-6)


def test_deterministic_runs_are_equal_bit_for_bit(make_engine):
    prompts = [random_prompt(s % 3, 30 + s % 3) for s in range(9)]
    engine = make_engine(deterministic=True)
    runs = []
    for order in (1, -1):
        run = Run(engine)
        requests = [run.submit(p, sampling_seed=i, max_new_tokens=12) for i, p in list(enumerate(prompts))[::order]]
        for request in requests:
            run.wait(request)
        runs.append({r.params.sampling_seed: (r.output_ids, r.logprobs, r.cached_tokens) for r in requests})
    assert runs[0] == runs[1]
    assert {cached for _, _, cached in runs[0].values()} == {0}


def test_failing_step_aborts_instead_of_hanging_and_the_engine_lives(make_engine, monkeypatch):
    engine = make_engine()
    run = Run(engine)
    real = engine.decoder.hidden

    def fail(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.decoder, "hidden", fail)
    request = run.one(random_prompt(1, 10))
    assert request.finish_reason["type"] == "abort"
    assert "out of memory" in request.finish_reason["message"]
    monkeypatch.setattr(engine.decoder, "hidden", real)
    assert_greedy(engine, run.one(random_prompt(1, 10), temperature=0))


def test_bad_requests_are_refused_at_once(make_engine):
    run = Run(make_engine())
    for ids, message in (([], "non-empty"), ([-1], "input_ids must be in"), ([260], "input_ids must be in")):
        with pytest.raises(ValueError, match=message):
            run.submit(ids)
    assert run.one([1], max_new_tokens=0).finish_reason == {"type": "length", "length": 0}


def test_trainer_can_differentiate_after_the_engine_ran(make_engine):
    engine = make_engine()
    Run(engine).one(random_prompt(1, 10))
    hidden = engine.decoder.hidden(torch.tensor([1, 2, 3]), torch.arange(3), causal_attend(), checkpoint=True)
    engine.decoder.logits(hidden).sum().backward()
    assert all(parameter.grad is not None for parameter in engine.decoder.parameters())
