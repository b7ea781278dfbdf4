"""trainer=megatron beside other options: keys of its own, what it asks of the rest, and none of it imports Megatron."""

from __future__ import annotations

import copy
import inspect
import socket
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from rl360.config.check import load
from rl360.config.combinations import combination_problems
from rl360.config.compose import Request, compose, from_config
from rl360.config.megatron import megatron_machine_problems
from rl360.config.resume import resumed
from rl360.config.schemas import SCHEMAS, MegatronTrainerConfig, TorchTrainerConfig, schema_of

ENGINES = ("rollout=external", "rollout.engine_urls=[http://127.0.0.1:30000]")


def composed(*overrides: str) -> dict:
    found = compose(Request(overrides))
    assert found.problems == ()
    return copy.deepcopy(dict(found.values))


def problems_of(*overrides: str) -> tuple[str, ...]:
    found = compose(Request(overrides))
    return (*found.problems, *load(found.values, found.choices).problems)


def test_the_option_brings_its_keys_and_no_others():
    values = composed("trainer=megatron", "trainer.tensor_parallel_size=2", *ENGINES)
    assert set(values["trainer"]) == set(MegatronTrainerConfig.__dataclass_fields__)
    assert set(composed()["trainer"]) == set(TorchTrainerConfig.__dataclass_fields__)
    config, problems = load(values)
    assert problems == ()
    assert isinstance(config.trainer, MegatronTrainerConfig)
    assert (config.trainer.tensor_parallel_size, config.trainer.num_gpus) == (2, 8)
    assert isinstance(load(composed()).config.trainer, TorchTrainerConfig)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ("trainer=megatron", "trainer.tensor_paralel_size=2", *ENGINES),
            "trainer.tensor_paralel_size: unknown key for megatron; did you mean tensor_parallel_size?",
        ),
        (
            ("trainer=megatron", "trainer.share_prompts=true", *ENGINES),
            "trainer.share_prompts: unknown key for megatron; it belongs to trainer=torch",
        ),
        (
            ("trainer=torch", "trainer.context_parallel_size=2"),
            "trainer.context_parallel_size: unknown key for torch; it belongs to trainer=megatron",
        ),
        (
            ("trainer.context_paralel_size=2",),
            "trainer.context_paralel_size: unknown key for torch; did you mean context_parallel_size? (of "
            "trainer=megatron)",
        ),
        (("trainer.num_thread=2",), "trainer.num_thread: unknown key for torch; did you mean num_threads?"),
        (
            ("trainer=megatron", "trainer.recompute=ful", *ENGINES),
            "trainer.recompute: 'ful' is none of none, core_attn, full; did you mean full?",
        ),
        (
            ("trainer=megatron", "trainer.num_gpus=many", *ENGINES),
            "trainer.num_gpus: 'many' is text; expected a whole number",
        ),
        (
            ("trainer=megatron", "trainer.rank_target=rl360.trainers.megatron.rank:MegatronRnk", *ENGINES),
            "trainer.rank_target: no class MegatronRnk in rl360.trainers.megatron.rank; did you mean MegatronRank?",
        ),
        (
            ("trainer=megatron", "trainer.rank_target=os:system", *ENGINES),
            "trainer.rank_target: os:system is not allowed; expected rl360. or launchers., or add its module to "
            "allow_targets",
        ),
    ],
)
def test_a_wrong_key_is_named_with_where_it_belongs(overrides, text):
    assert problems_of(*overrides) == (text,)


def test_the_trainers_constructor_takes_exactly_these_keys_with_their_defaults():
    from rl360.trainers.megatron.trainer import MegatronTrainer

    parameters = inspect.signature(MegatronTrainer).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    own |= {"betas": list(own["betas"]), "learning_rate": MegatronTrainerConfig.learning_rate}
    assert own == {key: value for key, value in vars(MegatronTrainerConfig()).items() if key != "_target_"}


def test_resolved_yaml_loads_to_the_same_config():
    first = composed("trainer=megatron", "trainer.context_parallel_size=4", *ENGINES)
    saved = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(first)))
    assert load(saved).config == load(first).config


