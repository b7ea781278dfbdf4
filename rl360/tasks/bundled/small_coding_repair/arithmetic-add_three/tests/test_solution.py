"""Grade one solution file of a small coding task: reward 1 if the function gives every expected value, else 0.

In: the solution file and cases.py beside this script. Out: the reward file, written first (0) and last (the verdict),
so that a crash, a hang or a kill leaves a zero. The solution runs in a child process that never holds the expected
values, may not write files or start processes, and is the user nobody; where that is not possible it may not send
signals, so that it cannot end its grader. Only the values that its function returned come back, as plain data. Standard
library only, few imports, one start of Python: it is part of every attempt's time.
"""

import json
import os
import resource
import select
import signal
import sys
import time

CPU_LIMIT_S = 2  # of the solution; the right answers take milliseconds
WALL_LIMIT_S = 10  # for one that sleeps; wide, because a loaded machine must not fail a right answer
TOTAL_LIMIT_S = 25  # of the grading; well below [verifier] timeout_sec, for a verifier that times out is no verdict
MEMORY_LIMIT_BYTES = 512 * 1024 * 1024
MAX_SOLUTION_BYTES = 1_000_000
MAX_REPLY_BYTES = 1_000_000
NOBODY = 65534
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38

# Machine -> its number for audit, and its numbers of system calls by which one process can end or change another: kill,
# tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal, ptrace, process_vm_readv, process_vm_writev;
# then prlimit64, fcntl and ioctl, which can too with some arguments.
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, (62, 200, 234, 129, 297, 424, 101, 310, 311), 302, 72, 16),
    "aarch64": (0xC00000B7, (129, 130, 131, 138, 240, 424, 117, 270, 271), 261, 25, 29),
}
F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP = 8, 15, 0x8901, 0x8902  # who gets the signals of a descriptor
X32_BIT = 0x40000000  # of x86_64: the same calls by other numbers


class OutOfTime(Exception):
    """The grading took longer than its limit."""


class NotPlainData(Exception):
    """A value that is not made of Python's plain types, or is nested too deep."""


