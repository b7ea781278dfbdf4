from pathlib import Path

from omegaconf import OmegaConf

from rl360.config.resolvers import absolute, register_resolvers


def test_each_resolver_gives_an_absolute_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL360_MODELS", str(tmp_path / "zoo"))
    register_resolvers()
    config = OmegaConf.create(
        {
            "bundled": "${rl360_bundled:small_coding}",
            "path": "${rl360_path:outputs}",
            "absolute": "${rl360_path:/a/b}",
            "models": "${rl360_models:}",
        }
    )
    assert (Path(config.bundled) / "harbor_records.jsonl").is_file()
    assert config.path == str(tmp_path / "outputs")
    assert absolute("~/x") == str(Path.home() / "x")
    assert config.absolute == "/a/b"
    assert config.models == str(tmp_path / "zoo")
