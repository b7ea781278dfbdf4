"""Judge what an agent left in its working folder: run the checks of the task, write the reward.

In: the folder, the reward file, and checks.py beside this script. Out: the reward file, written first (0) and last (the
verdict), so that a crash, a hang or a kill leaves a zero. Every function of checks.py whose name begins with `check_`
gets a `Work` and raises `Failed` (or anything else) when the agent's work is not right; all must pass.

The agent's code runs in a copy of the folder, as a user of its own where this runs as root, with little time, memory
and disk; whatever it leaves running is killed, and it sees neither the checks nor the reward file. Where this cannot
change users (a sandbox with one) the checks are off the disk all the same, and the agent's code may not send signals:
it cannot end this process, which writes the reward last.

Standard library only, and no syntax newer than the Python of an old sandbox.
"""

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time

CPU_LIMIT_S = 10  # of one run; right answers take a fraction of a second
WALL_LIMIT_S = 20.0  # of one run; wide, because a loaded machine must not fail a right answer
TOTAL_LIMIT_S = 40.0  # of all checks; well below [verifier] timeout_sec, for a verifier that times out is no verdict
CLEANING_LIMIT_S = 8.0  # after them
MEMORY_LIMIT_BYTES = 1024 * 1024 * 1024
FILE_LIMIT_BYTES = 16 * 1024 * 1024
PROCESS_LIMIT = 200
MAX_READ_BYTES = 1_000_000
MAX_COPY_BYTES = 64 * 1024 * 1024
MAX_COPY_FILES = 5000
UID_RANGE = (30000, 60000)  # a user of its own for each grading: limits on processes count per user, not per sandbox
PATH = "/usr/local/bin:/usr/bin:/bin:/opt/python/bin"
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38

# Machine -> its number for audit, and its numbers of system calls by which one process can end or change another: kill,
# tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal, ptrace, process_vm_readv, process_vm_writev;
# then prlimit64, fcntl and ioctl, which can too with some arguments.
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, (62, 200, 234, 129, 297, 424, 101, 310, 311), 302, 72, 16),
    "aarch64": (0xC00000B7, (129, 130, 131, 138, 240, 424, 117, 270, 271), 261, 25, 29),
}
F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP = 8, 15, 0x8901, 0x8902  # who gets the signals of a descriptor
X32_BIT = 0x40000000  # of x86_64: the same calls by other numbers

REPLY_FD = "<reply>"  # stands for a number in a command

# Imports one module of the agent's and calls it; answers on a descriptor of its own, so that printing does no harm.
DRIVER = """
import importlib, json, os, sys
sys.path.insert(0, os.getcwd())
module, function, calls = json.load(sys.stdin)
call = getattr(importlib.import_module(module), function)
replies = []
for arguments in calls:
    try:
        replies.append(["value", call(*arguments)])
    except BaseException as error:
        replies.append(["error", type(error).__name__])
os.write(int(sys.argv[1]), json.dumps(replies).encode())
os._exit(0)
"""


class Failed(Exception):
    """The agent's work is not right; says what was expected."""


