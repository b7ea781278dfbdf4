from pathlib import Path

import pytest

from rl360.config.compose import Request, compose, compose_points, governed_keys
from rl360.config.locate import conf_folder
from rl360.errors import ConfigError


def test_groups_then_own_numbers_then_experiment_then_command_line():
    plain = compose(Request())
    assert (plain.values["trainer"]["learning_rate"], plain.values["rollout"]["max_new_tokens"]) == (5e-6, 256)
    quick = compose(Request(("experiment=quickstart", "rollout.max_new_tokens=8")))
    assert quick.problems == ()
    assert (quick.values["trainer"]["learning_rate"], quick.values["rollout"]["max_new_tokens"]) == (2e-5, 8)
    assert quick.values["name"] == "quickstart"
    assert quick.choices["tasks"] == "quickstart"


def test_sets_are_changed_by_name_and_chosen_as_a_list():
    composed = compose(Request(("reward.format_penalty.penalty=0.1", "logger=[jsonl]")))
    assert composed.problems == ()
    assert composed.values["reward"]["format_penalty"]["penalty"] == 0.1
    assert list(composed.values["reward"]) == ["verifier", "format_penalty"]
    assert list(composed.values["logger"]) == ["jsonl"]
    assert list(compose(Request(("reward=[verifier]",))).values["reward"]) == ["verifier"]


