"""Attempts to leave a local sandbox, as its root. Each does nothing bad to the host where it succeeds.

Calls that would set something get arguments that the kernel refuses after its permission check, so that EPERM says
"not allowed" and any other answer says "allowed, but wrong arguments".
"""

from __future__ import annotations

import json
import os
import platform
import socket
import stat
import uuid
from pathlib import Path
from typing import Any

import pytest

from rl360.sandboxes.local import rootfs

pytestmark = pytest.mark.sandbox

USERNS = [pytest.param(False, id="as-root", marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root"))]
USERNS += [pytest.param(True, id="unprivileged")]

CALLS = """
import ctypes, errno, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
said = {}

def call(name, number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    said[name] = errno.errorcode.get(ctypes.get_errno(), "?") if result < 0 else "allowed"

bad = ctypes.c_void_p(1)
call("mount", 165, b"none", b"/mnt", b"tmpfs", 0, None)
call("umount", 166, b"/proc", 2)
call("pivot_root", 155, b"/", b"/mnt")
call("fsopen", 430, b"tmpfs", 0)
call("open_tree", 428, -100, b"/", 1)
call("move_mount", 429, -1, b"", -1, b"", 0)
call("mount_setattr", 442, -1, b"", 0, bad, 0)
for name, flag in dict(user=0x10000000, mnt=0x20000, pid=0x20000000, net=0x40000000, cgroup=0x2000000).items():
    call(f"unshare {name}", 272, flag)
call("setns", 308, os.open("/proc/1/ns/mnt", os.O_RDONLY), 0)
call("clone with a user namespace", 56, 0x10000000 | 17, 0, 0, 0, 0)
call("keyctl", 250, 0, -3, 0)
call("add_key", 248, b"user", b"x", b"x", 1, -3)
call("request_key", 249, b"user", b"x", None, -3)
call("bpf", 321, 5, bad, 0)
call("perf_event_open", 298, bad, 0, -1, -1, 0)
call("userfaultfd", 323, 0)
call("io_uring_setup", 425, 1, bad)
call("open_by_handle_at", 304, -1, bad, 0)
call("kexec_load", 246, 0, 99, bad, 0)
call("init_module", 175, bad, 0, b"")
call("finit_module", 313, -1, b"", 0)
call("delete_module", 176, b"no-such-module", 0)
call("reboot", 169, 0, 0, 0, None)
call("swapoff", 168, b"/not-there")
call("syslog", 103, 10, None, 0)
call("acct", 163, b"/not-there")
call("quotactl", 179, 0, None, 0, None)
call("iopl", 172, 3)
call("clock_settime", 227, 99, bad)
call("settimeofday", 164, bad, bad)
call("adjtimex", 159, bad)
call("fanotify_init", 300, 0, 0)
call("sethostname", 170, b"x", -1)
call("mknod", 133, b"/tmp/null", 0o020666, 0x103)
call("mknod of a disk", 133, b"/tmp/disk", 0o060666, 0xFE00)
call("chattr +i", 16, os.open("/tmp", os.O_RDONLY), 0x40086602, ctypes.byref(ctypes.c_int(0x10)))
for name, number in dict(packet=17, vsock=40, alg=38, xdp=44, bluetooth=31, tipc=30, rds=21).items():
    call(f"socket {name}", 41, number, 1, 0)
call("socket raw", 41, 2, 3, 1)
call("socket unix", 41, 1, 1, 0)
call("socket inet", 41, 2, 1, 0)
call("socket inet6", 41, 10, 1, 0)
call("socket netlink", 41, 16, 3, 0)
call("socketpair unix", 53, 1, 1, 0, ctypes.byref((ctypes.c_int * 2)()))
call("socketpair vsock", 53, 40, 1, 0, ctypes.byref((ctypes.c_int * 2)()))
call("priority", 141, 0, 0, -20)
call("real time", 144, 0, 1, ctypes.byref(ctypes.c_int(1)))
print(json.dumps(said))
"""
ALLOWED = {"socket unix", "socket inet", "socket inet6", "socket netlink", "socketpair unix"}
FAMILIES = {f"socket {name}" for name in ("packet", "vsock", "alg", "xdp", "bluetooth", "tipc", "rds")}


async def out(sandbox: Any, command: str) -> str:
    done = await sandbox.exec(command, timeout_sec=30)
    assert done.return_code == 0, done
    return (done.stdout or "").strip()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
@pytest.mark.parametrize("unprivileged", USERNS)
async def test_system_calls(start_sandbox: Any, unprivileged: bool, tmp_path: Path) -> None:
    s = await start_sandbox(unprivileged=unprivileged)
    (tmp_path / "calls.py").write_text(CALLS)
    await s.upload_file(tmp_path / "calls.py", "/tmp/calls.py")
    said = json.loads(await out(s, "python3 /tmp/calls.py"))
    assert {name for name, answer in said.items() if answer == "allowed"} == ALLOWED
    assert {name for name, answer in said.items() if answer == "EAFNOSUPPORT"} == FAMILIES | {"socketpair vsock"}
    assert {said[n] for n in said if n not in ALLOWED | FAMILIES | {"socketpair vsock"}} <= {"EPERM", "EACCES"}


@pytest.mark.parametrize("unprivileged", USERNS)
async def test_no_descriptor_folder_or_root_leads_out(start_sandbox: Any, unprivileged: bool, tmp_path: Path) -> None:
    """Through every process, descriptor, root and working folder that is visible inside."""
    marker = tmp_path / f"host-{uuid.uuid4().hex}"
    marker.write_text("host")
    s = await start_sandbox(unprivileged=unprivileged)
    script = (
        f"for p in /proc/[0-9]*; do for l in $p/root $p/cwd $p/fd/* $p/task/*/root $p/map_files/*; do "
        f"cat $l{marker} $l/{marker.name} $l/..{marker} $l/../../../..{marker} 2>/dev/null; done; done; echo done"
    )
    assert await out(s, script) == "done"
    chroot = (
        "import os\nos.makedirs('/tmp/c', exist_ok=True)\nfd = os.open('/', os.O_RDONLY)\nos.chroot('/tmp/c')\n"
        "os.fchdir(fd)\nfor _ in range(50): os.chdir('..')\nos.chroot('.')\n"
        f"print(os.path.exists({str(marker)!r}), sorted(os.listdir('/'))[:3])"
    )
    assert await out(s, f'python3 -c "{chroot}"') == "False ['.rl360', 'app', 'bin']"


@pytest.mark.parametrize("unprivileged", USERNS)
async def test_host_processes_cannot_be_named(start_sandbox: Any, unprivileged: bool) -> None:
    s = await start_sandbox(unprivileged=unprivileged)
    assert await out(s, f"ls -d /proc/{os.getpid()} 2>/dev/null || echo none") == "none"
    code = (
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); "
        f"print(c.ptrace(16, {os.getpid()}, 0, 0), ctypes.get_errno())"
    )
    assert await out(s, f"python3 -c '{code}'") == "-1 3"  # ESRCH
    assert await out(s, f"kill -0 {os.getpid()} 2>&1 | grep -c 'No such process'") == "1"


@pytest.mark.parametrize("unprivileged", USERNS)
async def test_what_it_writes_is_its_own(start_sandbox: Any, unprivileged: bool) -> None:
    name = f"rl360-{uuid.uuid4().hex}"
    s = await start_sandbox(unprivileged=unprivileged)
    folders = "/ /usr /usr/bin /usr/lib /etc /tmp /var/tmp /dev/shm /root /home /opt /run"
    await out(s, f"for d in {folders}; do echo x > $d/{name} || exit 1; done; echo x >> /usr/bin/env")
    assert not [d for d in folders.split() if Path(d, name).exists()]
    assert Path("/usr/bin/env").stat().st_size > 100
    assert (await s.exec("echo x > /dev/file")).return_code != 0  # a tmpfs without a limit of its own


async def test_shared_memory_has_a_size(start_sandbox: Any) -> None:
    s = await start_sandbox(memory_mib=64)
    assert await out(s, "df --output=size -BM /dev/shm | tail -1 | tr -d ' '") == "32M"


@pytest.mark.parametrize("unprivileged", USERNS)
async def test_kernel_settings_are_read_only(start_sandbox: Any, unprivileged: bool) -> None:
    s = await start_sandbox(unprivileged=unprivileged)
    for path in ("/proc/sys/kernel/panic", "/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/core_pattern"):
        done = await s.exec(f'v=$(cat {path}) && echo "$v" > {path}')  # what is there already
        assert done.return_code != 0, path
    for path in ("/proc/sysrq-trigger", "/proc/irq/default_smp_affinity", "/sys/kernel/uevent_helper", "/proc/kcore"):
        done = await s.exec(f"[ -e {path} ] && : >> {path} && [ -s {path} ]")
        assert done.return_code != 0, path


async def test_the_network_is_not_reached_through_sockets_of_the_host(start_sandbox: Any) -> None:
    """Abstract addresses belong to a network namespace, and are not files."""
    name = f"\0rl360-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        s = await start_sandbox()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        done = await s.exec(f'python3 -c "{code}"')
    assert "ConnectionRefusedError" in (done.stderr or "")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
async def test_what_only_root_may_read_is_hidden(
    start_sandbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root inside is root outside: permissions do not stop it, so such files are not there."""
    closed = [path for path in rootfs._private(["usr"]) if Path("/", path).exists()]
    s = await start_sandbox()
    for path in closed[:50]:
        done = await s.exec(f"test -e '/{path}' && (ls -A '/{path}'; cat '/{path}') 2>/dev/null | grep .")
        assert done.return_code != 0, path
    assert await out(s, "ls /usr/bin | wc -l") != "0"


def test_private_paths_are_found_and_become_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root")
    top = tmp_path / "top"
    (top / "closed/inner").mkdir(parents=True)
    (top / "open").mkdir(mode=0o755)
    for name, mode in {"open/key": 0o600, "open/group": 0o640, "open/all": 0o644, "closed/inner/x": 0o644}.items():
        (top / name).write_text("secret")
        (top / name).chmod(mode)
    (top / "closed").chmod(0o700)
    (top / "open/link").symlink_to("key")
    name = str(top).lstrip("/")
    found = rootfs._private([name])
    assert [path.removeprefix(f"{name}/") for path in found] == ["closed", "open/group", "open/key"]
    layers, paths = rootfs._hidden(tmp_path / "cache", [name])
    assert paths == found
    (layer,) = layers[name]
    for path in ("closed", "open/group", "open/key"):
        info = os.lstat(f"{layer}/{path}")
        assert (stat.S_ISCHR(info.st_mode), info.st_rdev) == (True, 0)  # overlayfs's mark of a deleted file
    assert not os.path.lexists(f"{layer}/open/all")
    assert os.stat(f"{layer}/open").st_mode & 0o777 == 0o755
