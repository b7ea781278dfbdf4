"""Worker groups: results, errors, deaths, deadlines, and nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rl360.engine.workers import LocalWorkerGroup
from rl360.errors import ConfigError, EngineError, InfrastructureError, RL360Error, WorkerDied

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _find_sample_workers(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def group(tmp_path):
    workers = LocalWorkerGroup(
        "sample_workers:Echo", 2, {"folder": str(tmp_path)}, name="echo", log_dir=tmp_path / "logs"
    )
    workers.start()
    yield workers
    workers.close(grace_s=0.0)


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


async def test_each_rank_is_its_own_started_process(group):
    (rank0, pid0, started0), (rank1, pid1, started1) = [await group.call(rank, "who") for rank in (0, 1)]
    assert (rank0, rank1, started0, started1) == (0, 1, True, True)
    assert len({pid0, pid1, os.getpid()}) == 3
    assert (group.pid(0), group.pid(1)) == (pid0, pid1)
    assert os.getsid(pid0) == pid0  # its own session: the terminal's Ctrl-C does not reach it


async def test_workers_import_nothing_heavy(group):
    assert await group.call(0, "loaded") == []


async def test_many_calls_are_open_at_once(group):
    begun = time.monotonic()
    answers = await asyncio.gather(*[group.call(i % 2, "echo", i, 0.3) for i in range(100)])
    assert answers == list(range(100))
    assert time.monotonic() - begun < 12.0  # one after the other would take 15 s in each of the two


async def test_large_arguments_and_results_pass_both_ways(group):
    blob = os.urandom(5_000_000)
    assert await asyncio.gather(*[group.call(0, "echo", blob) for _ in range(3)]) == [blob] * 3


def test_calls_from_several_loops(group):
    results: list[int] = []

    def one_loop(value: int) -> None:
        results.append(asyncio.run(group.call(0, "echo", value, 0.05)))

    threads = [threading.Thread(target=one_loop, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(results) == [0, 1, 2, 3]


async def test_exceptions_come_back_as_their_class_with_the_remote_traceback(group):
    with pytest.raises(ConfigError) as config:
        await group.call(0, "fail", "config")
    assert config.value.problems == ["a: wrong", "b: wrong"]
    with pytest.raises(EngineError) as engine:
        await group.call(0, "fail", "engine")
    assert engine.value.cause == "engine_timeout"
    assert str(engine.value) == "engine_timeout: no answer after 3 s"
    with pytest.raises(ValueError, match="plain") as plain:
        await group.call(0, "fail", "plain")
    assert "echo-0" in plain.value.__notes__[0]
    assert "sample_workers.py" in plain.value.__notes__[0]
    with pytest.raises(TimeoutError, match="mine"):
        await group.call(0, "fail", "timeout", timeout_s=5)


async def test_what_cannot_be_pickled_comes_back_as_text(group):
    with pytest.raises(RL360Error, match="odd one"):
        await group.call(0, "fail", "odd")
    with pytest.raises(Exception, match=r"pickle|lambda|local object"):
        await group.call(0, "unpicklable")
    with pytest.raises(AttributeError, match="no_such_method"):
        await group.call(0, "no_such_method")
    assert await group.call(0, "echo", "still there") == "still there"


async def test_a_timeout_names_the_call_and_cancels_it_in_the_worker(group):
    with pytest.raises(TimeoutError, match=r"echo-1\.echo: no answer after 0\.2 s"):
        await group.call(1, "echo", "slow", 30, timeout_s=0.2)
    assert await group.call(1, "seen_cancelled") == ["slow"]


async def test_cancelling_the_caller_cancels_the_call(group):
    task = asyncio.create_task(group.call(0, "echo", "unwanted", 30))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await group.call(0, "seen_cancelled") == ["unwanted"]


async def test_kill_9_fails_open_calls_at_once_and_a_restart_brings_it_back(group):
    pid = group.pid(0)
    open_calls = [asyncio.create_task(group.call(0, "echo", i, 60)) for i in range(3)]
    other = asyncio.create_task(group.call(1, "echo", "unharmed", 0.5))
    await asyncio.sleep(0.2)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    errors = await asyncio.gather(*open_calls, return_exceptions=True)
    assert time.monotonic() - killed < 20.0  # the calls would take 60 s
    assert [type(error) for error in errors] == [WorkerDied] * 3
    assert errors[0].cause == "worker_died"
    assert "SIGKILL" in str(errors[0])
    assert not group.alive(0)
    with pytest.raises(WorkerDied):
        await group.call(0, "echo", 1)
    assert await other == "unharmed"
    await asyncio.to_thread(group.restart, 0)
    assert group.alive(0)
    assert (await group.call(0, "who"))[0] == 0
    assert group.pid(0) != pid


async def test_death_is_noticed_although_a_child_outlives_the_worker(group):
    pid = group.pid(0)
    child = await group.call(0, "leave_a_child", True)
    call = asyncio.create_task(group.call(0, "echo", 1, 60))
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await asyncio.wait_for(call, 2)
    assert gone(child)


async def test_last_words_of_a_worker_are_in_the_error_and_the_log(group, tmp_path):
    with pytest.raises(WorkerDied, match=r"exit code 7(.|\n)*last words"):
        await group.call(1, "exit", 7)
    assert "last words" in (tmp_path / "logs" / "echo-1.log").read_text()


async def test_ctrl_c_and_sigterm_do_not_end_a_worker(group):
    for signum in (signal.SIGINT, signal.SIGTERM):
        os.kill(group.pid(0), signum)
    await asyncio.sleep(0.1)
    assert await group.call(0, "echo", "here") == "here"
    assert await group.call(0, "dispositions_of_a_child") == "SIGTERM"


async def test_stacks_of_threads_and_tasks_go_to_the_log(group, tmp_path):
    call = asyncio.create_task(group.call(0, "echo", 1, 1.0))
    await asyncio.sleep(0.2)
    group.dump_stacks()
    await call
    text = (tmp_path / "logs" / "echo-0.log").read_text()
    assert "most recent call first" in text
    assert "sample_workers.py" in text  # the task that waits, which no thread stack shows


async def test_environment_is_added(tmp_path):
    group = LocalWorkerGroup(
        "sample_workers:Echo", 1, {"folder": str(tmp_path)}, log_dir=tmp_path, env={"RL360_TEST_VALUE": "7"}
    )
    group.start()
    try:
        assert await group.call(0, "environment", "RL360_TEST_VALUE") == "7"
        assert await group.call(0, "environment", "PATH") == os.environ["PATH"]
    finally:
        group.close()


def test_no_file_descriptor_for_a_worker_is_an_error_and_no_wait(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("rl360.engine.workers.socket.socketpair", full)
    workers = LocalWorkerGroup("sample_workers:Echo", 1, {"folder": str(tmp_path)}, log_dir=tmp_path / "logs")
    with pytest.raises(InfrastructureError, match=r"worker-0: .*Too many open files"):
        workers.start()


def test_no_thread_for_a_worker_ends_its_process(tmp_path, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.endswith("-writer"):
            raise RuntimeError("can't start new thread")
        start(thread)

    before = psutil.Process().children()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    workers = LocalWorkerGroup("sample_workers:Echo", 1, {"folder": str(tmp_path)}, log_dir=tmp_path / "logs")
    with pytest.raises(WorkerDied, match="worker-0"):
        workers.start()
    assert psutil.Process().children() == before


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", InfrastructureError, "no such template: qwen9"),
        ("config", ConfigError, "model.path: no such folder"),
        ("die", WorkerDied, "dying now"),
        ("hang", InfrastructureError, r"did not start within 3 s(.|\n)*about to hang"),
    ],
)
def test_a_failed_start_shows_the_text_and_leaves_no_process(tmp_path, how, kind, text):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    group = LocalWorkerGroup("sample_workers:BadStart", 2, {"how": how}, log_dir=tmp_path, start_timeout_s=3)
    with pytest.raises(kind, match=text):
        group.start()
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


def test_an_unknown_target_is_reported(tmp_path):
    with pytest.raises(InfrastructureError, match="no_such_module"):
        LocalWorkerGroup("no_such_module:Echo", 1, log_dir=tmp_path).start()
    with pytest.raises(RL360Error, match="module:Class"):
        LocalWorkerGroup("sample_workers.Echo", 1, log_dir=tmp_path)


def test_close_lets_workers_finish_and_leaks_nothing(tmp_path):
    def cycle() -> None:
        group = LocalWorkerGroup("sample_workers:Echo", 2, {"folder": str(tmp_path)}, log_dir=tmp_path)
        group.start()
        group.close()
        group.close()

    cycle()
    files, threads = psutil.Process().num_fds(), threading.active_count()
    children = psutil.Process().children()
    for _ in range(2):
        cycle()
    assert (tmp_path / "closed-0").read_text() == (tmp_path / "closed-1").read_text() == "yes"
    assert psutil.Process().num_fds() == files
    assert threading.active_count() == threads
    assert psutil.Process().children() == children


def test_close_kills_the_whole_process_group_after_the_grace(tmp_path):
    group = LocalWorkerGroup("sample_workers:Echo", 1, {"folder": str(tmp_path), "slow_close": True}, log_dir=tmp_path)
    group.start()
    child = asyncio.run(group.call(0, "leave_a_child"))
    pid = group.pid(0)
    begun = time.monotonic()
    group.close(grace_s=0.3)
    assert time.monotonic() - begun < 20.0  # its own close would take 60 s
    assert gone(pid)
    assert gone(child)
    assert not (tmp_path / "closed-0").exists()


def test_close_ends_a_worker_whose_loop_is_blocked(tmp_path):
    group = LocalWorkerGroup("sample_workers:Echo", 1, {"folder": str(tmp_path)}, log_dir=tmp_path)
    group.start()

    async def block() -> None:
        with pytest.raises(TimeoutError):
            await group.call(0, "spin", 60, timeout_s=0.2)

    asyncio.run(block())
    pid = group.pid(0)
    group.close(grace_s=0.3)
    assert gone(pid)


DRIVER = """
import asyncio, sys
sys.path.insert(0, {here!r})
from rl360.engine.workers import LocalWorkerGroup
group = LocalWorkerGroup("sample_workers:Echo", 2, {{"folder": {folder!r}}}, log_dir={folder!r})
group.start()
child = asyncio.run(group.call(0, "leave_a_child"))
print(group.pid(0), group.pid(1), child, flush=True)
asyncio.run(asyncio.sleep(60))
"""


def test_kill_9_of_the_driver_ends_its_workers(tmp_path):
    code = DRIVER.format(here=str(HERE), folder=str(tmp_path))
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 3
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert gone(pids[0])
    assert gone(pids[1])
    assert (tmp_path / "closed-1").read_text() == "yes"  # it still closed what it had
    os.kill(pids[2], signal.SIGKILL)  # a child with no ties of its own; sandboxes die with their parent