def test_hydra_itself_composes_it_too():
    """What `rl360 run -m` does: Hydra's own composition, typed."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from rl360.config.compose import register_schema
    from rl360.config.locate import conf_folder
    from rl360.config.resolvers import register_resolvers

    register_resolvers()
    register_schema()
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        for option, schema in SCHEMAS["trainer"].items():
            found = from_config(hydra_compose("run", [f"trainer={option}"]), {})
            assert set(found.values["trainer"]) == set(schema.__dataclass_fields__)


def test_a_trainer_of_ones_own_has_the_keys_of_the_first_option(tmp_path, monkeypatch):
    (tmp_path / "lab_trainers.py").write_text(
        "from rl360.trainers.torch_trainer import TorchTrainer\n"
        "class Mine(TorchTrainer):\n    def __init__(self, **kwargs): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    values = composed("allow_targets=[lab_trainers]")
    values["trainer"] = {"_target_": "lab_trainers.Mine", "num_threads": 2}
    config, problems = load(values)
    assert problems == ()
    assert (config.trainer.num_threads, config.trainer.gradient_checkpointing) == (2, False)
    assert schema_of("trainer", "lab_trainers.Mine") is TorchTrainerConfig


def test_a_resume_may_split_the_work_otherwise(tmp_path):
    values = composed("trainer=megatron", *ENGINES)
    OmegaConf.save(OmegaConf.create({**values, "output_dir": str(tmp_path)}), tmp_path / "resolved.yaml")
    split = ("trainer.num_gpus=16", "trainer.tensor_parallel_size=4", "trainer.recompute=full")
    split += ("trainer.overlap_grad_reduce=true",)
    found = resumed(Request((f"resume={tmp_path}", *split)), tmp_path)
    assert found.problems == ()
    trainer = load(found.values).config.trainer
    assert (trainer.num_gpus, trainer.tensor_parallel_size, trainer.recompute) == (16, 4, "full")
    changed = resumed(Request((f"resume={tmp_path}", "trainer.weight_decay=0.0")), tmp_path).problems
    assert len(changed) == 1
    assert changed[0].startswith("trainer.weight_decay: 0.0 (trainer.weight_decay=0.0) differs from 0.1")
    other = resumed(Request((f"resume={tmp_path}", "trainer=torch")), tmp_path).problems
    assert any(problem.startswith("trainer._target_:") for problem in other)


@pytest.fixture
def megatron(typed):
    """A config with trainer=megatron and no problem, with dotted keys changed."""

    def make(**changes):
        engines = {"rollout.engine": "external", "rollout.sync": "disk", "rollout.engine_urls": ["http://h:1"]}
        own = {key.removeprefix("trainer."): value for key, value in changes.items() if key.startswith("trainer.")}
        rest = {key: value for key, value in changes.items() if not key.startswith("trainer.")}
        config = typed(**{**engines, **rest})
        config.trainer = MegatronTrainerConfig(**{"num_gpus": 8, **own})
        return config

    return make


ON_THE_TRAINERS_GPU = {"rollout.sglang.devices": [0], "rollout.sglang.mem_fraction_static": 0.3}


def test_a_server_with_a_share_of_the_memory_may_be_on_a_trainers_gpu(megatron):
    engines = {"rollout.engine": "sglang", "rollout.engine_urls": [], "rollout.sync": "ipc"}
    assert combination_problems(megatron(**engines, **ON_THE_TRAINERS_GPU)) == []


def test_the_defaults_have_no_problem(megatron):
    assert combination_problems(megatron()) == []
    assert (
        combination_problems(megatron(**{"trainer.tensor_parallel_size": 2, "trainer.context_parallel_size": 4})) == []
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"rollout.engine": "embedded", "rollout.sync": "shared", "rollout.engine_urls": []},
            "rollout.engine: embedded shares the weights of one process, and trainer=megatron spreads them over 8",
        ),
        (
            {"rollout.engine": "sglang", "rollout.engine_urls": [], "rollout.sglang.devices": [0]},
            "rollout.sglang.devices: GPU 0 of the servers would be the trainer's too (trainer.num_gpus 8); expected "
            "others, such as [8]",
        ),
        (
            {"rollout.engine": "sglang", "rollout.engine_urls": [], "rollout.sync": "nccl", **ON_THE_TRAINERS_GPU},
            "rollout.sglang.devices: GPU 0 of the servers would be the trainer's too (trainer.num_gpus 8); expected ",
        ),
        ({"trainer.tensor_parallel_size": 3}, "trainer.num_gpus: 8 is no multiple of tensor 3"),
        ({"trainer.tensor_parallel_size": 0}, "trainer.tensor_parallel_size: 0; expected at least 1"),
        ({"trainer.num_gpus": 0}, "trainer.num_gpus: 0; expected at least 1"),
        ({"trainer.virtual_pipeline_parallel_size": 2}, "trainer.virtual_pipeline_parallel_size: 2 with pipeline"),
        (
            {"trainer.tensor_parallel_size": 4, "trainer.context_parallel_size": 2, "trainer.max_tokens_per_gpu": 7},
            "trainer.max_tokens_per_gpu: 7; a GPU's part of a micro-batch is padded to a multiple of 8 tokens",
        ),
        ({"trainer.init_method": "127.0.0.1:1"}, "trainer.init_method: '127.0.0.1:1'; expected tcp://host:port"),
        ({"trainer.init_method": "tcp://h:99999"}, "trainer.init_method: 'tcp://h:99999'; expected tcp://host:port"),
        ({"trainer.init_method": "tcp://h"}, "trainer.init_method: 'tcp://h'; expected tcp://host:port"),
        ({"trainer.step_timeout_s": 1000.0}, "trainer.step_timeout_s: 1000 s is not less than cluster.no_progress_s"),
        ({"trainer.start_timeout_s": 2000.0}, "trainer.start_timeout_s: 2000 s is not less than cluster.no_progress_s"),
    ],
)
def test_each_rule(megatron, changes, text):
    problems = combination_problems(megatron(**changes))
    assert len(problems) == 1
    assert problems[0].startswith(text)


def test_ranks_meet_on_this_machine(megatron):
    """Elsewhere they waited for trainer.start_timeout_s, with the GPUs."""
    assert not list(megatron_machine_problems(megatron()))
    foreign = megatron(**{"trainer.init_method": "tcp://192.0.2.1:29500"})  # RFC 5737: nobody's address
    (problem,) = megatron_machine_problems(foreign)
    assert problem.startswith("trainer.init_method: tcp://192.0.2.1:29500 is no free place of this machine")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        there = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert len(list(megatron_machine_problems(megatron(**{"trainer.init_method": there})))) == 1
    elsewhere = {"trainer.init_method": "tcp://192.0.2.1:29500", "cluster._target_": "launchers.other.Launcher"}
    assert not list(megatron_machine_problems(megatron(**elsewhere)))


def test_a_missing_transformer_engine_is_named_where_the_ranks_would_run(megatron, monkeypatch):
    found = {}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found.get(name))
    here = megatron(**{"trainer.transformer_engine": True})
    (problem,) = megatron_machine_problems(here)
    assert problem.startswith("trainer.transformer_engine: true, and Transformer Engine is not installed; try pip ")
    elsewhere = {"trainer.transformer_engine": True, "cluster._target_": "launchers.other.Launcher"}
    assert list(megatron_machine_problems(megatron(**elsewhere))) == []
    assert list(megatron_machine_problems(megatron())) == []
    found["transformer_engine"] = object()
    assert list(megatron_machine_problems(here)) == []


def test_checking_it_imports_neither_torch_nor_megatron():
    overrides = [
        "model=k2_horizon_7b",
        "trainer=megatron",
        "trainer.num_gpus=64",
        "trainer.tensor_parallel_size=2",
        "trainer.context_parallel_size=4",
        *ENGINES,
    ]
    code = (
        "import sys\n"
        "from rl360.cli import main\n"
        f"main(['check', *{overrides!r}])\n"
        "heavy = {'torch', 'megatron', 'transformers', 'sglang', 'harbor'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "64 GPUs: tensor 2 with sequence, context 4, pipeline 1, data 8" in done.stdout
    assert "4,499,738,624" in done.stdout
