"""What holds of a sandbox whatever it is made of."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes.contract.backends import Backend


async def out(sandbox: Any, command: str, **kwargs: Any) -> str:
    done = await sandbox.exec(command, **kwargs)
    assert done.return_code == 0, done
    return (done.stdout or "").strip()


# -- commands ---------------------------------------------------------------------------------------------------------


async def test_streams_and_status(start: Any) -> None:
    s = await start()
    done = await s.exec("echo to-out; echo to-err >&2; exit 7")
    assert ((done.stdout or "").strip(), (done.stderr or "").strip(), done.return_code) == ("to-out", "to-err", 7)
    assert not (await s.exec("true")).stdout
    assert (await s.exec("not-a-program")).return_code == 127


async def test_a_command_is_one_bash_program(start: Any) -> None:
    s = await start()
    assert await out(s, """x='a b'; [[ $x == a* ]] && printf '%s|%s\\n' "$x" 'it'"'"'s'""") == "a b|it's"
    assert await out(s, "cat <<'END'\nline one\n$HOME \\n\nEND") == "line one\n$HOME \\n"


async def test_a_long_command(start: Any) -> None:
    s = await start()
    assert await out(s, f"v={'x' * 300_000}; echo ${{#v}}") == "300000"


async def test_a_lot_of_output_arrives_whole(start: Any) -> None:
    s = await start()
    text = await out(s, "python3 -c \"print('y' * 1_000_000)\"")
    assert len(text) == 1_000_000


async def test_output_that_is_not_text(start: Any) -> None:
    s = await start()
    done = await s.exec("printf 'a\\377b\\n'")
    assert done.return_code == 0
    assert (done.stdout or "").startswith("a")


async def test_workdir_and_env(start: Any) -> None:
    s = await start("FROM x\nENV FROM_IMAGE=1\nWORKDIR /opt/there\n", task={"env": {"FROM_TASK": "2"}})
    assert await out(s, "pwd; echo $FROM_IMAGE$FROM_TASK") == "/opt/there\n12"
    assert await out(s, 'pwd; echo "$X"', cwd="/tmp", env={"X": "a 'b' $c\ttab"}) == "/tmp\na 'b' $c\ttab"
    assert (await s.exec("true", cwd="/not/there")).return_code != 0
    s = await start(task={"workdir": "/srv/work"})
    assert await out(s, "pwd") == "/srv/work"


async def test_commands_side_by_side(start: Any) -> None:
    s = await start()
    assert await asyncio.gather(*(out(s, f"sleep 0.0{i}; echo {i}") for i in range(5))) == [str(i) for i in range(5)]


async def test_a_background_process_survives_its_command(start: Any) -> None:
    s = await start()
    began = time.monotonic()
    await out(s, "(while sleep 0.1; do echo x >> /tmp/ticks; done) > /dev/null 2>&1 & echo started")
    assert time.monotonic() - began < 30
    await asyncio.sleep(0.6)
    first = int(await out(s, "wc -l < /tmp/ticks"))
    await asyncio.sleep(0.6)
    assert int(await out(s, "wc -l < /tmp/ticks")) > first > 0


async def test_a_timeout_ends_the_whole_command(start: Any) -> None:
    s = await start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        await s.exec("sleep 4321 & sleep 1234", timeout_sec=1)
    assert time.monotonic() - began < 30
    await asyncio.sleep(0.3)
    assert await out(s, "pgrep -c sleep -f 'sleep (4321|1234)' || pgrep -fc '^sleep (4321|1234)' || true") in (
        "0",
        "0\n0",
    )
    assert await out(s, "echo alive") == "alive"


# -- users ------------------------------------------------------------------------------------------------------------


async def test_users(start: Any, backend: Backend) -> None:
    if not backend.has_users:
        pytest.skip(f"{backend.name} has one user here")
    s = await start("FROM x\nWORKDIR /app\nRUN echo 'dev:x:1234:1234::/home/dev:/bin/bash' >> /etc/passwd\n")
    assert await out(s, "id -u") == "0"
    assert await out(s, "id -u", user="dev") == "1234"
    assert await out(s, "id -u", user=1234) == "1234"
    assert (await s.exec("cat /etc/shadow", user="dev")).return_code != 0
    assert (await s.exec("echo x > /root/x", user="dev")).return_code != 0
    with s.with_default_user("dev"):
        assert await out(s, "id -u") == "1234"
        assert await out(s, "id -u", user="root") == "0"


# -- files ------------------------------------------------------------------------------------------------------------


async def test_a_file_goes_in_and_out(start: Any, tmp_path: Path) -> None:
    s = await start()
    source = tmp_path / "run.sh"
    source.write_bytes(b"#!/bin/sh\necho \xc3\xa4\n")
    source.chmod(0o755)
    await s.upload_file(source_path=source, target_path="/app/new folder/run.sh")
    assert await out(s, "sh '/app/new folder/run.sh'") == "ä"
    await s.upload_file(source_path=source, target_path="/app/new folder/run.sh")  # again, over itself
    await s.download_file(source_path="/app/new folder/run.sh", target_path=tmp_path / "back" / "run.sh")
    assert (tmp_path / "back/run.sh").read_bytes() == source.read_bytes()
    with pytest.raises(RuntimeError):
        await s.download_file(source_path="/app/none", target_path=tmp_path / "none")
    assert not (tmp_path / "none").exists()


async def test_a_large_file(start: Any, tmp_path: Path) -> None:
    s = await start()
    data = os.urandom(5 * 2**20)
    (tmp_path / "big").write_bytes(data)
    await s.upload_file(source_path=tmp_path / "big", target_path="/app/big")
    await s.download_file(source_path="/app/big", target_path=tmp_path / "big2")
    assert (tmp_path / "big2").read_bytes() == data


async def test_folders_go_in_and_out(start: Any, tmp_path: Path) -> None:
    s = await start()
    tree = tmp_path / "tree"
    (tree / "a/b").mkdir(parents=True)
    (tree / "empty").mkdir()
    (tree / "a/b/f.txt").write_text("deep")
    (tree / "run").write_text("#!/bin/sh\necho ran\n")
    (tree / "run").chmod(0o755)
    await s.upload_dir(source_dir=tree, target_dir="/app/up")
    assert await out(s, "/app/up/run; cat /app/up/a/b/f.txt; ls -d /app/up/empty") == "ran\ndeep/app/up/empty"
    (tree / "a/b/f.txt").write_text("new")
    await s.upload_dir(source_dir=tree, target_dir="/app/up")  # merged into what is there
    await out(s, "echo made > /app/up/made")
    await s.download_dir(source_dir="/app/up", target_dir=tmp_path / "down")
    found = {
        str(p.relative_to(tmp_path / "down")): p.read_text() for p in (tmp_path / "down").rglob("*") if p.is_file()
    }
    assert found == {"a/b/f.txt": "new", "run": "#!/bin/sh\necho ran\n", "made": "made\n"}
    assert (tmp_path / "down/empty").is_dir()
    assert (tmp_path / "down/run").stat().st_mode & 0o100


async def test_kinds_of_paths(start: Any) -> None:
    s = await start()
    await out(s, "mkdir d; touch f")
    assert await s.is_dir("/app/d")
    assert not await s.is_dir("/app/f")
    assert await s.is_file("/app/f")
    assert not await s.is_file("/app/d")


async def test_links_lead_nowhere_on_the_host(start: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("of the host")
    s = await start()
    await out(s, f"mkdir -p d/sub; echo inside > d/f; ln -s {secret} d/link; ln -s {tmp_path} d/folder; ln -s f d/good")
    await out(s, "mkfifo d/pipe; ln -s ../../../../../../etc d/sub/up")
    await s.download_dir(source_dir="/app/d", target_dir=tmp_path / "down")
    assert (tmp_path / "down/f").read_text() == "inside\n"
    links = [p for p in (tmp_path / "down").rglob("*") if p.is_symlink()]
    assert [p for p in links if not p.resolve().is_relative_to((tmp_path / "down").resolve())] == []
    reached = [p for p in (tmp_path / "down").rglob("*") if p.is_file() and "of the host" in p.read_text()]
    assert reached == []
    with pytest.raises(RuntimeError):
        await s.download_file(source_path="/app/d/link", target_path=tmp_path / "got")
    # and what is uploaded stays inside, whatever the agent made of the path
    marker = tmp_path / "marker"
    marker.write_text("up")
    await out(s, f"ln -s {tmp_path}/elsewhere /app/out")
    with contextlib.suppress(RuntimeError):
        await s.upload_file(source_path=marker, target_path="/app/out/marker")
    assert not (tmp_path / "elsewhere").exists()


# -- network ----------------------------------------------------------------------------------------------------------


async def test_no_network(start: Any) -> None:
    s = await start()
    assert (
        await out(s, "tail -n +3 /proc/net/dev | grep -v ' lo:' | grep -cv 'tunl0\\|sit0\\|gre\\|ip_vti' || true")
        == "0"
    )
    assert (await s.exec("timeout 3 bash -c 'exec 3<>/dev/tcp/192.0.2.1/80'")).return_code != 0


async def test_a_task_that_asks_for_a_refused_network_does_not_start(start: Any) -> None:
    with pytest.raises(Exception, match=r"sandbox\.network") as error:
        await start(task={"network_mode": "public"})
    assert type(error.value).__name__ == "SandboxBuildFailedError"


async def test_network_when_it_is_allowed_and_asked_for(start: Any) -> None:
    s = await start(task={"network_mode": "public"}, network=True)
    assert int(await out(s, "tail -n +3 /proc/net/dev | grep -vc ' lo:'")) >= 1
    s = await start(network=True)  # allowed, but the task does not ask
    assert (await s.exec("timeout 3 bash -c 'exec 3<>/dev/tcp/192.0.2.1/80'")).return_code != 0


# -- limits -----------------------------------------------------------------------------------------------------------


def needs(backend: Backend, limit: str) -> None:
    if limit not in backend.limits:
        pytest.skip(f"{backend.name} cannot limit {limit} here")


async def test_memory(start: Any, backend: Backend) -> None:
    needs(backend, "memory")
    s = await start(memory_mib=128)
    done = await s.exec("python3 -c 'x = bytearray(400 * 2**20); print(len(x))'", timeout_sec=30)
    assert done.return_code in (1, 137)
    assert not done.stdout
    assert await out(s, "echo alive") == "alive"


async def test_processes(start: Any, backend: Backend) -> None:
    needs(backend, "pids")
    s = await start(pids=40)
    bomb = (
        "import os, time\nn = 0\nfor _ in range(500):\n try:\n  if os.fork() == 0: time.sleep(60)\n  n += 1\n"
        " except OSError: break\nprint(n, flush=True)\nos._exit(0)"
    )
    done = await s.exec(f"python3 -c '{bomb}' 2>/dev/null | head -n 1", timeout_sec=20)
    assert 0 < int((done.stdout or "0").split()[0]) < 40


async def test_disk(start: Any, backend: Backend) -> None:
    needs(backend, "disk")
    s = await start(disk_mib=16)
    assert (await s.exec("dd if=/dev/zero of=/app/big bs=1M count=64")).return_code != 0
    assert int(await out(s, "stat -c %s /app/big")) <= 16 * 2**20
    assert await out(s, "echo alive") == "alive"


async def test_a_task_may_ask_for_less_but_not_for_more(start: Any, backend: Backend) -> None:
    needs(backend, "memory")
    code = "python3 -c 'x = bytearray(300 * 2**20); print(len(x))'"
    s = await start(task={"memory_mb": 4096}, memory_mib=128)
    assert (await s.exec(code, timeout_sec=30)).return_code in (1, 137)
    s = await start(task={"memory_mb": 128}, memory_mib=4096)
    assert (await s.exec(code, timeout_sec=30)).return_code in (1, 137)


async def test_the_lifetime_ends_it(start: Any, backend: Backend) -> None:
    needs(backend, "lifetime")
    s = await start(lifetime_s=2)
    with pytest.raises(RuntimeError, match="ended"):
        await s.exec("sleep 30")
    assert s.exhausted == "lifetime"
    with pytest.raises(RuntimeError, match="not running"):
        await s.exec("true")


async def test_the_kernel_is_out_of_reach(start: Any, backend: Backend) -> None:
    if not backend.isolates:
        pytest.skip("the service's own affair")
    s = await start()
    for command in ("mount -t tmpfs x /mnt", "mknod /tmp/null c 1 3"):
        assert (await s.exec(command)).return_code != 0, command
    path = "/proc/sys/vm/swappiness"  # the value that is there already, so that a hole would change nothing
    assert (await s.exec(f"v=$(cat {path}) && echo $v > {path}")).return_code != 0
    assert "NoNewPrivs:\t1" in await out(s, "cat /proc/self/status")


# -- before the verifier, and after everything ------------------------------------------------------------------------


async def test_a_shared_verifier_finds_no_process_and_no_file_of_the_agents(start: Any, backend: Backend) -> None:
    s = await start()
    if not backend.shares_with_verifier:
        with pytest.raises(Exception, match="cannot be trusted"):
            await s.settle_for_verifier(None)
        return
    await out(s, "echo solved > /app/solution; mkdir -p /tests; echo planted > /tests/conftest.py")
    await out(s, "echo 1 > /logs/verifier/reward.txt")
    await out(s, "(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' > /dev/null 2>&1 &)")
    await s.settle_for_verifier(None)
    assert await out(s, "cat /app/solution") == "solved"
    await asyncio.sleep(0.3)
    assert await out(s, "ls -A /logs/verifier; ls -A /tests 2>/dev/null || true") == ""
    await out(s, "echo 0.5 > /logs/verifier/reward.txt")


async def test_a_verifier_starts_afresh_with_the_work_and_nothing_else(start: Any, backend: Backend) -> None:
    """Where a sandbox cannot change over by itself, Harbor's separate verifier environment does the same."""
    from rl360.sandboxes.artifact_paths import Artifact

    s = await start("FROM x\nWORKDIR /app\nRUN echo old > /app/kept && echo old > /app/removed && mkdir /data\n")
    if not hasattr(s, "start_afresh"):
        pytest.skip("Harbor's separate verifier environment is used")
    await out(
        s, "mkdir 'a b'; echo new > 'a b/c'; chmod 4750 'a b/c'; rm removed; ln -s 'a b/c' good; ln -s /etc/passwd bad"
    )
    await out(s, "mkfifo pipe; echo data > /data/made; echo skip > /data/x.log; echo artifact > /logs/artifacts/f")
    await out(s, "printf '#!/bin/sh\\necho fooled\\n' > /usr/local/bin/python3; chmod +x /usr/local/bin/python3")
    await out(
        s, "mkdir -p /tests; echo planted > /tests/conftest.py; echo 1 > /logs/verifier/reward.txt; echo x > /root/x"
    )
    await out(s, "echo x > /root/x")
    await out(s, "(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done' > /dev/null 2>&1 &)")
    await s.start_afresh([Artifact("/data", exclude=("*.log",))], None)
    assert await out(s, "cat kept 'a b/c' good /data/made /logs/artifacts/f") == "old\nnew\nnew\ndata\nartifact"
    assert await out(s, "stat -c %a 'a b/c'") == "750"
    assert await out(s, "ls -d removed bad pipe /data/x.log /tests/conftest.py /root/x 2>/dev/null || true") == ""
    assert await out(s, "python3 -c 'print(1 + 1)'") == "2"
    await asyncio.sleep(0.2)
    assert await out(s, "ls -A /logs/verifier; stat -c %a /logs/verifier") == "755"


async def test_after_the_stop_nothing_runs(start: Any) -> None:
    s = await start()
    began = time.monotonic()
    await s.stop(delete=True)
    assert time.monotonic() - began < 9
    with pytest.raises(RuntimeError, match=r"not running|not found|Please"):
        await s.exec("true")
    await s.stop(delete=True)  # again is harmless


async def test_a_dockerfile_that_fails_is_a_build_failure(start: Any, backend: Backend) -> None:
    with pytest.raises(Exception, match=r"fail|exit|code|RUN") as error:
        await start("FROM x\nRUN echo told >&2; exit 3\n")
    assert type(error.value).__name__ == "SandboxBuildFailedError"


async def test_copied_files_are_in_the_image(start: Any, backend: Backend) -> None:
    if not backend.has_contexts:
        pytest.skip("the stand-in has no storage for build contexts")
    s = await start("FROM x\nWORKDIR /app\nCOPY data.txt .\n", files={"data.txt": "one\n"})
    assert await out(s, "cat data.txt") == "one"
