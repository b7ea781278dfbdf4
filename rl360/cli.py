"""`rl360 run | check | sweep | tasks | model | simulate | view | doctor`: reads arguments, shows problems, hands over.

In: arguments. Out: an exit code (0 fine, 1 a problem, 2 an unknown command, 130 interrupted). What a user wrote wrongly
is printed, all of it, without a traceback. torch and Harbor are imported by a run, not here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl360.config.hydra_main import parse_flags, run_hydra
from rl360.config.names import suggestion
from rl360.errors import ConfigError, RL360Error
from rl360.interrupts import sigterm_interrupts, use_a_signal_stack

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rl360.config.check import Examined
    from rl360.config.compose import Composed, Request

EXIT_FINE, EXIT_PROBLEM, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_NO_READER = 141  # what shells report for SIGPIPE: `rl360 check ... | head`

USAGE = """\
rl360: reinforcement learning of language models; a resolved YAML is the experiment

  rl360 run [key=value ...]      run an experiment, such as: rl360 run experiment=quickstart
  rl360 check [key=value ...]    check the same arguments and print the plan; starts nothing
  rl360 sweep NAME [key=value]   run a study of sweeps/, such as: rl360 sweep learning_rate
  rl360 tasks list|new|...       pools of tasks: validate, calibrate, select; see rl360 tasks --help
  rl360 model fetch NAME         get a model, such as: rl360 model fetch smollm2_135m
  rl360 model convert|export|..  formats of a model, HF folders out of runs; see rl360 model --help
  rl360 view RUN                 look at a run in a browser: iterations, attempts, tokens
  rl360 simulate [RUN]           how fast and how stale a loop would be, before it runs
  rl360 doctor                   what this machine can do, and what is wrong
  rl360 --version

rl360 run --help lists the config groups. Shell completion: eval "$(rl360 run -sc install=bash)"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `rl360` command. Returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    use_a_signal_stack()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return EXIT_FINE
    if arguments[0] in ("-V", "--version", "version"):
        print(f"rl360 {importlib.metadata.version('rl360')}")
        return EXIT_FINE
    if arguments[0] in ("-sc", "--shell-completion", "--shell_completion", "--hydra-help"):
        return run(arguments)  # what the completion script calls; it knows the program, not the command
    name, rest = arguments[0], arguments[1:]
    command = COMMANDS.get(name)
    if command is None:
        print(f"rl360 {name}: unknown command{suggestion(name, COMMANDS)}", file=sys.stderr)
        return EXIT_USAGE
    try:
        with sigterm_interrupts():
            code = command(rest)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _report(error.problems)
    except RL360Error as error:
        return _report([f"{type(error).__name__}: {error}"])
    except KeyboardInterrupt as stopped:
        print(f"rl360 {name}: stopped by {stopped or 'Ctrl-C'}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if name in ("run", "sweep"):
            raise  # may be the pipe of a process of the run
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush has no reader
        return EXIT_NO_READER


def run(arguments: Sequence[str]) -> int:
    """`rl360 run`: check everything, then let Hydra compose and call the launcher."""
    from rl360.config.compose import compose, compose_points, is_multirun
    from rl360.config.resume import resume_folder, resumed

    parsed = parse_flags(arguments)
    request = _request(parsed)
    if parsed.shell_completion and "COMP_LINE" in os.environ:
        return _complete(arguments, os.environ["COMP_LINE"])
    if parsed.shell_completion or parsed.hydra_help or parsed.info:
        return run_hydra(arguments)
    if parsed.cfg or parsed.help:
        composed = compose_points(request)[0] if parsed.multirun else compose(request)
        problems = list(composed.problems) if parsed.help else _key_problems(composed)
        single = [argument for argument in arguments if argument not in ("-m", "--multirun")]
        return _report(problems) or run_hydra(single)  # Hydra prints one config or runs several, not both
    if (folder := resume_folder(request)) is not None:
        if request.multirun:
            return _report([_ONE_RUN])
        return _start(resumed(request, folder), folder)
    points = _examined_points(request)
    if problems := [problem for _, examined in points for problem in examined.problems]:
        return _report(problems)
    if not is_multirun(request):
        return _start(points[0][0], None)
    return _sweep(arguments, request, [point for point, _ in points])


def check(arguments: Sequence[str]) -> int:
    """`rl360 check`: everything that `run` would check, and the plan."""
    from rl360.config.resume import resume_folder, resumed

    parsed = parse_flags(arguments)
    if parsed.help or parsed.hydra_help or parsed.cfg or parsed.info:
        return run(arguments)  # what only prints is the same for both
    request = _request(parsed)
    if (folder := resume_folder(request)) is not None:
        if request.multirun:
            return _report([_ONE_RUN])
        examined = _examine(resumed(request, folder), folder)
        return _report(examined.problems) or _show_plan(examined, folder)
    points = _examined_points(request)
    if problems := [problem for _, examined in points for problem in examined.problems]:
        _show_forecasts(examined for _, examined in points)
        return _report(problems)
    for index, (composed, examined) in enumerate(points):
        if len(points) > 1:
            print(f"{'' if index == 0 else chr(10)}point {index}: {' '.join(composed.overrides)}")
        _show_plan(examined, None)
    return EXIT_FINE


def sweep(arguments: Sequence[str]) -> int:
    """`rl360 sweep NAME`: Hydra's `--config-dir sweeps --config-name NAME -m`."""
    from rl360.config.locate import sweeps_folder

    own = Path.cwd() / "sweeps"
    folders = [folder for folder in (own, sweeps_folder()) if folder.is_dir()]
    studies = {path.stem: folder for folder in reversed(folders) for path in folder.glob("*.yaml")}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"rl360 sweep NAME [key=value ...]: run a study; there are: {', '.join(sorted(studies))}")
        return EXIT_FINE if arguments else EXIT_USAGE
    name, *rest = arguments
    if name not in studies:
        return _report([f"sweep {name}: no such study{suggestion(name, studies)}"])
    return run(["--config-dir", str(studies[name]), "--config-name", name, "-m", *rest])


