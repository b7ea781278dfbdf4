"""Event files read back with TensorBoard's own readers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler
from tensorboard.summary.writer import event_file_writer
from tensorboard.util.tensor_util import make_ndarray

from rl360.loggers.tensorboard import TEXT_CHARS, TensorBoardLogger, flatten


@pytest.fixture(autouse=True)
def _few_files(monkeypatch):
    # A file's name ends in a number that the process counts up, read as text: 10 would come before 9. A run has few.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def started(run_dir: Path, **config) -> TensorBoardLogger:
    logger = TensorBoardLogger()
    logger.start(run_dir, config)
    return logger


def read(run_dir: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def read_as_web(run_dir: Path) -> plugin_event_accumulator.EventAccumulator:
    accumulator = plugin_event_accumulator.EventAccumulator(str(run_dir / "tensorboard"), {"tensors": 0})
    accumulator.Reload()
    return accumulator


def points(run_dir: Path, name: str) -> list[tuple[int, float]]:
    found = [(event.step, event.value) for event in read(run_dir).Scalars(name)]
    # The reader behind the web page has rules of its own for what a resume drops.
    web = [(event.step, make_ndarray(event.tensor_proto).item()) for event in read_as_web(run_dir).Tensors(name)]
    assert repr(web) == repr(found)
    return found


def texts(run_dir: Path, name: str) -> list[tuple[int, str]]:
    # EventAccumulator does not drop the texts that a resume makes again.
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in read_as_web(run_dir).Tensors(name)]


def test_scalars_and_texts_come_back_at_their_iteration(tmp_path):
    logger = started(tmp_path, seed=1)
    for i in range(3):
        logger.log(i, {"reward/success_rate": i / 4, "train/loss": math.nan if i == 1 else 0.5})
        logger.log_text(i, "sample/0", f"answer {i} ü")
    logger.finish({"iterations": 3, "reward_last": 0.5, "exit_reason": "finished", "reward_best": None})
    assert points(tmp_path, "reward/success_rate") == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert math.isnan(points(tmp_path, "train/loss")[1][1])
    assert texts(tmp_path, "sample/0") == [(i, f"answer {i} ü") for i in range(3)]
    assert points(tmp_path, "final/reward_last") == [(3, 0.5)]
    assert "final/reward_best" not in read(tmp_path).Tags()["scalars"]


def test_scalars_have_descriptions_with_units(tmp_path):
    logger = started(tmp_path)
    logger.log(0, {"time/step_s": 1.0, "reward/domain/coding/mean": 0.5, "own/thing": 1.0})
    logger.finish({"iterations": 1})
    metadata = read(tmp_path).SummaryMetadata
    # TensorBoard's fast loader keeps the description of a plain number only when its class is given.
    assert metadata("time/step_s").data_class == DATA_CLASS_SCALAR
    assert metadata("time/step_s").summary_description == "Wall time of the whole iteration [s]"
    assert "this domain" in metadata("reward/domain/coding/mean").summary_description
    assert metadata("own/thing").summary_description == ""


def test_long_texts_are_cut(tmp_path):
    logger = started(tmp_path)
    logger.log_text(0, "sample/0", "x" * (TEXT_CHARS + 5))
    logger.finish({"iterations": 1})
    ((_, text),) = texts(tmp_path, "sample/0")
    assert text == "x" * TEXT_CHARS + f"\n... cut after {TEXT_CHARS} of {TEXT_CHARS + 5} characters"


def crashed_run(run_dir: Path, iterations: int) -> None:
    """Trains 0 .. iterations-1 with an evaluation before each next one; flushed, but never finished."""
    logger = started(run_dir, seed=1)
    for i in range(iterations):
        logger.log(i, {"train/loss": float(i), "time/step_s": 1.0})
        logger.log_text(i, "sample/0", f"old {i}")
        logger.log(i + 1, {"eval/success_rate": i / 10})
    logger._writer.close()


def test_a_resume_shows_no_point_twice(tmp_path):
    crashed_run(tmp_path, 4)
    logger = started(tmp_path, seed=1)
    for i in (2, 3, 4):
        logger.log(i, {"train/loss": 10.0 * i})
        logger.log_text(i, "sample/0", f"new {i}")
        logger.log(i + 1, {"eval/success_rate": 0.9})
    logger.finish({"iterations": 5})
    assert points(tmp_path, "train/loss") == [(0, 0.0), (1, 1.0), (2, 20.0), (3, 30.0), (4, 40.0)]
    # The evaluation at 2 came before the checkpoint at 2 and is not made again.
    evaluations = [(step, round(value, 3)) for step, value in points(tmp_path, "eval/success_rate")]
    assert evaluations == [(1, 0.0), (2, 0.1), (3, 0.9), (4, 0.9), (5, 0.9)]
    assert texts(tmp_path, "sample/0") == [(0, "old 0"), (1, "old 1"), (2, "new 2"), (3, "new 3"), (4, "new 4")]


@pytest.mark.parametrize("iteration", [0, 2])
def test_of_an_iteration_that_is_made_again_only_the_evaluation_stays(tmp_path, iteration):
    """Also of the first one: an evaluation before it is in a checkpoint, and is not made again."""
    logger = started(tmp_path, seed=1)
    logger.log(iteration, {"eval/success_rate": 0.5})
    logger.log(iteration, {"train/loss": 0.25, "rollout/masked/engine_timeout": 3.0})
    logger._writer.close()
    logger = started(tmp_path, seed=1)
    logger.log(iteration, {"train/skipped": 1.0})
    logger.finish({"iterations": iteration + 1})
    assert points(tmp_path, "eval/success_rate") == [(iteration, 0.5)]
    assert points(tmp_path, "train/skipped") == [(iteration, 1.0)]
    assert points(tmp_path, "train/loss") == points(tmp_path, "rollout/masked/engine_timeout") == []


def test_two_crashes_at_the_same_iteration(tmp_path):
    for _ in range(3):
        logger = started(tmp_path, seed=1)
        for i in range(2):
            logger.log(i, {"train/loss": float(i)})
        logger.log(2, {"eval/success_rate": 0.5})
        logger._writer.close()
    logger = started(tmp_path, seed=1)
    logger.log(2, {"train/loss": 2.0})
    logger.finish({"iterations": 3})
    assert points(tmp_path, "train/loss") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert points(tmp_path, "eval/success_rate") == [(2, 0.5)]


def test_a_finished_run_that_goes_on_has_one_final_value(tmp_path):
    for end in (2, 4):
        logger = started(tmp_path, seed=1)
        for i in range(end - 2, end):
            logger.log(i, {"train/loss": float(i)})
        logger.finish({"iterations": end, "reward_last": end / 10})
    ((step, value),) = points(tmp_path, "final/reward_last")
    assert (step, round(value, 3)) == (4, 0.4)
    assert points(tmp_path, "train/loss") == [(i, float(i)) for i in range(4)]


def hparams_view(folder: Path):
    """What the hparams page asks for: the experiment and its session groups."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    backend = Context(TBContext(data_provider=provider))
    context = RequestContext()
    metadata = backend.hparams_metadata(context, "0")
    experiment = backend.experiment_from_metadata(context, "0", True, metadata, [])
    columns = [api_pb2.ColParams(metric=info.name, order=api_pb2.ORDER_UNSPECIFIED) for info in experiment.metric_infos]
    statuses = [api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING, api_pb2.STATUS_UNKNOWN]
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=99, col_params=columns, allowed_statuses=statuses, include_metrics=True
    )
    groups = Handler(context, backend, "0", request).run().session_groups
    return experiment, {group.name: group for group in groups}


