"""The command line as a user meets it: what is printed, exit codes, what is left on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl360 import cli
from tests.tiny_model import write_tiny_llama

STUB_SITE = Path(__file__).parent / "launchers" / "stub_site"


@pytest.fixture
def arguments(tmp_path, monkeypatch) -> list[str]:
    """Overrides with which everything is found, run by a launcher that runs nothing, from an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(STUB_SITE))
    return [
        "experiment=quickstart",
        f"model.path={write_tiny_llama(tmp_path / 'model')}",
        "model.expect=null",
        f"paths.outputs={tmp_path / 'out'}",
        f"paths.cache={tmp_path / 'cache'}",
        "cluster._target_=stub_launcher.StubLauncher",
        "allow_targets=[stub_launcher]",
    ]


@pytest.fixture
def said(capsys) -> Callable[..., tuple[int, str, str]]:
    """Call the command; returns exit code, stdout, stderr. A traceback is a failure wherever it is."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


def runs(tmp_path: Path) -> list[Path]:
    return sorted(path.parent for path in (tmp_path / "out").rglob("resolved.yaml"))


def test_bare_help_and_version(said):
    for bare in ((), ("--help",), ("-h",)):
        code, out, _ = said(*bare)
        assert code == 0
        for name in cli.COMMANDS:
            assert f"rl360 {name}" in out
    assert said("--version")[1].startswith("rl360 0.")


def test_an_unknown_command_suggests_the_near_one(said):
    code, _, err = said("chek", "experiment=quickstart")
    assert (code, err) == (2, "rl360 chek: unknown command; did you mean check?\n")


@pytest.mark.sandbox
def test_check_prints_the_plan_and_leaves_nothing(said, arguments, tmp_path):
    code, out, err = said("check", *arguments)
    assert (code, err) == (0, "")
    assert "4 to train on, 4 to evaluate on, all valid" in out
    assert "4 tasks x 8 attempts = 32 an iteration" in out
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "here").iterdir()) == []


def test_check_reports_all_problems_and_exits_1(said, arguments):
    code, out, err = said(
        "check", *arguments, "algorithm.clip_hihg=1", "group_size=1", "trainer=torhc", "iterations=x", "seed=1,2"
    )
    assert (code, out) == (1, "")
    for line in (
        "algorithm.clip_hihg: unknown key for grpo; did you mean clip_high?",
        "group_size: 1 leaves nothing to compare",
        "trainer=torhc: no such option; did you mean torch?",
        "iterations: 'x' is text; expected a whole number",
        "seed=1,2: several values for one run; add -m",
    ):
        assert line in err
    assert "5 problems; nothing was started" in err


def test_run_reports_the_same_and_starts_nothing(said, arguments, tmp_path):
    code, _, err = said("run", *arguments, "algorithm.clip_hihg=1", "modle=tiny")
    assert code == 1
    assert "did you mean clip_high?" in err
    assert "modle: unknown key; did you mean model?" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.sandbox
def test_run_saves_before_it_starts_and_litters_nothing(said, arguments, tmp_path):
    code, _, _ = said("run", *arguments, "seed=3")
    assert code == 0
    (folder,) = runs(tmp_path)
    assert folder.parent == tmp_path / "out" / "quickstart"
    assert sorted(p.name for p in folder.iterdir()) == [
        ".lock",
        "plan.json",
        "resolved.yaml",
        "summary.json",
    ]
    resolved = OmegaConf.load(folder / "resolved.yaml")
    assert (resolved.seed, resolved.output_dir) == (3, str(folder))
    assert "${" not in (folder / "resolved.yaml").read_text()
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["run_dir"] == str(folder)
    assert len(plan["task_hashes"]["tasks"]) == 4
    assert json.loads((folder / "summary.json").read_text())["in_process"] is True
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.sandbox
def test_the_launchers_exit_code_is_ours(said, arguments, monkeypatch):
    monkeypatch.setenv("RL360_STUB_EXIT", "7")
    assert said("run", *arguments)[0] == 7


@pytest.mark.sandbox
def test_resume_goes_on_in_the_same_folder(said, arguments, tmp_path):
    folder = tmp_path / "out" / "mine"
    assert said("run", *arguments, f"output_dir={folder}")[0] == 0
    code, _, err = said("run", *arguments, f"output_dir={folder}")
    assert (code, f"continue it with resume={folder}" in err) == (1, True)
    code, _, err = said("run", f"resume={folder}")
    assert (code, "give more, such as iterations=20" in err) == (1, True)
    code, _, err = said("run", f"resume={folder}", "iterations=20", "seed=9")
    assert (code, "seed: 9 (seed=9) differs from 0" in err) == (1, True)
    assert said("check", f"resume={folder}", "iterations=20")[0] == 0
    assert OmegaConf.load(folder / "resolved.yaml").iterations == 10
    assert said("run", f"resume={folder}", "iterations=20")[0] == 0
    resolved = OmegaConf.load(folder / "resolved.yaml")
    assert (resolved.iterations, resolved.resume, resolved.output_dir) == (20, str(folder), str(folder))
    assert runs(tmp_path) == [folder]
    assert said("run", "-m", f"resume={folder}", "iterations=20,30")[0] == 1


def test_resume_from_nowhere(said, tmp_path):
    code, _, err = said("run", f"resume={tmp_path}")
    assert code == 1
    assert err.startswith(f"resume: no resolved.yaml in {tmp_path}")
    assert "1 problem; nothing was started" in err


@pytest.mark.sandbox
def test_multirun_gives_each_point_its_own_folder_and_a_table(said, arguments, tmp_path):
    code, out, err = said("run", "-m", *arguments, "trainer.learning_rate=1e-5,5e-5", "seed=0,1")
    assert code == 0, err
    folders = runs(tmp_path)
    assert len(folders) == 4
    (study,) = {folder.parent for folder in folders}
    assert study.parent == tmp_path / "out" / "quickstart"
    points = {(r.trainer.learning_rate, r.seed) for r in (OmegaConf.load(f / "resolved.yaml") for f in folders)}
    assert points == {(1e-5, 0), (1e-5, 1), (5e-5, 0), (5e-5, 1)}
    assert all(json.loads((f / "summary.json").read_text())["in_process"] is False for f in folders)
    assert "point 4 of 4" in out
    assert {folder.name for folder in folders} == {
        f"{number}-trainer.learning_rate={rate},seed={seed}"
        for number, (rate, seed) in enumerate([("1e-05", 0), ("1e-05", 1), ("5e-05", 0), ("5e-05", 1)])
    }  # and nothing of what is the same at every point, by which no two could be told apart
    assert out.splitlines()[0].startswith("point 1 of 4: trainer.learning_rate=1e-05 seed=0")
    table = out[out.index("success first") :].splitlines()
    assert "0.500" in table[1]  # the best first
    assert "0.100" in table[4]
    assert f"tensorboard --logdir {study}" in out
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.sandbox
def test_sweep_is_the_study_file(said, arguments, tmp_path):
    code, out, err = said("sweep", "learning_rate", *arguments[1:], "iterations=2")
    assert code == 0, err
    folders = runs(tmp_path)
    assert len(folders) == 3
    assert {folder.parent.parent for folder in folders} == {tmp_path / "out" / "learning_rate"}
    assert {OmegaConf.load(folder / "resolved.yaml").trainer.learning_rate for folder in folders} == {5e-6, 2e-5, 5e-5}
    assert "point 3 of 3" in out


@pytest.mark.sandbox
def test_a_primary_config_of_ones_own_is_one_run(said, arguments, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "ours.yaml").write_text("defaults:\n  - run\n  - _self_\nname: ours\n")
    own = ("--config-dir", str(site), "--config-name", "ours")
    code, _, err = said("run", *own, *arguments[1:], "seed=4")
    assert code == 0, err
    (folder,) = runs(tmp_path)
    assert folder.parent == tmp_path / "out" / "ours"
    assert OmegaConf.load(folder / "resolved.yaml").seed == 4


def test_a_bad_point_is_named_before_any_point_starts(said, arguments, tmp_path):
    code, _, err = said("run", "-m", *arguments, "group_size=8,1", "algorithm.clip_hihg=1")
    assert code == 1
    assert "group_size=1" in err
    assert err.count("clip_hihg: unknown key") == 1  # true of every point: said once
    assert not (tmp_path / "out").exists()


def test_a_sweep_composes_what_the_check_composes(said, arguments, tmp_path):
    """Hydra is stricter: a new key under kwargs was fine for `check`, and no point of the run composed."""
    overrides = ("iterations=3", "trainer.learning_rate=1e-3", "sandbox.kwargs.artifacts_mib=1,3")
    assert said("check", "-m", *arguments, *overrides)[0] == 0
    code, _, err = said("run", "-m", *arguments, *overrides)
    assert code == 0, err
    assert [folder.name for folder in runs(tmp_path)] == [
        "0-sandbox.kwargs.artifacts_mib=1",
        "1-sandbox.kwargs.artifacts_mib=3",
    ]
    kept = [OmegaConf.load(folder / "resolved.yaml").sandbox.kwargs.artifacts_mib for folder in runs(tmp_path)]
    assert kept == [1, 3]


def test_a_studys_new_key_has_a_plus(said, arguments, tmp_path):
    for key, expected in (("sandbox.kwargs.artifacts_mib", 1), ("+sandbox.kwargs.artifacts_mib", 0)):
        study = {"sweeper": {"params": {key: "1,3"}}, "mode": "MULTIRUN"}
        written = {"defaults": ["run", "_self_"], "hydra": study}
        OmegaConf.save(OmegaConf.create(written), tmp_path / "study.yaml")
        code, _, err = said("check", "--config-dir", str(tmp_path), "--config-name", "study", *arguments)
        assert code == expected, err
        assert ("expected +sandbox.kwargs.artifacts_mib" in err) == bool(expected)


def test_a_multirun_has_no_folder_of_one_run(said, arguments, tmp_path):
    for command in ("run", "check"):
        code, _, err = said(command, "-m", *arguments, "seed=0,1", f"output_dir={tmp_path / 'one'}")
        assert (code, "output_dir: one folder for the points of a multirun" in err) == (1, True)
        code, _, err = said(command, "-m", *arguments, f"resume={tmp_path}")
        assert (code, "resume: continues one run; leave out -m" in err) == (1, True)


def test_a_sweeps_folder_is_its_own(said, arguments, tmp_path):
    """The second would have gone on in the first's runs, with its own settings."""
    assert said("run", "-m", *arguments, "seed=0,1")[0] == 0
    (sweep,) = {folder.parent for folder in runs(tmp_path)}
    assert sweep.name.startswith("sweep-")
    assert len(sweep.name.split("-")) == 4  # date, time, and what keeps two sweeps of one second apart
    before = [(folder / "resolved.yaml").read_text() for folder in runs(tmp_path)]
    code, _, err = said("run", "-m", *arguments, "iterations=20", "seed=0,1", f"hydra.sweep.dir={sweep}")
    assert (code, err.count("already holds a run")) == (1, 2)
    assert [(folder / "resolved.yaml").read_text() for folder in runs(tmp_path)] == before


