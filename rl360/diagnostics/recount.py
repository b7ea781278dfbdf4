"""Count a run's attempts a second time, without the code that counted them first.

In: a run folder. Out: counts by outcome from the trajectory files and the proxy's session log, a comparison with
ledger.jsonl and summary.json, and every try on which the records differ. Run it: `python -m rl360.diagnostics.recount
RUN`; exit 1 when anything disagrees. Left to others: all writing. It imports nothing of rl360.engine on purpose, and
reads the files with its own few lines, so that one mistake cannot be in both counts.

What an outcome should be follows from the attempt alone: an evaluation try is evaluated; one that infrastructure
ended, or that has no valid score, is masked; a group with fewer than two differing rewards is filtered; the rest is
trained.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("trained", "filtered", "masked", "requeued", "stale", "evaluated", "unused")
WITHOUT_ATTEMPT = ("requeued", "unused")  # outcomes whose row may hold no attempt
HANDSHAKE = "verify.t0"  # the gateway's own session, before any attempt
OWN_FILTER = "differing_rewards"
REWARD_TOLERANCE = 1e-9  # rewards are sums of a few numbers; less is rounding


@dataclass(slots=True)
class Recount:
    """What was found. `claimed` maps a source ("ledger.jsonl", "summary.json") to its counts."""

    counts: dict[str, int]
    masked_by_cause: dict[str, int]
    undecided: int  # tries whose session closed and that have no outcome yet: none once a run has finished
    sampled_tokens: int
    claimed: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not self.problems


def recount(run_dir: Path) -> Recount:
    """Recount one run. Raises FileNotFoundError when it has neither trajectories nor a ledger."""
    run_dir = Path(run_dir)
    if not (run_dir / "trajectories").is_dir() and not (run_dir / "ledger.jsonl").exists():
        raise FileNotFoundError(f"{run_dir}: no trajectories/ and no ledger.jsonl; expected a run folder")
    problems: list[str] = []
    rows: dict[str, dict[str, Any]] = {}
    for row in _trajectories(run_dir):
        try_id = row["spec"]["try_id"]
        if try_id in rows:
            problems.append(f"{try_id}: two trajectory rows")
        rows[try_id] = row
    sessions = _sessions(run_dir, problems)
    derived = _derive_kinds(rows, _filter_name(run_dir))
    for try_id, row in rows.items():
        said = row["outcome"]["kind"]
        if said != derived[try_id]:
            problems.append(f"{try_id}: recorded as {said}, but the attempt itself is {derived[try_id]}")
        problems += _token_problems(try_id, row, sessions.get(try_id)) + _reward_problems(try_id, row)
    undecided = [try_id for try_id, session in sessions.items() if try_id not in rows]
    kinds = Counter(derived.values())
    causes = Counter(_cause(rows[t]) for t, kind in derived.items() if kind == "masked")
    result = Recount(
        counts={"started": len(_started(rows, sessions)), **{kind: kinds[kind] for kind in KINDS}},
        masked_by_cause=dict(sorted(causes.items())),
        undecided=len(undecided),
        sampled_tokens=sum(_sampled(s).size for row in rows.values() for s in row.get("segments", ())),
        problems=problems,
    )
    _compare(run_dir, result, undecided)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rl360.diagnostics.recount", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    result = recount(parser.parse_args(argv).run_dir)
    sources = list(result.claimed)
    print("  ".join([f"{'':<10}", f"{'recount':>12}", *[f"{source:>12}" for source in sources]]))
    for name, number in result.counts.items():
        claims = [f"{result.claimed[source].get(name, 0):>12}" for source in sources]
        print("  ".join([f"{name:<10}", f"{number:>12}", *claims]))
    for cause, number in result.masked_by_cause.items():
        print(f"masked by {cause}: {number}")
    print(f"undecided (made again or used by a resume): {result.undecided}")
    print(f"sampled tokens: {result.sampled_tokens}")
    for problem in result.problems:
        print(f"DISAGREES  {problem}")
    print("all records agree" if result.agrees else f"{len(result.problems)} disagreements")
    return 0 if result.agrees else 1


# ---- reading


def _trajectories(run_dir: Path) -> Iterator[dict[str, Any]]:
    import zstandard

    for path in sorted((run_dir / "trajectories").glob("*.jsonl.zst")):
        with open(path, "rb") as raw:
            stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            for line in io.TextIOWrapper(stream, encoding="utf-8"):
                if line.endswith("\n"):  # else a crash cut it off
                    yield json.loads(line)


def _sessions(run_dir: Path, problems: list[str]) -> dict[str, dict[str, Any]]:
    """The proxy's last line of each try."""
    found: dict[str, dict[str, Any]] = {}
    path = run_dir / "logs" / "sessions.jsonl"
    if not path.exists():
        return found
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            # A proxy that was killed in a write leaves half a line, and the next one goes on behind it.
            begin = line.rfind('{"try_id"')
            try:
                row = json.loads(line[max(begin, 0) :])
            except ValueError:
                if line.endswith("\n"):
                    problems.append(f"{path.name}, line {number}: unreadable")
                continue
            if row["try_id"] != HANDSHAKE:
                found[row["try_id"]] = row
    return found