def tasks(arguments: Sequence[str]) -> int:
    """`rl360 tasks list | new | validate | calibrate | select`."""
    from rl360.tasks.cli import main as tasks_main

    return tasks_main(arguments)


def model(arguments: Sequence[str]) -> int:
    """`rl360 model fetch | prepare | convert | export`: models on disk."""
    from rl360.models.cli import main as model_main

    return model_main(arguments)


def doctor(arguments: Sequence[str]) -> int:
    """`rl360 doctor`: what this machine has, what is wrong, and what to do about it."""
    argparse.ArgumentParser(prog="rl360 doctor", description=doctor.__doc__).parse_args(arguments)
    from rl360.diagnostics.doctor import examine_machine

    return examine_machine(print)


def simulate(arguments: Sequence[str]) -> int:
    """`rl360 simulate [RUN]`: how fast and how stale a loop would be; starts nothing."""
    from rl360.diagnostics.simulate_cli import main as simulate_main

    return simulate_main(arguments)


def view(arguments: Sequence[str]) -> int:
    """`rl360 view RUN`: web pages of a run folder, on this machine."""
    from rl360.viewer.cli import view as serve_pages

    return serve_pages(arguments)


_ONE_RUN = "resume: continues one run; leave out -m"
_ONE_FOLDER = "output_dir: one folder for the points of a multirun; expected paths.outputs, or hydra.sweep.dir"

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": run,
    "check": check,
    "sweep": sweep,
    "tasks": tasks,
    "model": model,
    "view": view,
    "simulate": simulate,
    "doctor": doctor,
}


def _request(parsed: argparse.Namespace) -> Request:
    from rl360.config.compose import Request

    return Request.from_arguments(parsed)


def _report(problems: Sequence[str]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f"\n{len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing was started", file=sys.stderr)
    return EXIT_PROBLEM if problems else EXIT_FINE


def _key_problems(composed: Composed) -> list[str]:
    """Of composing, keys and types only: what `--cfg` prints need not run on this machine."""
    from rl360.config.check import load

    return list(dict.fromkeys([*composed.problems, *load(composed.values, composed.choices).problems]))


def _examine(composed: Composed, resume_from: Path | None) -> Examined:
    from dataclasses import replace

    from rl360.config.check import examine
    from rl360.config.resume import changed_tasks

    examined = examine(composed, resume_from, resuming=resume_from is not None)
    if resume_from is None:
        return examined
    if not composed.values:  # the saved file could not be read: anything else would be about defaults
        return replace(examined, config=None, problems=composed.problems)
    changed = changed_tasks(resume_from, examined.found)
    problems = (*examined.problems, *changed)
    return replace(examined, problems=problems, config=None if problems else examined.config)


def _examined_points(request: Request) -> list[tuple[Composed, Examined]]:
    """Each point with its checks; the problems of one point of several carry its overrides."""
    from dataclasses import replace

    from rl360.config.compose import compose, compose_points, is_multirun

    points = compose_points(request) if is_multirun(request) else [compose(request)]
    examined = [(point, _examine(point, None)) for point in points]
    if is_multirun(request):
        unwritable = _sweep_folder_problems(request)
        for index, (point, result) in enumerate(examined):
            ours = unwritable if point.values.get("output_dir") is None else [*unwritable, _ONE_FOLDER]
            if ours:
                examined[index] = (point, replace(result, config=None, problems=(*result.problems, *ours)))
    if len(points) == 1:
        return examined
    everywhere = set.intersection(*(set(e.problems) for _, e in examined))
    seen: set[str] = set()
    labelled = []
    for point, result in examined:
        label = " ".join(point.overrides)
        new = [p if p in everywhere else f"{p}  [{label}]" for p in result.problems if p not in seen]
        seen |= everywhere
        labelled.append((point, replace(result, problems=tuple(new))))
    return labelled


def _sweep_folder_problems(request: Request) -> list[str]:
    from rl360.config.compose import sweep_folder
    from rl360.diagnostics.machine import write_problem

    folder = sweep_folder(request)
    problem = write_problem(folder) if folder is not None else None
    return [f"hydra.sweep.dir: {problem}; expected a folder that can be written"] if problem else []


