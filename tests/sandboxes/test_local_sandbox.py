"""The local sandbox for real: commands, users, files, limits, isolation."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl360.sandboxes.artifact_paths import Artifact
from rl360.sandboxes.local import cgroups, namespace, rootfs, transfer
from rl360.sandboxes.local.host import close_hosts
from rl360.sandboxes.local.namespace import SandboxDied, SandboxProcess

pytestmark = pytest.mark.sandbox

USERNS = [pytest.param(False, id="as-root", marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root"))]
USERNS += [pytest.param(True, id="unprivileged")]


async def out(sandbox: Any, command: str, **kwargs: Any) -> str:
    done = await sandbox.exec(command, **kwargs)
    assert done.return_code == 0, done
    return (done.stdout or "").strip()


@pytest.mark.parametrize("unprivileged", USERNS)
async def test_commands(start_sandbox: Any, unprivileged: bool) -> None:
    s = await start_sandbox("FROM x\nENV FROM_IMAGE=1\nWORKDIR /app\n", unprivileged=unprivileged)
    assert await out(s, "pwd; id -u; echo $FROM_IMAGE; hostname") == "/app\n0\n1\nsandbox"
    assert await out(s, "echo $X; pwd", env={"X": "a 'b' $c"}, cwd="/tmp") == "a 'b' $c\n/tmp"
    done = await s.exec("echo to-out; echo to-err >&2; exit 7")
    assert (done.stdout, done.stderr, done.return_code) == ("to-out\n", "to-err\n", 7)
    assert (await s.exec("cd /")).stdout is None
    assert (await s.exec("true", cwd="/not/there")).return_code == 1
    long = "x" * 300_000  # longer than one argument of the kernel may be
    assert await out(s, f"v={long}; echo ${{#v}}") == "300000"
    assert await out(s, "printf '\ud800' | wc -c") == "3"  # half of a surrogate pair, as a model may write it
    results = await asyncio.gather(*(out(s, f"sleep 0.0{i}; echo {i}") for i in range(6)))
    assert results == [str(i) for i in range(6)]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    ("command", "exhausted"),
    [("true", ""), ("rm /etc/passwd", "sandbox"), ("echo daemon:x:one:one::/: > /etc/passwd", "sandbox")],
)
async def test_a_user_that_the_agent_took_away(start_sandbox: Any, command: str, exhausted: str) -> None:
    """A user that the image lacks is the task's mistake; one that is gone is the agent's doing."""
    s = await start_sandbox(unprivileged=False)
    await out(s, command)
    with pytest.raises(RuntimeError, match="passwd"):
        await s.exec("true", user="daemon" if exhausted else "nobody-at-all")
    assert s.exhausted == exhausted


async def test_background_processes_survive_between_commands(start_sandbox: Any) -> None:
    s = await start_sandbox()
    began = time.monotonic()
    await out(s, "(while sleep 0.05; do echo x >> /tmp/ticks; done) & echo started")
    assert time.monotonic() - began < 30  # it did not wait for the loop
    await asyncio.sleep(0.4)
    first = int(await out(s, "wc -l < /tmp/ticks"))
    await asyncio.sleep(0.4)
    assert int(await out(s, "wc -l < /tmp/ticks")) > first > 0


@pytest.mark.parametrize("unprivileged", USERNS)
async def test_a_timeout_kills_the_process_group(start_sandbox: Any, unprivileged: bool) -> None:
    s = await start_sandbox(unprivileged=unprivileged)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.3 seconds"):
        await s.exec("sleep 1234 & sleep 4321", timeout_sec=0.3)
    await asyncio.sleep(0.1)
    assert await out(s, "pgrep -c sleep || true") == "0"
    assert await out(s, "echo alive") == "alive"


async def test_a_command_that_kills_its_own_group_is_answered(start_sandbox: Any) -> None:
    s = await start_sandbox()
    assert (await s.exec("kill -9 0", timeout_sec=10)).return_code == 137


async def test_signals_are_at_their_defaults(start_sandbox: Any) -> None:
    s = await start_sandbox()
    text = await out(s, "grep SigIgn /proc/self/status")
    standard = (1 << 31) - 1  # 1 to 31; a C library may be started with 32 and 33, its own, ignored
    assert int(text.split()[1], 16) & standard == 0


async def test_users(start_sandbox: Any) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root")
    s = await start_sandbox("FROM x\nRUN echo 'dev:x:1234:1234::/home/dev:/bin/bash' >> /etc/passwd\n")
    assert await out(s, "id -u; id -g; echo $HOME", user="dev") == "1234\n1234\n/home/dev"
    assert await out(s, "id -u; id -g", user=4321) == "4321\n0"
    assert await out(s, "id -un; grep CapEff /proc/self/status", user="nobody") == "nobody\nCapEff:\t0000000000000000"
    assert (await s.exec("cat /etc/shadow", user="nobody")).return_code != 0
    assert (await s.exec("echo x > /root/x", user="nobody")).return_code != 0
    with pytest.raises(RuntimeError, match="not in the sandbox's /etc/passwd"):
        await s.exec("id", user="stranger")
    with s.with_default_user("nobody"):
        assert await out(s, "id -un") == "nobody"
        assert await out(s, "id -un", user="root") == "root"


async def test_an_unprivileged_sandbox_has_one_user(start_sandbox: Any) -> None:
    s = await start_sandbox(unprivileged=True)
    with pytest.raises(RuntimeError, match="one user"):
        await s.exec("id", user="nobody")


@pytest.mark.parametrize("unprivileged", USERNS)
async def test_isolation(start_sandbox: Any, unprivileged: bool, tmp_path: Path) -> None:
    s = await start_sandbox(unprivileged=unprivileged)
    for command in (
        "mount -t tmpfs x /mnt", "mknod /tmp/null c 1 3", "unshare -Ur true", "unshare -m true", "umount /proc",
        "mount -o remount,rw /proc/sys", "umount /proc/sys", "ls /proc/acpi/*", "head -c 1 /proc/kcore | grep -q .",
    ):  # fmt: skip
        assert (await s.exec(command)).return_code != 0, command
    for name in ("kernel/panic", "kernel/core_pattern", "vm/swappiness", "fs/file-max"):
        path = f"/proc/sys/{name}"  # the value that is there already, so that a hole would change nothing on the host
        done = await s.exec(f'v=$(cat {path}) && echo "$v" > {path}')
        assert done.return_code != 0, path
        assert "Read-only" in (done.stderr or ""), done
    status = await out(s, "cat /proc/self/status")
    rows = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (rows["NoNewPrivs"], rows["Seccomp"]) == ("1", "2")
    assert int(rows["CapEff"], 16) & (1 << 21 | 1 << 27 | 1 << 19 | 1 << 16 | 1 << 12 | 1 << 13) == 0  # SYS_ADMIN, ...
    assert await out(s, "ls -A /root /usr/local/etc 2>/dev/null | grep -v : || true") == ""
    assert await out(s, "ls -A /home") == "agent"
    assert await out(s, "cut -d: -f2 /etc/shadow | sort -u") == "*" if os.getuid() == 0 else True
    assert (await s.exec(f"ls {tmp_path}")).return_code != 0
    assert await out(s, "ls /sys") == ""
    assert "1" in (await out(s, "ps -e -o pid=")).split()
    assert len((await out(s, "ps -e -o pid=")).split()) < 10  # its own processes only
    assert (await out(s, "ls /proc/self/fd")).split() == ["0", "1", "2", "3"]  # 3 is ls's own: nothing of the keeper's


@pytest.mark.parametrize("unprivileged", USERNS)
async def test_network_is_off(start_sandbox: Any, unprivileged: bool) -> None:
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    probe = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
    async with server:
        s = await start_sandbox(unprivileged=unprivileged)
        assert (await s.exec(probe)).return_code != 0
        assert await out(s, "tail -n +3 /proc/net/dev | grep -v ' lo:' | wc -l") == "0"
        # allowed by the configuration, but the task does not ask
        s = await start_sandbox(unprivileged=unprivileged, network=True)
        assert (await s.exec(probe)).return_code != 0
        s = await start_sandbox(task={"network_mode": "public"}, unprivileged=unprivileged, network=True)
        assert (await s.exec(probe)).return_code == 0


async def test_a_task_that_asks_for_a_refused_network_does_not_start(start_sandbox: Any) -> None:
    with pytest.raises(Exception, match=r"sandbox\.network") as error:
        await start_sandbox(task={"network_mode": "public"})
    assert type(error.value).__name__ == "SandboxBuildFailedError"


async def test_a_memory_bomb_is_killed_and_the_sandbox_lives(start_sandbox: Any) -> None:
    s = await start_sandbox(memory_mib=128)
    done = await s.exec("python3 -c 'x = bytearray(400 * 2**20); print(len(x))'", timeout_sec=30)
    assert done.return_code in (1, 137)  # prlimit: MemoryError; control group: killed
    assert done.stdout is None
    assert await out(s, "echo alive") == "alive"
    await s.stop(delete=True)
    own = "memory" if "memory" in cgroups.find().parents else ""
    assert (s.exhausted, s.interrupted) == (own, "")  # its own limit, not the machine's lack


async def test_a_fork_bomb_is_contained(start_sandbox: Any) -> None:
    s = await start_sandbox(pids=40)
    bomb = "import os, time\nfor _ in range(500):\n try: os.fork() or time.sleep(60)\n except OSError: time.sleep(60)"
    with pytest.raises(RuntimeError):
        await s.exec(f"python3 -c '{bomb}'", timeout_sec=1)
    await s.settle_for_verifier(None)
    # Killed, and each gone when it is reaped: what had survived would sleep for a minute.
    deadline = time.monotonic() + 20.0
    while len(left := (await out(s, "ps -e -o pid=")).split()) > 6:
        assert time.monotonic() < deadline, left


async def test_a_full_disk_is_contained_and_said(start_sandbox: Any) -> None:
    s = await start_sandbox(disk_mib=16)
    done = await s.exec("dd if=/dev/zero of=/app/big bs=1M count=64")
    assert done.return_code != 0
    assert "No space left" in (done.stderr or "")
    assert await out(s, "echo alive") == "alive"
    await s.stop(delete=True)
    assert s.exhausted == "disk"


async def test_no_disk_limit_writes_to_a_folder_that_goes(start_sandbox: Any, sandbox_cache: Path) -> None:
    s = await start_sandbox(disk_mib=0)
    await out(s, "echo kept > /app/file")
    assert list((sandbox_cache / "owners").glob("*/*/upper0/app/file"))
    await s.stop(delete=True)
    assert not list((sandbox_cache / "owners").glob("*/*/upper0"))


async def test_cpu_limit(start_sandbox: Any) -> None:
    from rl360.sandboxes.local import cgroups

    if "cpu" not in cgroups.find().parents:
        pytest.skip("no cpu controller")
    s = await start_sandbox(cpus=0.2)
    code = "import time\nt = time.monotonic() + 1\nwhile time.monotonic() < t: pass\nprint(time.process_time())"
    assert float(await out(s, f"python3 -c '{code}'")) < 0.6  # a fifth of a second, and the slack of the period


async def test_the_lifetime_ends_it(start_sandbox: Any) -> None:
    s = await start_sandbox(lifetime_s=0.7)
    with pytest.raises(RuntimeError, match="sandbox ended"):
        await s.exec("sleep 30")
    assert s.exhausted == "lifetime"
    with pytest.raises(RuntimeError, match="not running"):
        await s.exec("true")


async def test_killing_the_shell_is_a_runtime_error(start_sandbox: Any) -> None:
    s = await start_sandbox()
    with suppress(RuntimeError):
        await s.exec("kill -9 2", timeout_sec=10)  # its own answer may still arrive
    with pytest.raises(RuntimeError, match=r"sandbox ended|not running"):
        await s.exec("sleep 1", timeout_sec=10)


async def test_files_go_in_and_out(start_sandbox: Any, tmp_path: Path) -> None:
    s = await start_sandbox()
    source = tmp_path / "solution.py"
    source.write_text("print(1)")
    await s.upload_file(source_path=source, target_path="/app/new/solution.py")
    assert await out(s, "python3 new/solution.py; stat -c %u new/solution.py") == "1\n0"
    await out(s, "ln -s /etc/passwd link; ln -s /etc shadow_dir; mkdir -p d/e; echo x > d/e/f; mkfifo d/pipe")
    await s.download_file(source_path="/app/link", target_path=tmp_path / "passwd")
    assert "agent:x:1000" in (tmp_path / "passwd").read_text()  # the sandbox's, not the host's
    await s.download_dir(source_dir="/app", target_dir=tmp_path / "app")
    assert (tmp_path / "app/d/e/f").read_text() == "x\n"
    assert not (tmp_path / "app/shadow_dir").exists()
    with pytest.raises(RuntimeError, match="transfer"):
        await s.download_file(source_path="/app/none", target_path=tmp_path / "none")
    assert await s.is_dir("/app/d")
    assert not await s.is_file("/app/d")


async def test_settling_kills_leftovers_and_empties_the_verifiers_folders(start_sandbox: Any) -> None:
    s = await start_sandbox()
    await out(s, "mkdir /tests; echo planted > /tests/conftest.py; echo 1 > /logs/verifier/reward.txt")
    await out(s, "(setsid nohup sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &)")
    await s.settle_for_verifier(None)
    assert await out(s, "ls -A /logs/verifier; ls -d /tests 2>/dev/null || true") == ""
    await asyncio.sleep(0.2)
    assert await out(s, "ls -A /logs/verifier") == ""
    assert await out(s, "stat -c %a /logs/verifier") == "755"


async def test_layers_are_built_once_and_shared(start_sandbox: Any, sandbox_cache: Path) -> None:
    run = "cat data.txt > made && date +%N >> made && rm /etc/issue"
    text = f"FROM x\nWORKDIR /opt/w\nCOPY data.txt .\nRUN {run}\nUSER agent\n"
    before = set((sandbox_cache / "layers").glob("*"))
    first = await start_sandbox(text, files={"data.txt": "one\n"})
    second = await start_sandbox(text, files={"data.txt": "one\n"})
    third = await start_sandbox(text, files={"data.txt": "two\n"})
    made = [await out(s, "cat /opt/w/made") for s in (first, second, third)]
    assert made[0] == made[1]
    assert made[2].startswith("two")
    assert await out(first, "id -un; pwd; ls /etc/issue 2>/dev/null || echo gone") == "agent\n/opt/w\ngone"
    layers = {p for p in set((sandbox_cache / "layers").glob("*")) - before if p.suffix != ".lock"}
    assert len(layers) == 2
    assert all(p.is_dir() and ".tmp" not in p.name for p in layers)


async def test_a_failed_step_says_which_and_leaves_no_layer(start_sandbox: Any, sandbox_cache: Path) -> None:
    with pytest.raises(Exception, match="echo why >&2; exit 3") as error:
        await start_sandbox("FROM x\nRUN echo why >&2; exit 3\n")
    assert type(error.value).__name__ == "SandboxBuildFailedError"
    assert "ended with 3" in str(error.value)
    assert not [p for p in (sandbox_cache / "layers").glob("*") if ".tmp" in p.name]


async def test_the_environment_is_not_in_the_hosts_process_list(start_sandbox: Any) -> None:
    await start_sandbox("FROM x\nENV TOKEN=hush-hush-1\n")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                assert b"hush-hush-1" not in (entry / "cmdline").read_bytes()
            except OSError:
                continue


AS_A_USER = """
import asyncio, os, sys
from pathlib import Path
from rl360.sandboxes import abilities
from rl360.sandboxes.local import cgroups, layers, rootfs
from rl360.sandboxes.local.namespace import Keeper, SandboxProcess
from rl360.sandboxes.local.plan import Plan

