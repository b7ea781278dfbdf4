"""The keeper: a small process beside each trial worker that starts sandboxes, reaps them and cleans up after them.

In: start, kill and remove requests over a SOCK_SEQPACKET pair. Out: one bubblewrap process per sandbox, a descriptor of
its root folder, and an event when it is gone. Left to others: the command line and the mount plan (plan.py), what runs
inside (environment.py), and leftovers of a keeper that was itself killed (cleanup.py).

Why a process of its own: forking a few-MiB process costs a tenth of forking a worker that imported Harbor; its single
thread outlives every sandbox, which `--die-with-parent` needs (the signal follows the thread that forked, not the
process); and when the worker dies, even by kill -9, the keeper reads end-of-file and removes what the worker owned.
Standard library only; run with `python -I -S`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rl360.open_files import allow_many
from rl360.sandboxes.local import cgroups, syscalls

MAX_MESSAGE = 180_000  # bytes; below the default socket buffer, so that one message is one packet
CONTROL_DIR = ".rl360"  # in the sandbox's root: scripts in, output out
_CONTROL_MIB = (
    64  # bound of what running commands may print, apart from the disk limit, so that a full disk can be graded
)
_CONTROL_INODES = 16_384
_OPEN_FILES = 1024  # the usual soft limit of a process
_REMOVE_EVERY_S = 0.01  # between tries to remove the groups of a sandbox whose processes are ending
_REMOVE_FOR_S = 5.0  # then the next sweep gets it
INFO_FD = 1002  # where bubblewrap says which process is the first inside; above any that is open when it starts
_EXITING, _SIGNALLED = 0x4, 0x400  # <linux/sched.h>: PF_EXITING, PF_SIGNALED, of the flags in /proc/<pid>/stat
_KERNEL_ENDS_S = 0.2  # after a sandbox's end; what still runs in its groups then was never in its PID namespace


@dataclass
class _Sandbox:
    pid: int
    cgroups: list[str]
    folder: str | None
    deadline: float | None
    info_fd: int  # bubblewrap has written there which process is the first one inside
    first: int = 0  # that process; 0: not read yet, or there was none
    killed_first: bool = False  # it was dying of a signal before the keeper killed anything
    exhausted: str = ""
    asked: bool = False  # the keeper killed it
    signalled: bool = False  # it did so by bubblewrap's own process, and not by the first one inside
    keep: bool = True  # its folder: until the worker says otherwise, also where it ended before the worker knew
    ended: float | None = None  # when it was reaped; None: running
    event: dict[str, Any] = field(default_factory=dict)


def main(control_fd: int, owner_dir: str) -> None:
    """Serve until the worker closes its end, then remove everything."""
    allow_many()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the worker decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(control_fd, False)  # or every sandbox would hold the keeper's control socket
    control = socket.socket(fileno=control_fd)
    syscalls.become_subreaper()
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    sandboxes: dict[str, _Sandbox] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake_r, select.POLLIN)
    while True:
        ready = poll.poll(_timeout_ms(sandboxes))
        _reap(sandboxes)  # first: what has ended by now did so before anybody asked for it
        for fd, _ in ready:
            if fd == wake_r:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_r, 4096)
            elif not _serve(control, sandboxes, owner_dir):
                _close(sandboxes, owner_dir)
                return
        _tend(control, sandboxes)


def _timeout_ms(sandboxes: dict[str, _Sandbox]) -> float | None:
    if any(s.ended is not None for s in sandboxes.values()):
        return _REMOVE_EVERY_S * 1000
    deadlines = [s.deadline for s in sandboxes.values() if s.deadline is not None]
    return max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None


def _serve(control: socket.socket, sandboxes: dict[str, _Sandbox], owner_dir: str) -> bool:
    try:
        data, fds = syscalls.receive(control, MAX_MESSAGE + 1, 4)
    except ConnectionError:
        return False
    if not data:
        return False
    message = json.loads(data)
    if message["op"] == "start":
        try:
            _start(message, fds, sandboxes)
        finally:
            for fd in fds:
                os.close(fd)
    elif message["op"] == "kill":
        sandbox = sandboxes.get(message["id"])
        if sandbox is not None:
            sandbox.keep = message.get("keep", False)
            if sandbox.ended is None:
                _kill(sandbox)
        elif not message.get("keep", False):  # it ended before, and nobody reads its disk any more
            _remove_folder(owner_dir, message["id"].rpartition(".")[2])
    elif message["op"] == "remove":  # the folder of a sandbox that ended and was kept
        _remove_folder(owner_dir, message["folder"])
    return True


def _remove_folder(owner_dir: str, number: str) -> None:
    if number.isdigit():
        shutil.rmtree(os.path.join(owner_dir, number), ignore_errors=True)


def _start(message: dict[str, Any], fds: list[int], sandboxes: dict[str, _Sandbox]) -> None:
    spec = message["spec"]
    stdin, stdout, stderr, reply = fds
    try:
        groups = cgroups.create(cgroups.Hierarchy(**spec["hierarchy"]), message["id"], cgroups.Limits(**spec["limits"]))
    except OSError as error:
        os.write(reply, json.dumps({"error": f"control group: {error}"}).encode())
        return
    keeper_pid = os.getpid()
    info_r, info_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        os.dup2(info_w, INFO_FD)
        _become_sandbox(spec, groups, stdin, stdout, stderr, reply, keeper_pid)
    os.close(info_w)
    lifetime_s = spec["lifetime_s"]
    deadline = time.monotonic() + lifetime_s if lifetime_s else None
    sandboxes[message["id"]] = _Sandbox(pid, groups, spec["scratch"].get("path"), deadline, info_r)


def _become_sandbox(
    spec: dict[str, Any], groups: list[str], stdin: int, stdout: int, stderr: int, reply: int, keeper_pid: int
) -> NoReturn:
    """In the forked child: limits, namespaces, mounts, then bubblewrap. Errors go back over `reply`."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        cgroups.join(groups)
        uid, gid = os.getuid(), os.getgid()
        if spec["userns"]:
            os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
            for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                with open(f"/proc/self/{file}", "w") as handle:
                    handle.write(text)
        else:
            os.unshare(os.CLONE_NEWNS)
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != keeper_pid:
            os._exit(1)
        root_fd = _mount_root(spec)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _OPEN_FILES), most))  # programs inside see the usual
        for name, value in spec["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for number, content in spec["files"]:
            _to_fd(number, content)
        socket.send_fds(socket.socket(fileno=os.dup(reply)), [b'{"ok": true}'], [root_fd])
        os.execve(spec["argv"][0], spec["argv"], {"PATH": "/usr/bin:/bin"})
    except BaseException as error:
        os.write(reply, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()[:MAX_MESSAGE])
    os._exit(1)


def _to_fd(number: int, content: str) -> None:
    """Give bubblewrap a file (hex) at a descriptor that it inherits."""
    fd = os.memfd_create("rl360", 0)
    os.write(fd, bytes.fromhex(content))
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, number, inheritable=True)
    os.close(fd)


