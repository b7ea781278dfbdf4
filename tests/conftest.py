"""Fixtures and skips that every folder of tests shares.

A test states what it needs with a marker (sandbox, model, docker, slurm, gpu) and is skipped, with the reason, on a
machine that lacks it. RL360_TEST_REQUIRE="model,sandbox" turns such a skip into a failure: CI sets it, so that a
broken set-up cannot pass as a green run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

# Before anything imports Harbor or LiteLLM: no telemetry, and no look at the internet for a price list.
os.environ["HARBOR_TELEMETRY"] = "0"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
# Two OpenMP threads on a shared box can slow each other down a hundredfold; tests are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
from hypothesis.internal.conjecture import providers

from rl360.models.fetch import default_models_dir, folder_problems
from tests.tiny_model import write_tiny_llama

# The same examples in every run: a red test is a change's doing. HYPOTHESIS_PROFILE=default searches anew.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.load_profile(profile := os.environ.get("HYPOTHESIS_PROFILE", "same"))
if profile == "same":
    # Else they hold numbers out of whichever of our modules are loaded by then, which the order of tests decides.
    assert callable(providers.is_local_module_file)
    providers.is_local_module_file = lambda path: False

REQUIRE_ENV = "RL360_TEST_REQUIRE"
SMOLLM2 = "smollm2_135m"


@cache
def _lacks_sandbox() -> str | None:
    if shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed; make setup says how"
    probe = ["bwrap", "--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"bubblewrap cannot make namespaces here: {done.stderr.strip()}"


@cache
def _lacks_model() -> str | None:
    problems = folder_problems(default_models_dir() / SMOLLM2)
    return f"{problems[0]}; make setup prepares it" if problems else None


@cache
def _lacks_docker() -> str | None:
    if shutil.which("docker") is None:
        return "no docker client"
    done = subprocess.run(["docker", "info"], capture_output=True, check=False)
    return None if done.returncode == 0 else "no Docker daemon answers"


@cache
def _lacks_slurm() -> str | None:
    if shutil.which("sinfo") is None:
        return "no Slurm client"
    done = subprocess.run(["sinfo", "--noheader"], capture_output=True, check=False)
    return None if done.returncode == 0 else "no Slurm controller answers"


def _lacks_gpu() -> str | None:
    return None if Path("/dev/nvidia0").exists() else "no CUDA device"


_NEEDS: dict[str, Callable[[], str | None]] = {
    "sandbox": _lacks_sandbox,
    "model": _lacks_model,
    "docker": _lacks_docker,
    "slurm": _lacks_slurm,
    "gpu": _lacks_gpu,
}


def _required() -> set[str]:
    return {name.strip() for name in os.environ.get(REQUIRE_ENV, "").split(",") if name.strip()}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, lacks in _NEEDS.items():
        if item.get_closest_marker(marker) and (reason := lacks()):
            if marker in _required():
                pytest.fail(f"{REQUIRE_ENV} names {marker}: {reason}", pytrace=False)
            pytest.skip(reason)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The prepared SmolLM2-135M-Instruct checkpoint. Tests that use it carry the marker `model`."""
    if reason := _lacks_model():
        pytest.skip(reason)
    return default_models_dir() / SMOLLM2


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 2 layers, a small tokenizer and a ChatML template: tests/tiny_model.py. Read only."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))