async def main():
    assert os.geteuid() == 1000, os.geteuid()
    report = abilities.probe()
    assert report.userns and not report.problems, report
    cache = Path(sys.argv[1])
    base, hierarchy = rootfs.resolve("auto", cache), cgroups.Hierarchy(0, {}, "none for users")
    keeper = Keeper(cache / "owners", "user", hierarchy)
    limits = cgroups.Limits(memory_mib=256, pids=0)
    plan = Plan(layers.base_trees(base), report.root_mode, True, hierarchy, limits, 64, 60.0, False, masks=base.masks)
    sandbox = SandboxProcess(keeper, plan)
    await sandbox.start()
    done = await sandbox.run("id -u; echo x > /usr/bin/new && cat /usr/bin/new; ulimit -d; mount -t tmpfs x /mnt")
    print(done)
    bomb = await sandbox.run("python3 -c 'bytearray(400 * 2**20)'")
    print("MemoryError" in bomb.stderr)
    await sandbox.stop()
    keeper.close()

asyncio.run(main())
"""


def test_without_root_at_all(tmp_path: Path) -> None:
    """As uid 1000 without any capability: in a user namespace of its own when the tests run as root."""
    command = [sys.executable, "-c", AS_A_USER, str(tmp_path / "cache")]
    if os.getuid() == 0:
        command = ["bwrap", "--unshare-user", "--uid", "1000", "--gid", "1000", "--dev-bind", "/", "/", "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    result, memory_error = done.stdout.strip().splitlines()
    assert "return_code=32" in result  # mount's own code for a refusal
    assert f"stdout='0\\nx\\n{256 * 1024}\\n'" in result
    assert memory_error == "True"
    assert not Path("/usr/bin/new").exists()


async def test_a_fresh_sandbox_has_the_artifacts_only(start_sandbox: Any) -> None:
    text = "FROM x\nRUN mkdir -p /srv/data && echo image > /srv/data/file\nWORKDIR /app\nRUN echo image > kept\n"
    s = await start_sandbox(text)
    await out(s, "echo mine | tee file /srv/data/new /srv/lost /usr/lost /tmp/lost /logs/artifacts/log; rm /etc/issue")
    await out(s, "(setsid sleep 1234 &)")
    await s.start_afresh([Artifact("/srv/data"), Artifact("relative.txt")], None)
    assert await out(s, "cat file kept /srv/data/* /logs/artifacts/log") == "mine\nimage\nimage\nmine\nmine"
    assert await out(s, "ls /srv/lost /usr/lost /tmp/lost 2>/dev/null | wc -l; ls /etc/issue") == "0\n/etc/issue"
    assert (await s.exec("pgrep -c sleep")).stdout == "0\n"
    assert await out(s, "pwd; stat -c %a /logs/verifier; ls -A /logs/verifier") == "/app\n755"
    assert (s.exhausted, s.carried.num_refused) == ("", 0)


async def test_a_fresh_sandbox_without_overlayfs(start_sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl360.sandboxes.local import host

    probe = host.abilities.probe
    monkeypatch.setattr(host.abilities, "probe", lambda **kw: replace(probe(**kw), root_mode="copy"))
    s = await start_sandbox("FROM x\nWORKDIR /app\nRUN echo image > kept\n", base="host")
    await out(s, "echo mine > file; rm kept; echo x > /etc/issue")
    assert (await s.exec("echo x > /usr/bin/env")).return_code != 0
    await s.start_afresh([], None)
    assert await out(s, "ls; cat file; cat /etc/issue | grep -c ^x$ || true") == "file\nmine\n0"
    for path in rootfs._private(["usr"])[:5] if os.getuid() == 0 else []:
        assert (await s.exec(f"ls -A /{path} | grep . || cat /{path} | grep .")).return_code != 0, path


async def test_too_many_artifacts_end_the_trial_and_say_so(start_sandbox: Any) -> None:
    s = await start_sandbox(disk_mib=32, artifacts_mib=1)
    await out(s, "head -c 1000000 /dev/zero > a; head -c 1000000 /dev/zero > b")
    with pytest.raises(RuntimeError, match="more bytes than the limit"):
        await s.start_afresh([], None)
    assert s.exhausted == "artifacts"


async def test_a_working_folder_that_is_the_system_cannot_be_carried(start_sandbox: Any) -> None:
    s = await start_sandbox("FROM x\nWORKDIR /usr/lib\n")
    with pytest.raises(Exception, match="part of, the system") as error:
        await s.start_afresh([], None)
    assert type(error.value).__name__ == "SandboxBuildFailedError"


async def test_no_working_folder_means_app_and_a_home_has_no_python_hooks(start_sandbox: Any) -> None:
    s = await start_sandbox("FROM x\n")
    await out(s, "mkdir /app && echo mine > /app/file && echo lost > /file")
    await s.start_afresh([Artifact("/root")], None)
    assert await out(s, "cat /app/file; ls /file 2>/dev/null || true; echo $PYTHONNOUSERSITE") == "mine\n1"


async def test_the_healthcheck_runs_in_the_fresh_sandbox_too(start_sandbox: Any) -> None:
    s = await start_sandbox(task={"healthcheck": {"command": "echo x >> /healthy"}})
    assert (await s.exec("ls /healthy")).return_code != 0  # Harbor's trial runs it, not start
    await s.start_afresh([], None)
    assert await out(s, "cat /healthy") == "x"


async def test_a_flooded_control_channel_ends_the_sandbox(start_sandbox: Any) -> None:
    s = await start_sandbox()
    with pytest.raises(RuntimeError, match="control channel"):
        await s.exec("yes 'x 1 0' > /proc/2/fd/3", timeout_sec=20)
    assert s.exhausted == "sandbox"


@pytest.mark.parametrize(
    ("who", "expected"),
    [
        ("inside", ("sandbox", "")),
        ("inside, and nothing else runs", ("sandbox", "")),
        ("outside", ("", "signal 9 from outside")),
        ("outside, the first process", ("", "its first process was killed from outside")),
    ],
)
async def test_who_ended_it(start_sandbox: Any, who: str, expected: tuple[str, str]) -> None:
    """What the policy did is scored 0; what happened to it is tried again."""
    s = await start_sandbox()
    if who.startswith("outside"):
        monitor = _monitor_of(s)
        (first,) = monitor.children()
        asyncio.get_running_loop().call_later(0.2, (monitor if who == "outside" else first).kill)
    command = {"inside": "kill -9 2; sleep 20", "inside, and nothing else runs": "kill -9 -1"}.get(who, "sleep 20")
    with pytest.raises(RuntimeError):
        await s.exec(command, timeout_sec=25)
    assert (s.exhausted, s.interrupted) == expected


@pytest.mark.parametrize("first", [False, True], ids=["bubblewrap", "the first process"])
async def test_a_limit_that_it_had_outlived_did_not_end_it(start_sandbox: Any, first: bool) -> None:
    """A program ran into the memory limit, the agent went on, and then something outside killed the sandbox."""
    if "memory" not in cgroups.find().parents:
        pytest.skip("no memory controller")
    s = await start_sandbox(memory_mib=64)
    await s.exec("python3 -c 'len(b\"x\" * (1 << 27))'")
    monitor = _monitor_of(s)
    (monitor.children()[0] if first else monitor).kill()
    await _until(lambda: not s._running().running)
    await s.stop(delete=True)
    assert s.exhausted == ""
    assert "from outside" in s.interrupted


@pytest.mark.parametrize("first", [False, True], ids=["bubblewrap", "the first process"])
async def test_what_ended_before_the_keeper_was_asked_was_not_ended_by_it(start_sandbox: Any, first: bool) -> None:
    """The keeper stands still, and finds the end and the request to end it at the same time."""
    s = await start_sandbox()
    keeper, monitor = psutil.Process(s._host.keeper._process.pid), _monitor_of(s)
    target = monitor.children()[0] if first else monitor
    keeper.suspend()
    target.kill()
    await _until(lambda: monitor.status() == psutil.STATUS_ZOMBIE)
    asyncio.get_running_loop().call_later(0.3, keeper.resume)
    await s.stop(delete=True)
    assert s.exhausted == ""
    assert "from outside" in s.interrupted


async def test_a_first_process_that_was_dying_when_the_keeper_was_asked(start_sandbox: Any) -> None:
    """Bubblewrap does not know yet when something else, such as the agent's time-out, asks for the sandbox's end."""
    s = await start_sandbox()
    monitor = _monitor_of(s)
    (first,) = monitor.children()
    monitor.suspend()
    first.kill()
    await _until(lambda: first.status() == psutil.STATUS_ZOMBIE)
    asyncio.get_running_loop().call_later(0.3, monitor.resume)
    await s.stop(delete=True)
    assert (s.exhausted, s.interrupted) == ("", "its first process was killed from outside")


async def test_nothing_is_left_of_a_killed_keeper(start_sandbox: Any) -> None:
    """Its sandboxes end with it. The worker removes what the keeper would have, and goes on with another one."""
    s = await start_sandbox()
    host = s._host
    name = host.keeper.owner.name
    groups = [g for parent in set(host.hierarchy.parents.values()) for g in Path(parent).glob(f"*{name}*")]
    host.keeper._process.kill()
    await s.stop(delete=True)
    assert s.interrupted == "the process that kept it ended"
    await _until(lambda: not any(group.exists() for group in groups))
    after = await start_sandbox()
    assert await out(after, "echo alive") == "alive"
    await after.stop(delete=True)
    folders = [host.keeper.owner.folder, *(keeper.owner.folder for keeper in host._killed)]
    close_hosts()
    assert not any(folder.exists() for folder in folders)


async def test_a_command_has_no_descriptors_but_its_own(start_sandbox: Any) -> None:
    s = await start_sandbox()
    assert await out(s, "cd /proc/self/fd && echo *") == "0 1 2 3"  # 3 is the folder that is listed


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


def _monitor_of(sandbox: Any) -> Any:
    """The first bubblewrap process, child of this worker's keeper."""
    return next(p for p in psutil.Process(sandbox._host.keeper._process.pid).children() if p.name() == "bwrap")