def test_paths_are_absolute_and_nothing_is_left_to_interpolate(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    values = compose(Request()).values
    assert values["paths"]["outputs"] == str(tmp_path / "outputs")
    assert "${" not in str(values)
    assert "hydra" not in values


def test_all_that_hydra_would_stop_on_comes_at_once():
    problems = compose(
        Request(
            (
                "model=tinny",
                "experiment=quikstart",
                "reward=[verifer,format_penalty]",
                "foo/bar=baz",
                "seed=1,2",
                "a,b",
                "~nothing",
                "tasks.path=${nowhere:x}",
                "iterations=3",
            )
        )
    ).problems
    assert len(problems) == 8
    for text in (
        "model=tinny: no such option; did you mean tiny?",
        "experiment=quikstart: no such option; did you mean quickstart?",
        "reward=verifer: no such option; did you mean verifier?",
        "foo/bar: no such group",
        "seed=1,2: several values for one run; add -m",
        "a,b: cannot be read as key=value",
        "~nothing: Could not delete",
        "tasks.path: Unsupported interpolation type nowhere",
    ):
        assert any(problem.startswith(text) for problem in problems), text


def test_unknown_keys_reach_the_values_whatever_their_prefix():
    composed = compose(Request(("algorithm.clip_hihg=1", "+stepz=1", "++trainer.lr=2")))
    assert composed.problems == ()
    assert composed.values["stepz"] == 1
    assert (composed.values["algorithm"]["clip_hihg"], composed.values["trainer"]["lr"]) == (1, 2)


def test_a_secret_is_never_resolved(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "very-secret")
    composed = compose(Request(("+logger.jsonl.api_key=${oc.env:MY_TOKEN}", "+agent.kwargs.token=${oc.env:MY_TOKEN}")))
    named = sorted(problem.split(":")[0] for problem in composed.problems)
    assert named == ["agent.kwargs.token", "logger.jsonl.api_key"]
    assert "very-secret" not in str(composed)


def test_a_sites_own_groups_join_ours(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "ours.yaml").write_text("# @package _global_\nname: ours\niterations: 3\n")
    composed = compose(Request((f"hydra.searchpath=[file://{tmp_path}]", "experiment=ours")))
    assert composed.problems == ()
    assert composed.values["iterations"] == 3
    also = compose(Request(("experiment=ours",), config_dir=tmp_path))
    assert also.values["name"] == "ours"


def test_a_broken_file_names_the_file_and_the_option(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text("# @package _global_\ndefaults:\n  - override /model: smolm2\n")
    problems = compose(Request(("experiment=bad",), config_dir=tmp_path)).problems
    assert len(problems) == 1
    assert "experiment=bad" in problems[0]
    assert "smolm2" in problems[0]
    (tmp_path / "experiment" / "bad.yaml").write_text("a: [1\n")
    assert len(compose(Request(("experiment=bad",), config_dir=tmp_path)).problems) == 1


@pytest.mark.parametrize("first_line", ["", "# a comment\n# @package _global_\n"])
def test_an_experiment_without_its_package_line_is_told_so(tmp_path, first_line):
    """Hydra reads the line only at the very top, and then looks for groups below `experiment`."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "ours.yaml").write_text(first_line + "defaults:\n  - override /tasks: quickstart\n")
    (problem,) = compose(Request(("experiment=ours",), config_dir=tmp_path)).problems
    assert problem.endswith("from inside its own group; expected `# @package _global_` as its very first line")


def test_an_unknown_primary_config_and_folder(tmp_path):
    (tmp_path / "study.yaml").write_text("defaults:\n  - run\n  - _self_\n")
    problems = compose(Request(config_name="studdy", config_dir=tmp_path)).problems
    assert problems == (f"--config-name studdy: no such file in {conf_folder()}:{tmp_path}; did you mean study?",)
    (problem,) = compose(Request(config_name="quickstart")).problems
    assert problem.endswith(f"no such file in {conf_folder()}; an experiment is chosen with experiment=quickstart")
    with pytest.raises(ConfigError, match="no folder"):
        compose(Request(config_dir=Path("/nowhere/at/all")))


def test_points_are_the_grid_of_file_and_command_line():
    sweeps = conf_folder().parent / "sweeps"
    points = compose_points(Request(("seed=0,1",), "learning_rate", sweeps, multirun=True))
    assert [(p.values["trainer"]["learning_rate"], p.values["seed"]) for p in points] == [
        (rate, seed) for rate in (5e-6, 2e-5, 5e-5) for seed in (0, 1)
    ]
    assert all(p.problems == () and p.values["name"] == "learning_rate" for p in points)
    assert points[0].values["iterations"] == 10  # from the experiment that the study names


def test_governed_keys_say_what_an_override_sets():
    request = Request(("iterations=3", "logger=[jsonl]", "experiment=quickstart", "+trainer.lr=1"))
    assert list(governed_keys(request).values()) == ["iterations", "logger", "", "trainer.lr"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hydra.searchpath=[file:///no/such/folder]", "hydra.searchpath: no folder file:///no/such/folder from "),
        ("hydra.searchpath=file:///tmp", "hydra.searchpath: 'file:///tmp' is no list; expected 'hydra.searchpath=["),
        ("hydra.job.chdir=true", "hydra.job.chdir: true would look for relative paths"),
    ],
)
def test_hydras_own_keys_that_would_mislead(given, expected):
    (problem,) = compose(Request((given, "experiment=quickstart"))).problems
    assert problem.startswith(expected)


def test_paths_do_not_depend_on_where_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    given = ("model.path=m", "output_dir=o", "tasks.path='~/pool'", "paths.cache=../c", "sandbox.base=roots/a")
    composed = compose(Request(given))
    assert composed.problems == ()
    found = composed.values
    assert found["model"]["path"] == str(tmp_path / "m")
    assert found["output_dir"] == str(tmp_path / "o")
    assert found["tasks"]["path"] == "/home/somebody/pool"
    assert found["paths"]["cache"] == f"{tmp_path}/../c"
    assert found["sandbox"]["base"] == str(tmp_path / "roots" / "a")
    untouched = compose(Request(())).values
    assert (untouched["model"]["path"], untouched["sandbox"]["base"]) == (None, "auto")


def test_a_glob_runs_every_option_that_it_fits():
    """It was a traceback: an override parsed by itself does not know which options there are."""
    points = compose_points(Request(("algorithm=glob(grpo*)", "seed=1"), multirun=True))
    assert [point.choices["algorithm"] for point in points] == ["grpo", "grpo_async", "grpo_std"]
    assert all(point.problems == () for point in points)
