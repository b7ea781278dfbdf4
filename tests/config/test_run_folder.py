import json
import re

from omegaconf import OmegaConf

from rl360.config.run_folder import new_run_dir, save


def test_a_run_folder_is_named_by_time_and_an_id(tmp_path):
    folders = {new_run_dir(str(tmp_path), "quickstart") for _ in range(20)}
    assert len(folders) > 1
    for folder in folders:
        assert folder.parent == tmp_path / "quickstart"
        assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", folder.name)
        assert not folder.exists()


def test_both_files_are_there_and_an_earlier_config_is_kept(tmp_path):
    run = tmp_path / "a" / "run"
    save(run, {"seed": 1, "trainer": {"betas": [0.9, 0.98]}}, {"name": "x"})
    assert OmegaConf.to_container(OmegaConf.load(run / "resolved.yaml")) == {
        "seed": 1,
        "trainer": {"betas": [0.9, 0.98]},
    }
    assert json.loads((run / "plan.json").read_text()) == {"name": "x"}
    save(run, {"seed": 1, "trainer": {"betas": [0.9, 0.98]}}, {"name": "x"})
    assert sorted(p.name for p in run.iterdir()) == ["plan.json", "resolved.yaml"]
    save(run, {"seed": 2}, {"name": "x"})
    save(run, {"seed": 3}, {"name": "x"})
    kept = [OmegaConf.load(run / name).seed for name in ("resolved.0.yaml", "resolved.1.yaml", "resolved.yaml")]
    assert kept == [1, 2, 3]