async def test_what_it_said_before_something_outside_killed_it_does_not_count(start_sandbox: Any) -> None:
    """Its disk is still whole, so that without a look at how it ended it would be graded as if nothing had happened."""
    s = await start_sandbox()
    await out(s, "echo done > answer")
    _monitor_of(s).kill()
    with pytest.raises(RuntimeError, match="interrupted: signal 9 from outside"):
        await s.start_afresh([], None)
    assert (s.exhausted, s.interrupted) == ("", "signal 9 from outside")

    verifier = await start_sandbox()
    await verifier.start_afresh([], None)
    await out(verifier, "echo 0 > /logs/verifier/reward.txt")
    _monitor_of(verifier).kill()
    await verifier.stop(delete=True)
    assert (verifier.exhausted, verifier.interrupted) == ("", "signal 9 from outside")


async def test_what_we_end_ourselves_was_not_interrupted(start_sandbox: Any) -> None:
    s = await start_sandbox(lifetime_s=3600)
    await s.start_afresh([], None)
    await s.stop(delete=True)
    assert (s.exhausted, s.interrupted) == ("", "")


@pytest.mark.parametrize("end", ["killed", "halted"])
async def test_nothing_goes_on_after_its_child_was_killed_with_the_sandbox(start_sandbox: Any, end: str) -> None:
    """A test script whose program dies first writes a 0 in the moment that is left to it."""
    for _ in range(5):
        s = await start_sandbox()
        await out(s, "(for i in {1..40}; do (sleep 1234; echo > /logs/agent/went-on-$i) & done) >/dev/null 2>&1")
        inner = s._running()
        if end == "killed":
            _monitor_of(s).kill()
            with pytest.raises(SandboxDied):
                await inner.halt()
        else:
            await inner.halt()
        assert os.listdir(f"/proc/self/fd/{inner.root_fd}/logs/agent") == []
        await s.stop(delete=True)


