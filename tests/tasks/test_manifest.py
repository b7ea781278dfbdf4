"""Manifests and task folders: what loads, and that every problem is said at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl360.errors import TaskError
from rl360.tasks import content_hash, load_tasks, validate_layout


def make_task(folder: Path, name: str, toml: str = "[agent]\ntimeout_sec = 10\n") -> Path:
    task = folder / name
    for path, text in {
        "instruction.md": "Do it.\n",
        "task.toml": toml,
        "environment/Dockerfile": "FROM python:3.12-slim\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    }.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)
    return task


def row(name: str, **changes: object) -> str:
    return json.dumps({"prompt": "Do it.", "metadata": {"instance_id": name, "tags": ["coding", name]}} | changes)


def write_manifest(folder: Path, *lines: str, name: str = "harbor_records.jsonl") -> Path:
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    for name in ("b", "a", "c"):
        make_task(tmp_path, name)
    write_manifest(tmp_path, row("b"), row("a"), "", row("c"))
    return tmp_path


def problems_of(*args: object, **kwargs: object) -> list[str]:
    with pytest.raises(TaskError) as caught:
        load_tasks(*args, **kwargs)  # type: ignore[arg-type]
    return caught.value.problems


def test_tasks_come_in_the_manifests_order(pool: Path) -> None:
    tasks = load_tasks(pool)
    assert [t.task_id for t in tasks] == ["b", "a", "c"]
    assert tasks[0].path == (pool / "b").resolve()
    assert tasks[0].tags == ("coding", "b")
    assert tasks[0].domain == "coding"


def test_include_and_exclude_keep_the_order(pool: Path) -> None:
    assert [t.task_id for t in load_tasks(pool, include=["c", "b"])] == ["b", "c"]
    assert [t.task_id for t in load_tasks(pool, exclude=["b"])] == ["a", "c"]
    assert [t.task_id for t in load_tasks(pool, include=["a", "b"], exclude=["b"])] == ["a"]


def test_another_manifest_of_the_same_folder(pool: Path) -> None:
    manifest = write_manifest(pool, row("c"), name="few.jsonl")
    assert [t.task_id for t in load_tasks(manifest)] == ["c"]


def test_a_chat_prompt_and_a_linked_folder(tmp_path: Path) -> None:
    make_task(tmp_path / "elsewhere", "real")
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere" / "real")
    write_manifest(tmp_path, row("linked", prompt=[{"role": "user", "content": "Do it."}]))
    assert load_tasks(tmp_path)[0].path == (tmp_path / "elsewhere" / "real").resolve()


def test_no_manifest(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path)
    assert "harbor_records.jsonl: no such file" in problem


def test_an_empty_manifest(tmp_path: Path) -> None:
    write_manifest(tmp_path, "")
    assert problems_of(tmp_path) == [f"tasks.path: {tmp_path / 'harbor_records.jsonl'}: no rows"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[]", "list; expected an object"),
        (row("a", prompt=""), "prompt: empty"),
        (row("a", prompt=7), "prompt 7: expected a text or a list of messages"),
        (row("a", prompt=[{"content": "x"}]), "every message of a chat needs role and content"),
        (row("a", metadata=None), "no metadata object"),
        (row("a", metadata={"tags": []}), "no metadata.instance_id"),
        (row("../a"), "not a path"),
        (row("a", metadata={"instance_id": "a", "tags": "coding"}), "expected a list of words"),
    ],
)
def test_a_bad_row_is_named_by_its_line(pool: Path, line: str, said: str) -> None:
    write_manifest(pool, row("b"), line)
    (problem,) = problems_of(pool)
    assert problem.startswith(f"{pool / 'harbor_records.jsonl'}:2: ")
    assert said in problem


def test_duplicate_ids_name_both_lines(pool: Path) -> None:
    write_manifest(pool, row("a"), row("b"), row("a"))
    (problem,) = problems_of(pool)
    assert ":3: instance_id 'a' again; line 1 has it" in problem


def test_an_absent_folder(pool: Path) -> None:
    write_manifest(pool, row("a"), row("nowhere"))
    assert problems_of(pool) == [f"{pool / 'nowhere'}: the manifest names this task, and there is no such folder"]


def test_absent_folders_of_excluded_tasks_do_not_matter(pool: Path) -> None:
    write_manifest(pool, row("a"), row("nowhere"))
    assert [t.task_id for t in load_tasks(pool, exclude=["nowhere"])] == ["a"]


def test_unknown_ids_get_a_near_name(pool: Path) -> None:
    make_task(pool, "reverse_string")
    write_manifest(pool, row("reverse_string"))
    assert problems_of(pool, include=["reverse_strin"]) == [
        "tasks.include: reverse_strin: not in the manifest; did you mean reverse_string?"
    ]
    assert problems_of(pool, exclude=["zzz"]) == ["tasks.exclude: zzz: not in the manifest; the manifest has 1 tasks"]


def test_nothing_left(pool: Path) -> None:
    (problem,) = problems_of(pool, include=["a"], exclude=["a"])
    assert "leave none" in problem


def test_all_problems_at_once(pool: Path) -> None:
    write_manifest(pool, row("a"), row("a"), "{", row("nowhere"))
    (pool / "a" / "instruction.md").write_text("  \n")
    assert len(problems_of(pool, exclude=["zzz"])) == 5


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("instruction.md", "it is what the agent is asked"),
        ("task.toml", "time limits"),
        ("tests/test.sh", "reward.txt"),
        ("environment/Dockerfile", "no docker_image"),
    ],
)
def test_each_missing_file_is_named(tmp_path: Path, missing: str, said: str) -> None:
    task = make_task(tmp_path, "a")
    (task / missing).unlink()
    (problem,) = validate_layout(task)
    assert problem.startswith(f"{task / missing}: missing")
    assert said in problem


def test_an_image_instead_of_a_dockerfile(tmp_path: Path) -> None:
    task = make_task(tmp_path, "a", '[environment]\ndocker_image = "python:3.12-slim"\n')
    (task / "environment" / "Dockerfile").unlink()
    assert validate_layout(task) == []


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[agent\n", "not TOML"),
        ("[agent]\ntimeout_sec = 0\n", "agent.timeout_sec: 0; expected seconds above 0"),
        ('[verifier]\ntimeout_sec = "60"\n', "verifier.timeout_sec: '60'; expected seconds above 0"),
        ("[verifier]\ntimeout_sec = nan\n", "verifier.timeout_sec: nan; expected seconds above 0"),
        ("[agent]\ntimeout_sec = true\n", "agent.timeout_sec: True; expected seconds above 0"),
        ("environment = 3\n", "environment: expected a table"),
    ],
)
def test_a_bad_task_toml(tmp_path: Path, toml: str, said: str) -> None:
    (problem,) = validate_layout(make_task(tmp_path, "a", toml))
    assert said in problem


def test_the_hash_sees_bytes_names_and_execute_bits_and_no_caches(tmp_path: Path) -> None:
    task = make_task(tmp_path, "a")
    hashes = [content_hash(task)]
    (task / "tests" / "__pycache__").mkdir()
    (task / "tests" / "__pycache__" / "x.pyc").write_text("x")
    assert content_hash(task) == hashes[0]
    (task / "instruction.md").write_text("Do it!\n")
    hashes.append(content_hash(task))
    (task / "instruction.md").rename(task / "instructions.md")
    hashes.append(content_hash(task))
    (task / "tests" / "test.sh").chmod(0o755)
    hashes.append(content_hash(task))
    assert len(set(hashes)) == 4