def _filter_name(run_dir: Path) -> str | None:
    """The run's filter rule, None when unknown."""
    import yaml

    try:
        config = yaml.safe_load((run_dir / "resolved.yaml").read_text())
        return str(config["algorithm"]["filter"])
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        return None


# ---- deciding again


def _derive_kinds(rows: Mapping[str, dict[str, Any]], filter_name: str | None) -> dict[str, str]:
    derived: dict[str, str] = {}
    groups: dict[str, list[str]] = defaultdict(list)
    for try_id, row in rows.items():
        said = row["outcome"]["kind"]
        if said in WITHOUT_ATTEMPT or said == "stale":
            derived[try_id] = said  # nothing in the attempt could tell
        elif not _valid(row):
            derived[try_id] = "masked"
        elif row["spec"]["purpose"] == "eval":
            derived[try_id] = "evaluated"
        else:
            groups[row["spec"]["group_id"]].append(try_id)
    for members in groups.values():
        kind = _group_kind([rows[try_id] for try_id in members], filter_name)
        derived.update((try_id, kind or rows[try_id]["outcome"]["kind"]) for try_id in members)
    return derived


def _group_kind(members: list[dict[str, Any]], filter_name: str | None) -> str | None:
    """trained or filtered for all valid attempts of a group; None when the rule is not ours to know."""
    if filter_name == "none":
        return "trained"
    if filter_name != OWN_FILTER:
        return None
    rewards = [r for row in members if math.isfinite(r := _reward(row))]
    scale = max([1.0, *map(abs, rewards)])
    differ = len(rewards) > 1 and max(rewards) - min(rewards) > REWARD_TOLERANCE * scale
    sampled = any(_sampled(segment).size for row in members for segment in row["segments"])
    return "trained" if differ and sampled else "filtered"


def _valid(row: Mapping[str, Any]) -> bool:
    scores = row.get("scores") or {}
    return row.get("stop") != "infrastructure" and bool(scores) and all(s["valid"] for s in scores.values())


def _reward(row: Mapping[str, Any]) -> float:
    shaped = [s["shaped"] for s in row["scores"].values()]
    return sum(s if isinstance(s, int | float) else math.nan for s in shaped)  # {"$float": ...}: not finite


def _cause(row: Mapping[str, Any]) -> str:
    return str(row.get("cause") or row["outcome"]["reason"] or "unknown")


def _sampled(segment: Mapping[str, Any]) -> Any:
    """Ids that the policy sampled in this segment, little-endian int32."""
    import numpy as np

    runs = [segment["token_ids"][start:end] for start, end in segment["sampled"]]
    return np.array([token for run in runs for token in run], dtype="<i4")


def _reward_problems(try_id: str, row: Mapping[str, Any]) -> list[str]:
    """Whether the trial is this try's own, and the reward the sum of the scores: none where it is not valid."""
    problems = []
    if (trial := row.get("trial")) and trial["try_id"] != try_id:
        problems.append(f"{try_id}: its trial is that of {trial['try_id']}")
    said, summed = row.get("reward"), _reward(row) if _valid(row) else None
    if summed is None and said is not None:
        problems.append(f"{try_id}: has the reward {said}, and no valid score")
    elif summed is not None and math.isfinite(summed) and (said is None or abs(said - summed) > 1e-9 * abs(summed)):
        problems.append(f"{try_id}: its scores are {summed} in all, its reward is {said}")
    return problems


