"""The benchmark of attention backends: its numbers by hand, what it makes of bad servers, all of it on a tiny model."""

import argparse
import json
import math
import sys

import numpy as np
import pytest
import torch

from benchmarks import mismatch
from benchmarks.mismatch import BadAnswer, Samples, Variant, compare, errors_in, server_flags, table, take, to_variant
from rl360.serving.command import launches
from tests.tiny_model import write_tiny_llama

SERVER = """
import sys
if "fa3" in sys.argv:
    raise ImportError("no such kernel on this machine")
from rl360.gateway.embedded.serve import main
sys.exit(main())
"""


def test_variants():
    assert to_variant("torch_native") == Variant("torch_native", "torch_native", False)
    assert to_variant("fa3+deterministic") == Variant("fa3+deterministic", "fa3", True)
    for wrong in ("fa3+fast", "+deterministic", "fa3+", "fa3+deterministic+deterministic"):
        with pytest.raises(argparse.ArgumentTypeError, match="BACKEND"):
            to_variant(wrong)


def test_a_variants_flags(tmp_path):
    asked = argparse.Namespace(model=tmp_path, context_length=512, dtype="bfloat16")
    asked.command, asked.extra = "python -m server", "--mem-fraction-static 0.9"

    def command(name):
        (launch,) = launches(server_flags(asked, to_variant(name)), [(1, 2)], [])
        return " ".join(launch.command)

    plain, other, native = command("fa4"), command("fa4+deterministic"), command("torch_native")
    assert plain.startswith("python -m server ")
    assert plain.endswith("--mem-fraction-static 0.9")
    for flag in ("--attention-backend fa4 ", "--enable-fp32-lm-head ", "--enable-tf32-matmul "):
        assert flag in plain
    assert other == plain + " --enable-deterministic-inference"
    assert "--disable-decode-cuda-graph" in native
    assert "--disable-decode-cuda-graph" not in plain


def test_a_row_by_hand():
    """Two attempts of two tokens; the trainer finds one of them ln 2 likelier and one ln 2 less likely."""
    behaviour_AT = np.log([[0.25, 0.5], [0.5, 0.5]])
    trainer_AT = np.log([[0.5, 0.5], [0.25, 0.5]])
    row = compare("fa3", "trainer", behaviour_AT, trainer_AT)
    assert (row["behaviour"], row["proximal"]) == ("fa3", "trainer")
    assert row["logprob_diff_mean"] == pytest.approx(math.log(2) / 2, rel=1e-5)
    assert row["logprob_diff_max"] == pytest.approx(math.log(2), rel=1e-5)
    assert row["ratio_max"] == pytest.approx(2.0)
    # exp(d) - 1 - d: 1 - ln 2 and ln 2 - 1/2, so 1/2 over four tokens.
    assert row["kl"] == pytest.approx(0.125)
    # An attempt's mean is (1 - ln 2) / 2 or (ln 2 - 1/2) / 2; of two values the standard error is half their distance.
    assert row["kl_se"] == pytest.approx((1.5 - 2 * math.log(2)) / 4, rel=1e-5)
    assert row["logprob_diff_mean_se"] == 0.0
    assert list(row["by_position"]) == ["0-64"]
    assert row["by_position"]["0-64"] == {
        name: row[name] for name in ("logprob_diff_mean", "ratio_max", "kl")
    } | {"share": 1.0}  # fmt: skip


def test_places_are_those_in_the_answer():
    behaviour_AT = np.full((1, 65), -1.0)
    trainer_AT = behaviour_AT.copy()
    trainer_AT[0, 64] = -1.5
    row = compare("fa3", "trainer", behaviour_AT, trainer_AT)
    assert row["by_position"]["0-64"]["logprob_diff_mean"] == 0.0
    assert row["by_position"]["64-256"] == {
        "share": pytest.approx(1 / 65, rel=1e-5),
        "logprob_diff_mean": pytest.approx(0.5),
        "ratio_max": pytest.approx(math.exp(-0.5), rel=1e-5),
        "kl": pytest.approx(math.exp(-0.5) - 0.5, rel=1e-5),
    }
    assert "kl_se" not in row  # of one attempt


def test_the_table():
    row = compare("fa3", "trainer", np.log([[0.5], [0.5]]), np.log([[0.25], [0.5]]))
    failed = {"behaviour": "fa4", "error": "ImportError: a | b\nc"}
    trainer = {**row, "behaviour": "trainer", "proximal": "reference"}
    assert table([row, failed, trainer], {"fa3": {"tokens_per_s": 1234.5}}).splitlines() == [
        "| sampled by | computed by | mean difference | largest | largest ratio | KL | 0-64 | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
        "| fa3 | trainer | 0.347 ± 0.3 | 0.693 | 1 | 0.0966 ± 0.1 | 0.347 | 1234 |",
        "| fa4 |  | ImportError: a / b c |  |  |  |  |  |",
        "| trainer | reference | 0.347 ± 0.3 | 0.693 | 1 | 0.0966 ± 0.1 | 0.347 |  |",
    ]


def reply(ids, pairs):
    return json.dumps({"output_ids": ids, "meta_info": {"output_token_logprobs": pairs}}).encode()


def test_an_answer_is_taken_whole_or_not_at_all():
    assert take(reply([7, 9], [[-0.5, 7, None], [-1.5, 9, None]]), 2) == ([7, 9], [-0.5, -1.5])
    for wrong in (
        b"<html>",
        b"[]",
        b"{}",
        reply([7], [[-0.5, 7, None]]),
        reply([7, 9], [[-0.5, 7, None], [-1.5, 8, None]]),
        reply([7, 9], [[-0.5, 7, None], [None, 9, None]]),
        reply([7, 9], [[-0.5, 7, None], [float("nan"), 9, None]]),
    ):
        with pytest.raises(BadAnswer):
            take(wrong, 2)