class Result:
    """code: exit status, negative for a signal, None for a run that was cut. out and err: text, cut at 1 MB."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


def equal(got, want, what):
    """Raise Failed unless both are equal and of one type."""
    if type(got) is not type(want) or got != want:
        raise Failed(f"{what}: got {got!r:.150}, expected {want!r:.150}")


class Work:
    """The folder that the agent left, and ways to look at it and to run it."""

    def __init__(self, folder, scratch, uid):
        self.folder, self._scratch, self._uid = folder, scratch, uid

    def read(self, name, folder=None):
        """The text of a regular file; a link, a folder or too long a file is Failed."""
        path = os.path.join(folder or self.folder, name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise Failed(f"{name}: {error.strerror}") from None
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Failed(f"{name}: not a regular file")
            data = file.read(MAX_READ_BYTES + 1)
        if len(data) > MAX_READ_BYTES:
            raise Failed(f"{name}: too long")
        return data.decode("utf-8", "replace")

    def json(self, name, folder=None):
        try:
            return json.loads(self.read(name, folder))
        except ValueError as error:
            raise Failed(f"{name}: not JSON: {error}") from None

    def copy(self, files=()):
        """A new copy of the folder that the agent's code may write, with further files {name: text} in it."""
        target = tempfile.mkdtemp(dir=self._scratch)
        copy_tree(self.folder, target)
        for name, text in dict(files).items():
            path = os.path.join(target, name)
            if os.path.lexists(path):
                os.unlink(path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        for parent, folders, names in os.walk(target):
            for name in [".", *folders, *names]:
                try_to(os.chown, os.path.join(parent, name), self._uid, self._uid)
        return target

    def run(self, command, folder, stdin="", wall_limit_s=WALL_LIMIT_S):
        """Run a command, given as a list, in a copy of the folder."""
        result, _ = self._run(command, folder, stdin, wall_limit_s)
        return result

    def call(self, module, function, calls):
        """[["value", what it returned] or ["error", name of the exception]], one for each tuple of arguments in calls.

        Arguments and values travel as JSON.
        """
        asked = json.dumps([module, function, calls])
        result, data = self._run(["python3", "-I", "-B", "-c", DRIVER, REPLY_FD], self.copy(), asked, WALL_LIMIT_S)
        try:
            replies = json.loads(data)
            return [[str(kind), value] for kind, value in replies]
        except ValueError:
            raise Failed(f"{module}.{function} gave no answer: {result.err[-300:]}") from None

    def _run(self, command, folder, stdin, wall_limit_s):
        if command[0] == "python3":
            command = [sys.executable, *command[1:]]
        names = ("stdin", "stdout", "stderr", "reply")
        files = {name: tempfile.TemporaryFile(dir=self._scratch) for name in names}  # noqa: SIM115
        files["stdin"].write(stdin.encode())
        files["stdin"].seek(0)

        reply_fd = files["reply"].fileno()
        command = [str(reply_fd) if word == REPLY_FD else word for word in command]
        env = {"PATH": PATH, "HOME": folder, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            child = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdin=files["stdin"],
                stdout=files["stdout"],
                stderr=files["stderr"],
                pass_fds=(reply_fd,),
                preexec_fn=lambda: limit_child(self._uid),
            )
        except OSError as error:
            raise Failed(f"{command[0]}: {error}") from None
        try:
            code = child.wait(wall_limit_s)
        except subprocess.TimeoutExpired:
            code = None
        kill_children()
        texts = []
        for name in names[1:]:
            files[name].seek(0)
            texts.append(files[name].read(MAX_READ_BYTES).decode("utf-8", "replace"))
        for file in files.values():
            file.close()
        return Result(code, texts[0], texts[1]), texts[2]


def try_to(function, *arguments):
    """Call it; what this user may not do is left undone."""
    try:
        function(*arguments)
    except OSError:
        return False
    return True


def copy_tree(source, target):
    """Regular files and folders only: a link could lead anywhere."""
    num_files, num_bytes = 0, 0
    for parent, folders, names in os.walk(source):
        inside = os.path.join(target, os.path.relpath(parent, source))
        for name in folders:
            if not os.path.islink(os.path.join(parent, name)):
                num_files += 1
                if num_files > MAX_COPY_FILES:
                    raise Failed("the working folder is too large")
                os.makedirs(os.path.join(inside, name), exist_ok=True)
        for name in names:
            path = os.path.join(parent, name)
            info = os.lstat(path)
            if not stat.S_ISREG(info.st_mode):
                continue
            num_files, num_bytes = num_files + 1, num_bytes + info.st_size
            if num_files > MAX_COPY_FILES or num_bytes > MAX_COPY_BYTES:
                raise Failed("the working folder is too large")
            shutil.copyfile(path, os.path.join(inside, name), follow_symlinks=False)
            os.chmod(os.path.join(inside, name), info.st_mode & 0o755)


def limit_child(uid):
    """In the child: another user where that is possible, a session of its own, little of everything."""
    os.setsid()
    try_to(os.setgroups, [])
    try_to(os.setgid, uid)
    if not try_to(os.setuid, uid):
        forbid_signals()
    for limit, value in (
        (resource.RLIMIT_CPU, CPU_LIMIT_S),
        (resource.RLIMIT_AS, MEMORY_LIMIT_BYTES),
        (resource.RLIMIT_FSIZE, FILE_LIMIT_BYTES),
        (resource.RLIMIT_NPROC, PROCESS_LIMIT),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def forbid_signals():
    """Refuse the system calls that reach other processes, by a seccomp filter that children inherit."""
    machine = SYSTEM_CALLS.get(os.uname().machine)
    if machine is None:
        return
    architecture, refused, prlimit, fcntl, ioctl = machine
    load, equal_to, at_least, give = 0x20, 0x15, 0x35, 0x06  # BPF: load a word, compare, return
    allow, refuse = (give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050001)  # refuse: EPERM
    first, second = (load, 0, 0, 16), (load, 0, 0, 24)  # low words of the first two arguments
    code = [(load, 0, 0, 4), (equal_to, 1, 0, architecture), refuse]
    code += [(load, 0, 0, 0), (at_least, 0, 1, X32_BIT), refuse]
    for number in refused:
        code += [(equal_to, 0, 1, number), refuse]
    code += [(equal_to, 0, 4, prlimit), first, (equal_to, 0, 1, 0), allow, refuse]
    for number, requests in ((fcntl, (F_SETOWN, F_SETOWN_EX)), (ioctl, (FIOSETOWN, SIOCSPGRP))):
        code += [(equal_to, 0, 5, number), second, (equal_to, 1, 0, requests[0]), (equal_to, 0, 1, requests[1])]
        code += [refuse, allow]
    code.append(allow)
    program = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header), 0, 0)