def _mount_root(spec: dict[str, Any]) -> int:
    """Put the root file system together below `mount_point` and return a descriptor of it.

    The mount lives in this process's own mount namespace, so nothing of it is left on the host when the sandbox ends.
    """
    at, scratch = spec["mount_point"], spec["scratch"]
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    if "size_mib" in scratch:
        syscalls.mount("tmpfs", at, "tmpfs", syscalls.MS_NODEV, f"mode=0755,size={scratch['size_mib']}m")
    else:
        syscalls.bind(scratch["path"], at)
    root = f"{at}/root"
    os.makedirs(root, exist_ok=True)
    uppers = spec["uppers"]
    for index, (name, lowers) in enumerate(spec["trees"]):
        target = f"{root}/{name}" if name else root
        upper, work = f"{at}/upper{index}", f"{at}/work{index}"
        if uppers is not None:
            upper, work = uppers[index]
        if spec["mode"] == "copy":
            _copy_tree(name, lowers, target, uppers[index][0] if uppers is not None else None)
            continue
        os.makedirs(upper, exist_ok=True)
        os.makedirs(work, exist_ok=True)
        options = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work}" + spec["overlay_options"]
        syscalls.mount("overlay", target, "overlay", syscalls.MS_NODEV, options)
    for source, name in spec["read_only_binds"]:
        syscalls.bind(source, f"{root}/{name}", read_only=True)
    for name in spec["masks"]:
        if os.path.isdir(f"{root}/{name}"):
            syscalls.mount("tmpfs", f"{root}/{name}", "tmpfs", syscalls.MS_RDONLY, "size=4k,mode=0755")
        elif os.path.isfile(f"{root}/{name}"):
            syscalls.bind("/dev/null", f"{root}/{name}", read_only=True)
    control = f"{root}/{CONTROL_DIR}"
    os.makedirs(control, exist_ok=True)
    syscalls.mount(
        "tmpfs", control, "tmpfs", syscalls.MS_NODEV | syscalls.MS_NOSUID,
        f"mode=0700,size={_CONTROL_MIB}m,nr_inodes={_CONTROL_INODES}",
    )  # fmt: skip
    return os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _copy_tree(name: str, lowers: list[str], target: str, upper: str | None) -> None:
    """Without overlayfs: the root tree is copied, any other (the host's /usr) is shown read-only."""
    if name:
        syscalls.bind(lowers[-1], target, read_only=True)
        return
    if upper is not None:
        os.makedirs(upper, exist_ok=True)
        syscalls.bind(upper, target)
    for lower in reversed(lowers):
        subprocess.run(["cp", "-a", "--reflink=auto", f"{lower}/.", target], check=True, stderr=subprocess.PIPE)