def test_errors_of_a_log():
    log = (
        "--- 2026-01-01 python -m server --error-level Error\n"
        "[12:00] starts\n"
        "Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n'
        "torch.AcceleratorError: CUDA error\n"
        "FAILED: kernel.o\n"
        "kernel.cu:1:10: fatal error: cute/tensor.hpp: No such file or directory\n"
        "  ImportError: no kernel\n"
        "torch.AcceleratorError: CUDA error\n"
        "[12:01] bye\n"
    )
    assert errors_in(log) == [
        "torch.AcceleratorError: CUDA error",
        "fatal error: cute/tensor.hpp: No such file or directory",
        "ImportError: no kernel",
    ]
    assert errors_in("--- the command\na\nb\n\nc\nd\ne\n") == ["b", "c", "d", "e"]
    assert errors_in("") == []


def test_logprobs_come_back_at_their_attempt_and_place(tmp_path):
    """Prompts of different lengths, which packing puts into another order, shared or not."""
    model = write_tiny_llama(tmp_path / "tiny")
    prompts = [(5, 6, 7), tuple(range(3, 20)), (5, 6, 7), (9, 8)]
    draw = np.random.default_rng(0)
    samples = Samples(draw.integers(3, 60, (4, 5)).astype(np.int32), np.full((4, 5), -1.0), 1.0, 1.0)
    sequences = mismatch.to_sequences(prompts, samples)
    looks = mismatch.make_looks(model, torch.device("cpu"), torch.float32)
    assert list(looks) == ["trainer", "reference"]
    decoder = mismatch.load_decoder(model)
    expected_AT = np.empty((4, 5))
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([*prompt, *samples.ids_AT[number].tolist()])
        with torch.no_grad():
            hidden = decoder.hidden(ids, torch.arange(ids.numel()), mismatch.causal_attend())
            logp = decoder.logits(hidden).log_softmax(dim=-1)
        places = torch.arange(len(prompt), ids.numel())
        expected_AT[number] = logp[places - 1, ids[places]].numpy()
    for look in looks.values():
        np.testing.assert_allclose(look(sequences), expected_AT, atol=2e-5)


def test_a_kernel_gets_the_bounds_of_each_sequence(monkeypatch):
    def dense(q, k, v, bounds_q, bounds_k, longest_q, longest_k, kernel):
        assert bounds_q.dtype == torch.int32
        assert (bounds_q.tolist(), bounds_k.tolist()) == ([0, 3, 8, 10], [0, 3, 8, 10])
        assert (longest_q, longest_k, kernel) == (5, 5, "torch")
        return mismatch.causal_attend([3, 5, 2])(0, q, k, v)

    monkeypatch.setattr(mismatch, "attend_varlen", dense)
    trees = [mismatch.Tree(0, (3, 5)), mismatch.Tree(0, (2,))]
    q, k, v = torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    out = mismatch._varlen(torch.device("cpu"), "torch", trees)(0, q, k, v)
    torch.testing.assert_close(out, mismatch._plain(trees)(0, q, k, v))


def test_a_kernel_that_fails_does_not_take_the_others_along():
    def broken(sequences):
        raise RuntimeError("no image for this device")

    ones_AT = np.full((2, 3), -1.0)
    looks = {"trainer fa4": broken, "trainer torch": lambda sequences: ones_AT}
    seen, rows = {name: [] for name in looks}, []
    samples = Samples(np.zeros((2, 3), np.int32), ones_AT, 1.0, 1.0)
    for name in ("fa3", "fa4"):
        mismatch._look_with_all(to_variant(name), samples, [], looks, seen, rows)
    assert rows[0] == {"behaviour": "fa3", "proximal": "trainer fa4", "error": "RuntimeError: no image for this device"}
    assert [(row["behaviour"], row["proximal"]) for row in rows[1:]] == [
        ("fa3", "trainer torch"),
        ("fa4", "trainer torch"),
    ]
    assert list(looks) == list(seen) == ["trainer torch"]
    assert len(seen["trainer torch"]) == 2


def test_a_server_that_works_and_one_that_does_not(tmp_path, monkeypatch, capsys):
    (tmp_path / "server.py").write_text(SERVER)
    model = write_tiny_llama(tmp_path / "tiny")
    arguments = [
        "--model",
        model,
        "--variants",
        "fa3",
        "triton",
        "--at-once",
        2,
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    arguments += [
        "--command",
        f"{sys.executable} {tmp_path / 'server.py'}",
        "--extra",
        "--threads 1 --kv-cache-gib 0.1",
    ]
    arguments += ["--attempts", 4, "--tokens", 70, "--logs", tmp_path / "logs", "--out", tmp_path / "out.json"]
    monkeypatch.setattr(sys, "argv", ["mismatch.py", *map(str, arguments)])
    monkeypatch.setattr(mismatch, "end_on_sigterm", lambda: None)
    assert mismatch.main() == 0
    found = json.loads((tmp_path / "out.json").read_text())
    failed, *rows = found["rows"]
    assert failed["behaviour"] == "fa3"
    assert failed["error"].endswith("; ImportError: no such kernel on this machine")
    compared = [(row["behaviour"], row["proximal"]) for row in rows]
    assert compared == [("triton", "trainer"), ("triton", "reference"), ("trainer", "reference")]
    for row in rows:
        assert row["kl"] < 1e-6
        assert 0.0 < row["logprob_diff_max"] < 1e-3
        assert list(row["by_position"]) == ["0-64", "64-256"]
    assert found["servers"]["triton"]["tokens_per_s"] > 0.0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4