def kill_children():
    """End all that a run left: as a subreaper this process is the parent of every orphan."""
    own = str(os.getpid())
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        found = False
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat") as file:
                        parent = file.read().rpartition(")")[2].split()[1]
                except OSError:
                    continue
                if parent == own:
                    found = True
                    try_to(os.kill, int(name), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            if not found:
                return
        time.sleep(0.002)


def protect(tests, reward_path):
    """The checks go off the disk; this process cannot be traced, and adopts what its children leave."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if tests == "/tests":
        for name in os.listdir(tests):
            path = os.path.join(tests, name)
            try_to(shutil.rmtree if os.path.isdir(path) and not os.path.islink(path) else os.unlink, path)
        try_to(os.chmod, tests, 0o700)
        try_to(os.chmod, os.path.dirname(reward_path), 0o755)


def write_reward(path, reward):
    """Replace whatever is there, a link or a folder too, and drop a reward.json, which would count before it."""
    partial = path + ".partial"
    for stale in (partial, os.path.join(os.path.dirname(path), "reward.json")):
        if os.path.lexists(stale):
            os.rename(stale, f"{stale}.{time.monotonic_ns()}.removed")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(descriptor, b"%d\n" % reward)
    os.close(descriptor)
    if os.path.isdir(path) and not os.path.islink(path):
        os.rename(path, f"{path}.{time.monotonic_ns()}.removed")
    os.replace(partial, path)


def out_of_time(*_):
    raise Failed(f"the checks took more than {TOTAL_LIMIT_S} s")


def grade(folder, checks):
    """Run every check. Returns (reward, one line that says why)."""
    scratch = tempfile.mkdtemp(prefix="grading-")
    os.chmod(scratch, 0o711)
    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, TOTAL_LIMIT_S)
    try:
        work = Work(folder, scratch, random.SystemRandom().randrange(*UID_RANGE))
        for name, check in checks.items():
            try:
                check(work)
            except Exception as error:
                return 0, f"{name}: {type(error).__name__}: {str(error)[:500]}"
        return 1, "every check passed"
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # too much to clear away: this ends, and the zero stays
        signal.setitimer(signal.ITIMER_REAL, CLEANING_LIMIT_S)
        kill_children()
        shutil.rmtree(scratch, ignore_errors=True)
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(folder, reward_path):
    write_reward(reward_path, 0)
    tests = os.path.dirname(os.path.abspath(__file__))
    space = {"Failed": Failed, "equal": equal}
    with open(os.path.join(tests, "checks.py"), encoding="utf-8") as file:
        exec(compile(file.read(), "checks.py", "exec"), space)
    protect(tests, reward_path)
    checks = {name: check for name, check in space.items() if name.startswith("check_")}
    reward, reason = grade(folder, checks) if checks else (0, "no checks")
    write_reward(reward_path, reward)
    print(f"reward {reward}: {reason}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
