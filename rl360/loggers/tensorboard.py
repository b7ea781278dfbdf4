"""TensorBoard event files, written with TensorBoard's own writer: no torch, no TensorFlow.

In: scalars, sample texts, the resolved config and the summary. Out: `<run_dir>/tensorboard/`, with descriptions for
the scalars, the config's values in the hparams view and the summary's numbers as `final/*` to compare runs by. Left
to others: what the scalars mean (scalars.py) and the other runs: `tensorboard --logdir` on their common folder shows
them together.

A resumed run writes another file that begins with a session-start event at its first iteration, by which TensorBoard
drops what the earlier files have from there on. An evaluation of that iteration came before the checkpoint and is not
made again, so its scalars are carried over, and nothing else of that step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl360.loggers.scalars import before_the_checkpoint, describe

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

FOLDER = "tensorboard"
FINAL = "final/"
FLUSH_S = 5  # a live TensorBoard looks every 5 to 30 s
TEXT_CHARS = 20_000  # of one sample text; the whole of it is in the trajectory file
NOT_HPARAMS = ("paths.", "output_dir", "resume", "logger.", "allow_targets")  # places, not choices


class TensorBoardLogger:
    """protocols.Logger. `finish` closes the file; without it the last seconds may be missing."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._described: set[str] = set()
        self._earlier: list[Path] = []  # event files of processes before this one
        self._carried: dict[str, float] = {}  # scalars of the first step that earlier processes wrote
        self._first_iteration: int | None = None
        self._hparams: dict[str, bool | float | str] = {}
        self._run_name = ""

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(run_dir) / FOLDER
        self._earlier = sorted(folder.glob("events.out.tfevents.*"))
        self._hparams = dict(flatten(config))
        self._run_name = Path(run_dir).name
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)
        if not self._earlier:
            self._write_session_start(0)  # TensorBoard takes a run's first one for its beginning, only later ones count
            self._write_hparams()

    def log(self, iteration: int, scalars: Mapping[str, float]) -> None:
        self._begin(iteration)
        if iteration != self._first_iteration:
            self._flush_carried()
        self._carried = before_the_checkpoint(self._carried, scalars)
        for name, value in scalars.items():
            self._scalar(iteration, name, float(value))

    def log_text(self, iteration: int, name: str, text: str) -> None:
        """Markdown; cut after TEXT_CHARS."""
        import numpy as np
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text import metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        self._begin(iteration)
        value = Summary.Value(
            tag=name,
            metadata=metadata.create_summary_metadata(display_name=name, description=""),
            tensor=make_tensor_proto(np.array([_cut(text).encode()], dtype=object)),
        )
        self._write(Summary(value=[value]), iteration)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary's numbers as `final/<key>` at the last iteration, the session's end, and close."""
        iteration = int(summary.get("iterations") or 0)
        self._begin(iteration)
        self._flush_carried()
        for key, value in summary.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._scalar(iteration, FINAL + key, float(value))
        self._write_session_end(failed=summary.get("exit_reason") == "failed")
        self._writer.close()
        self._writer = None

    # ---- inside

    def _begin(self, iteration: int) -> None:
        if self._first_iteration is not None:
            return
        if self._writer is None:
            raise RuntimeError("TensorBoardLogger.start() comes first")
        self._first_iteration = iteration
        if self._earlier:
            self._write_session_start(iteration)
            self._write_hparams()
            self._carried = before_the_checkpoint(_scalars_at(self._earlier, iteration), {})

    def _flush_carried(self) -> None:
        carried, self._carried = self._carried, {}
        for name, value in carried.items():
            self._scalar(self._first_iteration or 0, name, value)

    def _scalar(self, iteration: int, name: str, value: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary, SummaryMetadata

        entry = Summary.Value(tag=name, simple_value=value)
        if name not in self._described:  # TensorBoard keeps the first one of a tag
            self._described.add(name)
            entry.metadata.CopyFrom(
                SummaryMetadata(
                    display_name=name,
                    summary_description=describe(name),
                    plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"),
                    data_class=DATA_CLASS_SCALAR,  # without it, the fast loader drops the description
                )
            )
        self._write(Summary(value=[entry]), iteration)

    def _write(self, summary: Summary, iteration: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=iteration, summary=summary))

    def _write_session_start(self, iteration: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        log = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=iteration, session_log=log))

    def _write_hparams(self) -> None:
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2

        info = plugin_data_pb2.SessionStartInfo(group_name=self._run_name, start_time_secs=time.time())
        for name, value in self._hparams.items():
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, str):
                info.hparams[name].string_value = value
            else:
                info.hparams[name].number_value = value
        data = plugin_data_pb2.HParamsPluginData(session_start_info=info)
        self._write_hparams_data(metadata.SESSION_START_INFO_TAG, data)

    def _write_session_end(self, *, failed: bool) -> None:
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS
        info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        data = plugin_data_pb2.HParamsPluginData(session_end_info=info)
        self._write_hparams_data(metadata.SESSION_END_INFO_TAG, data)

    def _write_hparams_data(self, tag: str, data: Any) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata

        value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)
        self._write(Summary(value=[value]), self._first_iteration or 0)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """Dotted names and values of what an experiment chose. Null is "none", a list its text."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if name.startswith(NOT_HPARAMS):
            continue
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        elif value is None:
            yield name, "none"
        elif isinstance(value, bool | int | float | str):
            yield name, value
        else:
            yield name, str(value)


def _scalars_at(files: list[Path], iteration: int) -> dict[str, float]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: dict[str, float] = {}
    for path in files:
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.step == iteration:
                for value in event.summary.value:
                    if value.WhichOneof("value") == "simple_value" and not value.tag.startswith(FINAL):
                        found[value.tag] = value.simple_value
    return found


def _cut(text: str) -> str:
    if len(text) <= TEXT_CHARS:
        return text
    return f"{text[:TEXT_CHARS]}\n... cut after {TEXT_CHARS} of {len(text)} characters"
