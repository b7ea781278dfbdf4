"""Two configs of the gate: what may differ and what may not."""

from __future__ import annotations

import copy

import yaml

from benchmarks.same_setup import differences, main

TORCH = {
    "seed": 0,
    "algorithm": {"clip_low": 0.2},
    "trainer": {"_target_": "Torch", "learning_rate": 2e-5, "betas": [0.9, 0.98], "device": "cuda"},
    "rollout": {"engine": "embedded", "sync": "shared", "temperature": 1.0, "sglang": {"devices": []}},
    "gateway": {"_target_": "Direct"},
    "reward": {},
}
MEGATRON = {
    **TORCH,
    "trainer": {"_target_": "Megatron", "learning_rate": 2e-5, "betas": [0.9, 0.98], "num_gpus": 1},
    "rollout": {"engine": "sglang", "sync": "ipc", "temperature": 1.0, "sglang": {"devices": [0]}},
    "gateway": {"_target_": "Smg", "smg_port": 1},
}


def test_who_computes_may_differ():
    assert differences(TORCH, MEGATRON) == []


def test_everything_else_is_named():
    other = copy.deepcopy(MEGATRON)
    other["trainer"]["betas"] = [0.9, 0.95]
    other["trainer"]["learning_rate"] = 1e-5
    other["rollout"]["top_p"] = 0.9
    other["reward"] = {"format_penalty": {"penalty": 0.3}}
    del other["algorithm"]["clip_low"]
    assert differences(TORCH, other) == [
        "algorithm: (absent) against {}",
        "algorithm.clip_low: 0.2 against (absent)",
        "reward: {} against (absent)",
        "reward.format_penalty.penalty: (absent) against 0.3",
        "rollout.top_p: (absent) against 0.9",
        "trainer.betas: [0.9, 0.98] against [0.9, 0.95]",
        "trainer.learning_rate: 2e-05 against 1e-05",
    ]


def test_exit_codes(tmp_path, capsys):
    files = [tmp_path / name for name in ("torch.yaml", "megatron.yaml", "warm.yaml")]
    warm = {**MEGATRON, "trainer": {**MEGATRON["trainer"], "warmup_steps": 2}}
    for file, config in zip(files, (TORCH, MEGATRON, warm), strict=True):
        file.write_text(yaml.safe_dump(config))
    assert main(str(files[0]), str(files[1])) == 0
    assert main(str(files[0]), str(files[2])) == 1
    assert "trainer.warmup_steps: (absent) against 2" in capsys.readouterr().err
