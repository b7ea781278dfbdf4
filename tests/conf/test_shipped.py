"""Every shipped option composes, fits the schemas and its constructor; every experiment and study loads and checks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rl360.config.check import examine, load
from rl360.config.compose import Request, compose, compose_points
from rl360.config.locate import conf_folder, sweeps_folder
from rl360.config.schemas import ComposedConfig
from tests.tiny_model import write_tiny_llama

SETS = ("reward", "logger")  # several options at once
# What an option cannot know: where the servers of `external` are, and that the model speaks in tool calls.
NEEDED = {
    "rollout=external": ("rollout.engine_urls=[http://127.0.0.1:30000]",),
    "reward=[format_penalty]": ("reward=[verifier,format_penalty]",),  # it is taken from what the verifier gave
    "agent=bash": ("model.tool_parser=hermes",),
    "trainer=megatron": ("rollout=external", "rollout.engine_urls=[http://127.0.0.1:30000]"),
}

OPTIONS = sorted((path.parent.name, path.stem) for path in conf_folder().glob("*/*.yaml"))
EXPERIMENTS = [name for group, name in OPTIONS if group == "experiment"]
STUDIES = sorted(path.stem for path in sweeps_folder().glob("*.yaml"))


@pytest.mark.parametrize(("group", "name"), OPTIONS, ids=[f"{group}-{name}" for group, name in OPTIONS])
def test_every_option_loads(group, name):
    override = f"{group}=[{name}]" if group in SETS else f"{group}={name}"
    composed = compose(Request((override, *NEEDED.get(override, ()))))
    assert composed.problems == ()
    assert load(composed.values, composed.choices).problems == ()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_checks(name, tmp_path):
    model = write_tiny_llama(tmp_path / "model")
    places = (f"model.path={model}", f"paths.outputs={tmp_path}", f"paths.cache={tmp_path}")
    here = ("model.expect=null", "sandbox.import_path=rl360.sandboxes.local.environment:LocalSandbox")
    examined = examine(compose(Request((f"experiment={name}", *places, *here))))
    problems = [p for p in examined.problems if not p.startswith("sandbox: ")]  # this machine's, not the file's
    assert problems == []
    assert examined.values["name"] == name


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_loads(name):
    points = compose_points(Request((), name, sweeps_folder(), multirun=True))
    assert len(points) > 1
    for point in points:
        assert point.problems == ()
        assert load(point.values, point.choices).problems == ()
        assert point.values["name"] == name


@pytest.mark.parametrize("path", sorted(conf_folder().rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_opens_with_what_it_is(path: Path):
    first = next(line for line in path.read_text().splitlines() if "@package" not in line)
    assert first.startswith("# "), path


def test_every_group_is_a_section_of_the_schema():
    groups = {group for group, _ in OPTIONS} - {"experiment"}
    assert groups <= set(ComposedConfig.__dataclass_fields__)


def test_the_experiment_comes_last_so_that_its_numbers_win():
    defaults = yaml.safe_load((conf_folder() / "run.yaml").read_text())["defaults"]
    composed = [
        entry for entry in defaults if not (isinstance(entry, dict) and next(iter(entry)).startswith("override"))
    ]
    assert composed[0] == "schema"
    assert composed[-2:] == ["_self_", {"experiment": None}]


def test_the_quickstart_is_what_the_readme_says():
    values = compose(Request(("experiment=quickstart",))).values
    assert (values["tasks_per_iteration"], values["group_size"], values["iterations"]) == (4, 8, 10)
    assert values["model"]["name"] == "smollm2_135m"
    assert values["trainer"]["learning_rate"] == 2e-5
    assert values["trainer"]["betas"] == [0.9, 0.98]
    assert values["rollout"]["temperature"] == 1.0
    assert values["rollout"]["stop_at_code_block"] is True


def test_grpo_is_the_reference_recipe():
    values = compose(Request()).values
    algorithm = values["algorithm"]
    assert (algorithm["clip_low"], algorithm["clip_high"], algorithm["kl_coef"]) == (0.2, 0.28, 0.0)
    assert (algorithm["normalize_std"], algorithm["reducer"]) == (False, "token_mean")
    assert algorithm["importance_cap"] is not None
    assert (values["trainer"]["learning_rate"], values["trainer"]["weight_decay"]) == (5e-6, 0.1)
    assert values["reward"]["format_penalty"]["penalty"] == 0.3
    assert values["checkpoint"]["every"] == 10