def _token_problems(try_id: str, row: Mapping[str, Any], session: Mapping[str, Any] | None) -> list[str]:
    """The attempt's sampled tokens against those that the proxy saw."""
    segments = row.get("segments", [])
    if row["outcome"]["kind"] in WITHOUT_ATTEMPT or not segments:
        return []
    if session is None:
        return [f"{try_id}: has tokens, but the proxy's log has no session of it"]
    if session["discarded"]:
        return [f"{try_id}: has tokens, but the proxy discarded its session"]
    ours = [hashlib.sha256(_sampled(segment).tobytes()).hexdigest() for segment in segments]
    theirs = [segment["sampled_sha256"] for segment in session["segments"]]
    if ours == theirs:
        return []
    counts = sum(_sampled(s).size for s in segments), session["sampled_tokens"]
    return [f"{try_id}: sampled tokens differ from the proxy's ({counts[0]} here, {counts[1]} there)"]


def _started(rows: Mapping[str, dict[str, Any]], sessions: Mapping[str, dict[str, Any]]) -> set[str]:
    """Every try that must have begun: those with a row or a session, and the earlier tries of each."""
    started = set(rows) | set(sessions)
    for try_id in list(started):
        attempt_id, _, number = try_id.rpartition(".t")
        started |= {f"{attempt_id}.t{earlier}" for earlier in range(int(number))}
    return started


# ---- comparing


def _compare(run_dir: Path, result: Recount, undecided: list[str]) -> None:
    ledger = _read_ledger(run_dir)
    open_tries: set[str] = set()
    if ledger is not None:
        started, last = ledger
        open_tries = started - last.keys()
        kinds = Counter(kind for kind, _ in last.values())
        result.claimed["ledger.jsonl"] = {"started": len(started), **{kind: kinds[kind] for kind in KINDS}}
        causes = Counter(reason for kind, reason in last.values() if kind == "masked")
        _note_difference(result, "ledger.jsonl", "masked_by_cause", result.masked_by_cause, dict(causes))
    summary_path = run_dir / "summary.json"
    finished = False
    if summary_path.exists():
        summary = json.loads(summary_path.read_text())
        finished = summary["exit_reason"] == "finished"
        result.claimed["summary.json"] = summary["attempts"]
        causes_said = summary["masked_by_cause"]
        _note_difference(result, "summary.json", "masked_by_cause", result.masked_by_cause, causes_said)
    if finished and open_tries:
        result.problems.append(f"finished, but the ledger has {len(open_tries)} tries without an outcome")
    for try_id in undecided:
        if finished or try_id not in open_tries:
            result.problems.append(f"{try_id}: the proxy closed its session, but no trajectory row has it")
    for source, counts in result.claimed.items():
        for name, number in result.counts.items():
            # A try that a crash cut off before its session closed left no trace but its start.
            if name != "started" or not open_tries:
                _note_difference(result, source, name, number, counts.get(name, 0))


def _read_ledger(run_dir: Path) -> tuple[set[str], dict[str, tuple[str, str]]] | None:
    """Tries that started, and (kind, reason) of each that has an outcome which a resume did not take back."""
    path = run_dir / "ledger.jsonl"
    if not path.exists():
        return None
    started: set[str] = set()
    last: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off by a crash
        if row["event"] == "started":
            started.add(row["try_id"])
        elif row["event"] == "outcome":
            last[row["try_id"]] = row
        else:
            again = [
                try_id
                for try_id, outcome in last.items()
                if _taken_back(outcome, row["iteration"], row.get("last_evaluated"))
            ]
            for try_id in again:
                del last[try_id]
    return started, {try_id: (row["kind"], row["reason"] or "unknown") for try_id, row in last.items()}


def _taken_back(outcome: Mapping[str, Any], resumed: int, evaluated: int | None) -> bool:
    """A resume at iteration k trains k and later again, and evaluates what comes after k, or at k if that was cut."""
    if outcome["kind"] in WITHOUT_ATTEMPT:
        return False
    if outcome["iteration"] == resumed and outcome["purpose"] == "eval":
        return evaluated != resumed
    return outcome["iteration"] >= resumed


def _note_difference(result: Recount, source: str, name: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        result.problems.append(f"{name}: {ours} recounted, {theirs} in {source}")


if __name__ == "__main__":
    sys.exit(main())