def test_points_of_a_sweep_compare_in_the_hparams_view(tmp_path):
    for name, rate in (("low", 1e-5), ("high", 1e-4)):
        logger = started(tmp_path / name, seed=1, trainer={"learning_rate": rate}, algorithm={"reducer": "token_mean"})
        for i in range(2):
            logger.log(i, {"reward/unfiltered_mean": rate * i})
        logger.finish({"iterations": 2, "exit_reason": "finished", "reward_last": rate * 1000})
    experiment, groups = hparams_view(tmp_path)
    assert [info.name for info in experiment.hparam_infos if info.differs] == ["trainer.learning_rate"]
    assert set(groups) == {"low", "high"}
    for name, rate in (("low", 1e-5), ("high", 1e-4)):
        group = groups[name]
        assert group.hparams["trainer.learning_rate"].number_value == rate
        assert group.hparams["algorithm.reducer"].string_value == "token_mean"
        final = {value.name.tag: value.value for value in group.metric_values}
        assert final["final/reward_last"] == pytest.approx(rate * 1000)
        assert [session.status for session in group.sessions] == [api_pb2.STATUS_SUCCESS]


def test_a_resumed_point_is_still_one_session_with_its_final_values(tmp_path):
    crashed_run(tmp_path / "point", 2)
    logger = started(tmp_path / "point", seed=1)
    logger.log(0, {"train/loss": 0.0})  # no checkpoint yet: all is made again
    logger.finish({"iterations": 1, "reward_last": 0.25})
    _, groups = hparams_view(tmp_path)
    (group,) = groups.values()
    assert group.hparams["seed"].number_value == 1
    assert {v.name.tag: v.value for v in group.metric_values}["final/reward_last"] == 0.25


def test_what_counts_as_a_hyperparameter():
    config = {
        "seed": 1,
        "paths": {"models": "/m"},
        "output_dir": "/o",
        "resume": None,
        "logger": {"jsonl": {}},
        "trainer": {"betas": [0.9, 0.98], "on": True, "device": None, "lr": 0.5},
    }
    assert dict(flatten(config)) == {
        "seed": 1,
        "trainer.betas": "[0.9, 0.98]",
        "trainer.on": True,
        "trainer.device": "none",
        "trainer.lr": 0.5,
    }