def _kill(sandbox: _Sandbox) -> None:
    """Kill the first process inside: the kernel takes all others along, each after those that it was started by.

    Were they killed one by one in any order, a command could be dead while what reports its exit code, or goes on to
    the next line of a test script, still runs. Bubblewrap's own process ends by itself, after all of them.
    """
    # Looked at before bubblewrap: where that ends (its shell saw the pipe closed), the kernel kills the first process.
    killed_first = not sandbox.asked and _ends(_first_inside(sandbox), _EXITING | _SIGNALLED)
    if _ends(sandbox.pid, _EXITING):
        return  # not by us
    sandbox.killed_first = sandbox.killed_first or killed_first
    pids = _children(sandbox.pid) or cgroups.processes(sandbox.cgroups) or {sandbox.pid}
    sandbox.asked = True
    sandbox.signalled = sandbox.signalled or sandbox.pid in pids
    _kill_each(pids)


def _kill_each(pids: set[int]) -> None:
    for pid in sorted(pids):  # parents first
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> set[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return {int(child) for child in file.read().split()}
    except OSError:
        return set()


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _reap(sandboxes: dict[str, _Sandbox]) -> None:
    """Note the end of every sandbox that has ended."""
    reaped: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        reaped[pid] = os.waitstatus_to_exitcode(status)
    for sandbox in sandboxes.values():
        if sandbox.ended is None and sandbox.pid in reaped:
            sandbox.ended = time.monotonic()
            own, outer = cgroups.oom_kills(sandbox.cgroups)
            first = _first_inside(sandbox)
            os.close(sandbox.info_fd)
            # Bubblewrap reaps the first process only where that ended before its command; else it is left to us.
            lost_first = not sandbox.asked and first > 0 and first not in reaped and not _is_child(first)
            status = reaped[sandbox.pid]
            sandbox.event = {
                "status": status, "oom_kills": own, "outer_oom_kills": outer, "signalled": sandbox.signalled,
                "killed_first": sandbox.killed_first or (lost_first and status == 128 + signal.SIGKILL),
            }  # fmt: skip


def _first_inside(sandbox: _Sandbox) -> int:
    """Its id out here; 0: there is none yet, or bubblewrap ended before there was one."""
    if not sandbox.first:
        with contextlib.suppress(BlockingIOError, ValueError, KeyError):
            sandbox.first = int(json.loads(os.read(sandbox.info_fd, 4096))["child-pid"])
    return sandbox.first


def _ends(pid: int, how: int) -> bool:
    """Whether a process is ending, or has ended and was not reaped, in this way.

    Its files are closed a while before its parent can wait for it: the worker, which sees the end of the control pipe,
    may ask for the end of a bubblewrap that is at it already, and the keeper must not take that for its own doing.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            flags = int(file.read().rpartition(")")[2].split()[6])
    except (OSError, IndexError, ValueError):
        return False
    return flags & how == how


def _tend(control: socket.socket | None, sandboxes: dict[str, _Sandbox]) -> None:
    """Reap what ended, end what outlived its time, remove control groups, tell the worker."""
    _reap(sandboxes)
    now = time.monotonic()
    for name, sandbox in list(sandboxes.items()):
        if sandbox.ended is None:
            if sandbox.deadline is not None and now > sandbox.deadline:
                sandbox.deadline = None
                sandbox.exhausted = "lifetime"
                _kill(sandbox)
            continue
        left = cgroups.remove(sandbox.cgroups)
        if left and now - sandbox.ended < _REMOVE_FOR_S:
            if now - sandbox.ended > _KERNEL_ENDS_S:
                _kill_each(cgroups.processes(left))
            continue
        if sandbox.folder is not None and not sandbox.keep:
            shutil.rmtree(sandbox.folder, ignore_errors=True)
        del sandboxes[name]
        if control is not None:
            event = {"id": name, "exhausted": sandbox.exhausted, "left": bool(left), **sandbox.event}
            with contextlib.suppress(OSError):
                control.send(json.dumps(event).encode())


def _close(sandboxes: dict[str, _Sandbox], owner_dir: str) -> None:
    for sandbox in sandboxes.values():
        if sandbox.ended is None:
            _kill(sandbox)
    until = time.monotonic() + _REMOVE_FOR_S
    while sandboxes and time.monotonic() < until:
        _tend(None, sandboxes)
        time.sleep(_REMOVE_EVERY_S)
    if not sandboxes:
        shutil.rmtree(owner_dir, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