def test_a_sweeps_folder_that_cannot_be_made_is_said(said, arguments, tmp_path):
    (tmp_path / "file").write_text("")
    for command in ("run", "check"):
        code, _, err = said(command, "-m", *arguments, "seed=0,1", f"hydra.sweep.dir={tmp_path / 'file' / 'sweep'}")
        assert (code, f"hydra.sweep.dir: {tmp_path / 'file'} is a file" in err) == (1, True)


def test_sweep_lists_studies_and_suggests(said):
    assert "learning_rate" in said("sweep", "--help")[1]
    code, _, err = said("sweep", "learning_rat")
    assert (code, "did you mean learning_rate?" in err) == (1, True)


def test_cfg_job_prints_and_checks_keys(said):
    code, out, _ = said("run", "experiment=quickstart", "--cfg", "job")
    assert code == 0
    assert "learning_rate: 2.0e-05" in out
    code, out, _ = said("sweep", "learning_rate", "--cfg", "job")
    assert (code, "name: learning_rate" in out) == (0, True)
    code, out, err = said("run", "algorithm.clip_hihg=1", "--cfg", "job")
    assert (code, "did you mean clip_high?" in err) == (1, True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--experiment=quickstart", "keys are written without dashes: experiment=quickstart"),
        ("--trainer.learning_rate=1", "keys are written without dashes: trainer.learning_rate=1"),
        ("--multi", "no such flag"),
        ("--experimental-rerun=x", "--experimental-rerun: not supported"),
        ("--config-path=conf", "--config-path: not supported"),
    ],
)
def test_a_flag_that_is_none_starts_nothing(said, monkeypatch, given, expected):
    """argparse takes `--experiment` for the beginning of Hydra's --experimental-rerun, and would run the default."""
    monkeypatch.setattr(cli, "_start", lambda *_, **__: pytest.fail("a run was started"))
    code, _, err = said("run", given)
    assert (code, expected in err) == (1, True), err
    code, _, err = said("check", "seed=1", "-m", "iterations=2,3")
    assert (code, "iterations=2,3: stands behind a flag" in err) == (1, True)


