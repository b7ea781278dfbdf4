from pathlib import Path

import pytest

from rl360.config.locate import bundled_tasks, conf_folder, shipped_folder, sweeps_folder
from rl360.errors import ConfigError


def _package(tmp_path: Path) -> Path:
    package = tmp_path / "site-packages" / "rl360"
    package.mkdir(parents=True)
    return package


def _conf(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text("a: 1\n")
    return folder


def test_a_wheel_has_it_inside_the_package(tmp_path):
    package = _package(tmp_path)
    inside = _conf(package / "conf")
    assert shipped_folder("conf", "run.yaml", package) == inside


def test_a_checkout_has_it_beside_the_package(tmp_path):
    package = _package(tmp_path)
    beside = _conf(package.parent / "conf")
    assert shipped_folder("conf", "run.yaml", package) == beside


def test_inside_wins_and_an_unrelated_conf_beside_is_not_ours(tmp_path):
    package = _package(tmp_path)
    (package.parent / "conf").mkdir()
    with pytest.raises(ConfigError, match="reinstall rl360"):
        shipped_folder("conf", "run.yaml", package)
    _conf(package / "conf")
    (package.parent / "conf" / "run.yaml").write_text("b: 2\n")
    assert shipped_folder("conf", "run.yaml", package) == package / "conf"


def test_this_installation_has_all_of_them():
    assert (conf_folder() / "run.yaml").is_file()
    assert (sweeps_folder() / "learning_rate.yaml").is_file()
    assert (bundled_tasks("small_coding") / "harbor_records.jsonl").is_file()
    assert bundled_tasks("small_coding/quickstart.jsonl").is_file()


def test_an_unknown_pool_or_manifest_lists_what_there_is():
    with pytest.raises(ConfigError, match=r"there are: .*small_coding"):
        bundled_tasks("small_codding")
    with pytest.raises(ConfigError, match=r"there are: .*quickstart\.jsonl"):
        bundled_tasks("small_coding/nothing.jsonl")