async def test_a_layer_whose_sandbox_was_interrupted_is_not_kept(
    start_sandbox: Any, sandbox_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt at the task would be made of it. A step that goes on after its program was killed looks done."""
    dockerfile = "FROM x\nWORKDIR /app\nRUN echo interrupted-layer > base; true\n"
    before = set((sandbox_cache / "layers").glob("*"))
    stop = SandboxProcess.stop

    async def killed_before(self: SandboxProcess) -> None:
        keeper = psutil.Process(self._keeper._process.pid)
        for monitor in keeper.children():
            monitor.kill()
        await stop(self)

    monkeypatch.setattr(SandboxProcess, "stop", killed_before)
    with pytest.raises(Exception, match="interrupted: signal 9 from outside"):
        await start_sandbox(dockerfile)
    assert [p for p in set((sandbox_cache / "layers").glob("*")) - before if p.suffix != ".lock"] == []
    monkeypatch.undo()
    assert await out(await start_sandbox(dockerfile), "cat base") == "interrupted-layer"


async def test_an_end_that_the_keeper_does_not_explain_gives_no_verdict(
    start_sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace, "_LAST_WORD_S", 0.1)
    s = await start_sandbox()
    keeper = psutil.Process(s._host.keeper._process.pid)
    keeper.suspend()
    try:
        _monitor_of(s).kill()
        with pytest.raises(RuntimeError, match="sandbox ended"):
            await s.exec("sleep 20", timeout_sec=25)
        assert (s.exhausted, s.interrupted) == ("", "it ended, and its keeper does not say why")
    finally:
        keeper.resume()


async def test_a_verdict_of_a_sandbox_whose_end_nobody_explains_does_not_count(
    start_sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed, its tests wrote their 0 before, and nobody looked at it again: a machine out of memory does so."""
    monkeypatch.setattr(namespace, "_LAST_WORD_S", 0.1)
    s = await start_sandbox()
    await out(s, "echo 0 > reward.txt")
    keeper = psutil.Process(s._host.keeper._process.pid)
    keeper.suspend()
    try:
        _monitor_of(s).kill()
        await s.stop(delete=True)
        assert s.interrupted == "it ended, and its keeper does not say why"
    finally:
        keeper.resume()


async def test_who_ended_it_is_known_also_when_a_time_out_cuts_the_wait_for_it(start_sandbox: Any) -> None:
    """The keeper takes its time, and the timer of the tests rings before its word: they would be to blame."""
    s = await start_sandbox()
    keeper = psutil.Process(s._host.keeper._process.pid)
    running = asyncio.create_task(s.exec("sleep 60"))
    await _until(lambda: bool(s._sandbox._groups))
    keeper.suspend()
    try:
        _monitor_of(s).kill()
        await _until(lambda: s._sandbox is None)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    finally:
        keeper.resume()
    await s.stop(delete=True)
    assert (s.exhausted, s.interrupted) == ("", "signal 9 from outside")


async def test_a_transfer_that_was_given_up_does_not_go_on_in_another_sandbox(
    start_sandbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread goes on, its sandbox ends, and the next one gets the descriptor's number."""
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    upload = transfer.upload_folder

    def slow(root_fd: int, source: Path, target: str) -> None:
        began.set()
        go_on.wait(20)
        try:
            upload(root_fd, source, target)
        finally:
            ended.set()

    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/solution").write_text("for the tests only")
    s = await start_sandbox()
    number = s._running().root_fd
    monkeypatch.setattr(transfer, "upload_folder", slow)
    uploading = asyncio.create_task(s.upload_dir(tmp_path / "tests", "/app"))
    await _until(began.is_set)
    uploading.cancel()
    await s.stop(delete=True)
    monkeypatch.undo()
    another = await start_sandbox()
    is_free = not os.path.exists(f"/proc/self/fd/{number}")
    if is_free:
        os.dup2(another._running().root_fd, number)  # as it would be after others came and went
    go_on.set()
    await _until(ended.is_set)
    if is_free:
        os.close(number)
    assert await out(another, "ls /app") == ""


async def test_a_command_that_this_machine_could_not_run_gives_no_verdict(
    start_sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many agents take what a sandbox raises for a command's output, and go on without what it should have done."""

    def none_left(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    s = await start_sandbox()
    monkeypatch.setattr(SandboxProcess, "_write", none_left)
    with pytest.raises(RuntimeError, match="Too many open files"):
        await s.exec("echo right > answer")
    monkeypatch.undo()
    assert await out(s, "ls") == ""
    assert s.interrupted == "this machine could not run a command: Too many open files"