@pytest.mark.parametrize("command", ["run", "check"])
def test_help_shows_the_groups(said, command):
    code, out, _ = said(command, "--help")
    assert code == 0
    assert "experiment: " in out
    assert "quickstart" in out
    assert "algorithm: grpo" in out


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("rl360 ", " ".join(cli.COMMANDS)),
        ("rl360 ch", "check"),
        ("rl360 run algorithm.clip_", "algorithm.clip_high= algorithm.clip_low="),
        ("rl360 check experiment=quick", "experiment=quickstart"),
        ("rl360 doctor ", ""),
    ],
)
def test_completion_knows_commands_and_keys(said, monkeypatch, line, completions):
    monkeypatch.setenv("COMP_LINE", line)
    code, out, _ = said("-sc", "query=bash")
    assert (code, out.strip()) == (0, completions)


def test_completion_can_be_installed_for_the_installed_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/venv/bin/rl360", "run"])
    assert cli.main(["run", "-sc", "install=bash"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("-F hydra_bash_completion rl360")


@pytest.mark.parametrize(
    ("given", "folder", "source"),
    [
        (["smollm2_135m"], "smollm2_135m", None),
        (["lab/small-1b"], "small-1b", "lab/small-1b"),  # a hub id is its own source
        (["lab/small-1b", "--source", "copies/small"], "small-1b", "copies/small"),
    ],
)
def test_model_fetch_takes_a_short_name_or_a_hub_id(said, monkeypatch, tmp_path, given, folder, source):
    asked = []
    monkeypatch.setenv("RL360_MODELS", str(tmp_path))
    monkeypatch.setattr("rl360.models.fetch.fetch", lambda name, path, source, **_: asked.append((name, path, source)))
    assert said("model", "fetch", *given)[0] == 0
    assert asked == [(given[0], tmp_path / folder, source)]


def test_tasks_hands_over(said):
    code, out, _ = said("tasks", "list", "small_coding")
    assert code == 0
    assert "62 tasks in " in out
    assert said("tasks", "list", "/nowhere")[0] == 1
    assert said("tasks", "lsit")[0] == 2


def test_a_config_name_that_is_none_is_the_only_problem(said):
    for command in ("run", "check"):
        code, _, err = said(command, "--config-name", "foo")
        assert code == 1
        assert err.splitlines()[0].startswith("--config-name foo: no such file in ")
        assert "1 problem; nothing was started" in err
    assert "an experiment is chosen with experiment=quickstart" in said("run", "--config-name", "quickstart")[2]


@pytest.mark.parametrize("command", ["run", "tasks"])
def test_a_sigterm_before_anything_handles_it_is_said(command):
    program = (
        "import sys, time; from rl360 import cli\n"
        f"cli.COMMANDS[{command!r}] = lambda arguments: (print('here', flush=True), time.sleep(60))\n"
        f"sys.exit(cli.main([{command!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, f"rl360 {command}: stopped by SIGTERM\n")


def test_a_sigterm_while_a_run_is_built_says_how_to_go_on(said, arguments, tmp_path, monkeypatch):
    def build(config, resolved):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)

    monkeypatch.setattr("rl360.engine.run.run_experiment", build)
    code, _, err = said("run", *[a for a in arguments if "cluster" not in a and "allow_targets" not in a])
    (folder,) = runs(tmp_path)
    assert code == 130
    assert f"interrupted: SIGTERM; continue with: rl360 run resume={folder}" in err


def test_check_is_quick_and_a_user_error_has_no_traceback(tmp_path):
    """A process of its own: what a user waits for. The bound is 3 s warm on an idle machine; ours is wide."""
    command = [sys.executable, "-m", "rl360.cli", "check", "experiment=quickstart", "seed=x"]
    environment = {**os.environ, "RL360_MODELS": str(tmp_path)}
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert time.monotonic() - began < 20
    assert done.returncode == 1
    assert "seed: 'x' is text" in done.stderr
    assert "rl360 model fetch smollm2_135m" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    """`rl360 tasks list | true`: quiet, with the exit code of other tools."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rl360.cli", "tasks", "list"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, cwd=tmp_path)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (cli.EXIT_NO_READER, "")