def _show_plan(examined: Examined, folder: Path | None) -> int:
    from rl360.config.run_folder import new_run_dir

    assert examined.config is not None
    config = examined.config
    run_dir = folder or Path(config.output_dir or new_run_dir(config.paths.outputs, config.name)).absolute()
    print("\n".join(_launcher(examined).plan(config, examined.found, run_dir).lines()))
    return EXIT_FINE


def _show_forecasts(points: Iterable[Examined]) -> None:
    """The GPUs' forecast stands also where the plan does not: a login node has no GPU, and perhaps no weights."""
    for examined in points:
        found = examined.found
        lines = [line for table in (found.gpu, found.servers) if table is not None for line in table.lines()]
        if lines:
            print("\n".join([*lines, *(f"warning: {text}" for text in found.warnings)]))


def _launcher(examined: Examined):  # type: ignore[no-untyped-def]  # launchers import rl360, never the reverse
    from rl360.engine.build import load_class

    assert examined.config is not None
    fields = {key: value for key, value in vars(examined.config.cluster).items() if key != "_target_"}
    return load_class(examined.config.cluster._target_, examined.config.allow_targets)(**fields)


def _start(composed: Composed, resume_from: Path | None, run_dir: Path | None = None, in_process: bool = True) -> int:
    """Check, save resolved.yaml and plan.json, and run. run_dir: null lets the config or the clock decide."""
    from rl360.config.run_folder import RESOLVED, new_run_dir, save
    from rl360.engine.state import only_writer

    examined = _examine(composed, resume_from)
    if examined.problems:
        return _report(examined.problems)
    assert examined.config is not None
    config = examined.config
    folder = resume_from or run_dir or Path(config.output_dir or new_run_dir(config.paths.outputs, config.name))
    folder = folder.absolute()
    if run_dir is not None and (folder / RESOLVED).exists():  # the same hydra.sweep.dir as an earlier sweep
        return _report([f"hydra.sweep.dir: {folder} already holds a run; expected a folder of this sweep's own"])
    launcher = _launcher(examined)
    plan = launcher.plan(config, examined.found, folder)
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    try:
        with only_writer(folder):  # a run that is going on keeps its resolved.yaml
            save(folder, {**examined.values, "output_dir": str(folder)}, plan.to_dict())
    except RL360Error as error:
        return _report([f"output_dir: {error}"])
    except OSError as error:
        return _report([f"output_dir: cannot write to {folder} ({error.strerror})"])
    return int(launcher.submit(plan, in_process=in_process))


def _sweep(arguments: Sequence[str], request: Request, points: Sequence[Composed]) -> int:
    """Let Hydra run every point, each in its own process and folder, then compare them.

    Hydra gets the overrides as `check` understood them: where it is strict, the points would not compose.
    """
    from rl360.config.compose import lenient_overrides
    from rl360.diagnostics.compare import comparison

    lenient = lenient_overrides(request)
    arguments = [lenient.get(argument, argument) for argument in arguments]
    done: list[tuple[str, Path, int]] = []
    texts = {text for one in points for text in one.overrides}
    keys = [text.lstrip("+").partition("=")[0] for text in texts]

    def point(config: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        from rl360.config.compose import from_config

        hydra = HydraConfig.get()
        overrides = [text.lstrip("+") for text in hydra.overrides.task]
        # A key with one value is the same at every point.
        own = [text for text in overrides if keys.count(text.partition("=")[0]) > 1] or overrides
        folder = Path(hydra.sweep.dir).absolute() / _point_name(int(hydra.job.num), own)
        print(f"point {hydra.job.num + 1} of {len(points)}: {' '.join(own)}", flush=True)
        composed = from_config(config, hydra.runtime.choices, overrides)
        try:
            code = _start(composed, None, folder, in_process=False)
        except Exception:  # a bug in one point must not cost the others; it is shown in full
            traceback.print_exc()
            code = EXIT_PROBLEM
        done.append((" ".join(own), folder, code))
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt

    try:
        code = run_hydra(arguments, point)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if done:
        print("\n".join(["", *comparison([(name, folder) for name, folder, _ in done])]))
    return code or max((code for _, _, code in done), default=EXIT_FINE)


def _point_name(number: int, overrides: Sequence[str]) -> str:
    """A folder name that says which point it is: `0-trainer.learning_rate=1e-05`."""
    text = ",".join(overrides).replace("/", "_")
    kept = "".join(c for c in text if c.isalnum() or c in "._=,-+")
    return f"{number}-{kept[:100]}" if kept else str(number)


def _complete(arguments: Sequence[str], line: str) -> int:
    """Hydra completes `PROGRAM overrides`; ours has a command between, which is taken out of the line it reads."""
    program, command, rest = [*line.split(maxsplit=2), "", "", ""][:3]
    if not rest and not line.endswith(" "):
        print(" ".join(name for name in COMMANDS if name.startswith(command)))
    elif not command:
        print(" ".join(COMMANDS))
    elif command in ("run", "check"):
        os.environ["COMP_LINE"] = f"{program} {rest}"
        return run_hydra(arguments)
    return EXIT_FINE


if __name__ == "__main__":
    sys.exit(main())