def encode(value, depth=0):
    """A plain value as JSON that keeps lists, tuples, sets and dicts apart. Subclasses count as their base."""
    if depth > 20:
        raise NotPlainData("nested too deep")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    for tag, kind in (("list", list), ("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, kind):
            return [tag, [encode(item, depth + 1) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]]
    raise NotPlainData(type(value).__name__)


def decode(data):
    """The inverse of encode."""
    if not isinstance(data, list):
        return data
    tag, items = data
    if tag == "dict":
        return {decode(k): decode(v) for k, v in items}
    return {"list": list, "tuple": tuple, "set": set}[tag](decode(item) for item in items)


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


def limit_child():
    """No output, no new files, no new processes, little time and memory; the user nobody where that is possible."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.setsid()
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    except OSError:  # not root, or a user namespace with one user: the limits below hold all the same
        forbid_signals()
    for limit, value in (
        (resource.RLIMIT_CPU, CPU_LIMIT_S),
        (resource.RLIMIT_AS, MEMORY_LIMIT_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def forbid_signals():
    """Refuse the system calls that reach other processes, by a seccomp filter that children inherit. As in
    scripts/multi_turn/grading.py, where the tests of it are."""
    import ctypes
    import struct

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


def run_solution(source, calls_fd, reply_fd):
    """In the child: define the solution, make every call, send what came back. Never returns."""
    try:
        limit_child()
        namespace = {"__name__": "solution"}
        exec(compile(source, "solution.py", "exec"), namespace)
        with os.fdopen(calls_fd) as file:
            calls = json.load(file)
        function = namespace[calls["function"]]
        replies = []
        for arguments in calls["arguments"]:
            try:
                replies.append(["value", encode(function(*decode(arguments)))])
            except BaseException as error:
                replies.append(["error", describe(error)])
        reply = {"replies": replies}
    except BaseException as error:
        reply = {"failed": describe(error)}
    data = json.dumps(reply).encode()
    while data:
        data = data[os.write(reply_fd, data) :]
    os._exit(0)


def describe(error):
    return f"{type(error).__name__}: {error}"[:200]


def read_reply(reply_fd):
    """All that the child sent, or None after the wall limit or too many bytes."""
    deadline = time.monotonic() + WALL_LIMIT_S
    data = b""
    while len(data) <= MAX_REPLY_BYTES:
        ready, _, _ = select.select([reply_fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        chunk = os.read(reply_fd, 65536)
        if not chunk:
            return data
        data += chunk
    return None


def grade(source, cases_file):
    """Run the child and compare. Returns (reward, one line that says why)."""
    calls_read, calls_write = os.pipe()
    reply_read, reply_write = os.pipe()
    child = os.fork()
    if child == 0:
        cases_file.close()
        os.close(calls_write)
        os.close(reply_read)
        run_solution(source, calls_read, reply_write)
    os.close(calls_read)
    os.close(reply_write)
    cases = {}
    exec(cases_file.read(), cases)  # after the fork: the child has no copy
    cases_file.close()
    calls = {"function": cases["FUNCTION"], "arguments": [encode(arguments) for arguments, _ in cases["CASES"]]}
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        try:
            with os.fdopen(calls_write, "w") as file:
                json.dump(calls, file)
        except BrokenPipeError:
            pass  # the child has ended; its reply, or the lack of one, says why
        reply = read_reply(reply_read)
    finally:
        os.kill(child, signal.SIGKILL)  # not reaped yet, so it is there
        _, status = os.waitpid(child, 0)
    if not reply:
        return 0, f"no reply: time, memory or a crash (wait status {status})"
    return compare(reply, cases)


def compare(reply, cases):
    """The reply is the solution's word: anything in it may be malformed."""
    try:
        answer = json.loads(reply)
        if "failed" in answer:
            return 0, f"the solution failed: {answer['failed']}"
        replies = answer["replies"]
        for (arguments, expected), (kind, data) in zip(cases["CASES"], replies):
            call = f"{cases['FUNCTION']}{arguments!r}"
            if kind != "value":
                return 0, f"{call}: {data}"
            got = decode(data)
            if got != expected:
                return 0, f"{call}: wrong value {got!r}"[:300]
        if len(replies) != len(cases["CASES"]):
            return 0, "not every call was answered"
    except Exception as error:
        return 0, f"malformed reply: {describe(error)}"
    return 1, "every case passed"


def protect(tests_dir, reward_path):
    """In a sandbox: keep the user nobody out of the tests and of the reward, and take the cases off the disk."""
    if tests_dir != "/tests":
        return
    for folder, mode in ((tests_dir, 0o700), (os.path.dirname(reward_path), 0o755)):
        try:
            os.chmod(folder, mode)
        except OSError:
            pass  # not ours: then the child is no other user either
    os.unlink("/tests/cases.py")


def out_of_time(*_):
    raise OutOfTime(f"the grading took more than {TOTAL_LIMIT_S} s")


def main(solution_path, reward_path):
    write_reward(reward_path, 0)
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(TOTAL_LIMIT_S)
    tests_dir = os.path.dirname(os.path.abspath(__file__))
    reward = 0
    try:
        with open(solution_path, "rb") as file:
            source = file.read(MAX_SOLUTION_BYTES + 1)
    except OSError as error:
        reason = f"no solution: {error}"
    else:
        if len(source) > MAX_SOLUTION_BYTES:
            reason = "the solution is too long"
        else:
            cases_file = open(os.path.join(tests_dir, "cases.py"))
            protect(tests_dir, reward_path)
            try:
                reward, reason = grade(source, cases_file)
            except OutOfTime as error:
                reason = str(error)
    signal.alarm(0)
    write_reward(reward_path, reward)
    print(f"reward {reward}: {reason}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
