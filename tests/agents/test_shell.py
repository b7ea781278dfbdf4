"""A shell that remembers: what lasts between commands, what is cut, what is ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl360.agents.shell import SandboxFileError, Shell
from tests.agents.kit import LocalEnvironment, Result


@pytest.fixture
def environment(tmp_path: Path) -> LocalEnvironment:
    return LocalEnvironment(tmp_path)


def shell(environment: LocalEnvironment, timeout_s: float = 10.0, max_output_bytes: int = 1000) -> Shell:
    return Shell(environment, timeout_s=timeout_s, max_output_bytes=max_output_bytes)  # type: ignore[arg-type]


async def test_directory_and_exported_variables_last(environment: LocalEnvironment) -> None:
    one = shell(environment)
    assert (await one.run("mkdir 'a b'; cd 'a b'; export X='1 \"2\" $3'; Y=4")).code == 0
    done = await one.run('pwd; echo "$X"; echo "[$Y]"')
    assert done.output == f'{environment.app}/a b\n1 "2" $3\n[]\n'


async def test_what_a_failed_command_changed_lasts_too(environment: LocalEnvironment) -> None:
    one = shell(environment)
    assert (await one.run("mkdir d; cd d; exit 7")).code == 7
    assert (await one.run("basename $PWD; false")).output == "d\n"
    assert (await one.run("cd /nowhere")).code == 1
    assert (await one.run("basename $PWD")).output == "d\n"


async def test_output_and_errors_come_in_order(environment: LocalEnvironment) -> None:
    done = await shell(environment).run("echo 1; echo 2 >&2; echo 3")
    assert (done.code, done.output) == (0, "1\n2\n3\n")


@pytest.mark.parametrize("command", ["if", "echo 'open", "cat <<EOF\nx"])
async def test_a_command_that_is_no_bash(environment: LocalEnvironment, command: str) -> None:
    one = shell(environment)
    await one.run(command)
    assert (await one.run("echo fine")).output == "fine\n"


async def test_long_output_is_cut_in_the_middle(environment: LocalEnvironment) -> None:
    done = await shell(environment, max_output_bytes=11).run("printf 'abcdefghijklmnopqrstuvwxyz'")
    assert done.output == "abcdef\n[... 15 bytes left out ...]\nvwxyz"
    exact = await shell(environment, max_output_bytes=26).run("printf 'abcdefghijklmnopqrstuvwxyz'")
    assert exact.output == "abcdefghijklmnopqrstuvwxyz"


async def test_a_command_out_of_time_is_ended_and_what_it_said_is_kept(environment: LocalEnvironment) -> None:
    one = shell(environment, timeout_s=0.4)
    began = time.monotonic()
    done = await one.run("echo before; sleep 30; echo after")
    assert time.monotonic() - began < 5
    assert (done.timed_out, done.code) == (True, 124)
    assert done.output.startswith("before\n")
    assert "after" not in done.output
    assert (await one.run("echo fine")).output == "fine\n"


async def test_one_that_ignores_the_signal_is_killed(environment: LocalEnvironment) -> None:
    began = time.monotonic()
    done = await shell(environment, timeout_s=0.3).run("trap '' TERM; while :; do sleep 0.1; done")
    assert (done.timed_out, done.code) == (True, 137)
    assert time.monotonic() - began < 5


async def test_a_code_of_124_is_no_timeout(environment: LocalEnvironment) -> None:
    done = await shell(environment).run("exit 124")
    assert (done.code, done.timed_out) == (124, False)


async def test_background_processes_live_on_and_hold_nothing_up(environment: LocalEnvironment) -> None:
    one = shell(environment)
    waits = "until [ -e go ]; do sleep 0.02; done"  # it could not end before the next command
    assert (await one.run(f"({waits}; echo done >late) & echo started")).output == "started\n"
    assert (await one.run("touch go; until [ -s late ]; do sleep 0.02; done; cat late")).output == "done\n"


async def test_the_environments_own_deadline_and_its_death(environment: LocalEnvironment) -> None:
    async def timed_out(*_: object, **__: object) -> None:
        raise RuntimeError("Command timed out after 3 seconds")

    async def gone(*_: object, **__: object) -> None:
        raise RuntimeError("the sandbox is not running")

    environment.exec = timed_out  # type: ignore[method-assign, assignment]
    assert (await shell(environment).run("x")).timed_out
    environment.exec = gone  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="not running"):
        await shell(environment).run("x")


async def test_strange_commands(environment: LocalEnvironment) -> None:
    one = shell(environment)
    assert (await one.run("echo a\0b")).output == "ab\n"
    assert (await one.run("echo \udcff")).output == "?\n"
    assert "too long" in (await one.run("x" * 200_000)).output


@pytest.mark.parametrize("said", ["²", "٣", "9" * 5000, "", "-1"])
async def test_a_code_that_the_policy_forged_is_no_code(environment: LocalEnvironment, said: str) -> None:
    """What it finds when the policy has replaced the tools that the shell itself uses."""

    async def forged(*_: object, **__: object) -> Result:
        return Result(f"{said}\nx", "", 0)

    environment.exec = forged  # type: ignore[method-assign, assignment]
    done = await shell(environment).run("true")
    assert (done.code, done.output) == (1, f"{said}\nx"[:1000])


@pytest.mark.parametrize("said", ["a", "é", "abcde"])
async def test_a_broken_base64_is_a_file_that_cannot_be_read(environment: LocalEnvironment, said: str) -> None:
    async def forged(*_: object, **__: object) -> Result:
        return Result(f"0\n{said}", "", 0)

    environment.exec = forged  # type: ignore[method-assign, assignment]
    with pytest.raises(SandboxFileError, match="base64 does not work"):
        await shell(environment).read_file("f")


async def test_the_length_of_a_command_is_in_bytes(environment: LocalEnvironment) -> None:
    """One argument of a process may have 128 KiB."""
    assert "too long" in (await shell(environment).run(f"echo {'😀' * 40_000} >f")).output


async def test_a_broken_state_is_no_harm(environment: LocalEnvironment) -> None:
    one = shell(environment)
    await one.run("true")
    (environment.folder / "state" / "state").write_text("if (((\n")
    assert (await one.run("echo fine")).output == "fine\n"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300) | st.integers(40_000, 150_000).map(lambda n: bytes(i % 251 for i in range(n))))
async def test_files_come_back_as_they_were(environment: LocalEnvironment, data: bytes) -> None:
    one = shell(environment)
    await one.write_file("in/it's a file", data)
    assert await one.read_file("in/it's a file") == data


@pytest.mark.parametrize(("path", "why"), [("none", "no such file"), (".", "is a folder"), ("big", "is too long")])
async def test_files_that_cannot_be_read(environment: LocalEnvironment, path: str, why: str) -> None:
    (environment.app / "big").write_bytes(bytes(1_000_001))
    with pytest.raises(SandboxFileError, match=why):
        await shell(environment).read_file(path)


async def test_files_that_cannot_be_written(environment: LocalEnvironment) -> None:
    (environment.app / "plain").write_text("")
    for path, data in [("plain/x", b""), (".", b"x"), ("big", bytes(1_000_001))]:
        with pytest.raises(SandboxFileError):
            await shell(environment).write_file(path, data)
