"""The probe process of rl360.sandboxes.abilities: tries namespaces, overlayfs and bubblewrap for real, then ends.

In: whether to use a user namespace. Out: one JSON object on stdout, each value empty when the thing works, else why
not. Everything happens in this process's own namespaces, so nothing is left. Standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile

from rl360.sandboxes.local import syscalls


def main(userns: bool, run_bwrap: bool) -> None:
    reasons = {"userns": "", "overlay": "", "bwrap": ""}
    folder = tempfile.mkdtemp(prefix="rl360-probe-")
    try:
        child = os.fork()
        if child == 0:
            _child(userns, run_bwrap, folder, reasons)
        os.waitpid(child, 0)
    finally:
        os.rmdir(folder)


def _child(userns: bool, run_bwrap: bool, folder: str, reasons: dict[str, str]) -> None:
    try:
        uid, gid = os.getuid(), os.getgid()
        try:
            os.unshare((os.CLONE_NEWUSER if userns else 0) | os.CLONE_NEWNS)
            if userns:
                for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                    with open(f"/proc/self/{file}", "w") as handle:
                        handle.write(text)
        except OSError as error:
            reasons["userns" if userns else "bwrap"] = f"unshare: {error.strerror}"
            reasons["overlay"] = "no mount namespace"
            return
        reasons["overlay"] = _try_overlay(userns, folder)
        if run_bwrap:
            reasons["bwrap"] = _try_bwrap()
    finally:
        print(json.dumps(reasons), flush=True)
        os._exit(0)


def _try_overlay(userns: bool, folder: str) -> str:
    try:
        syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("tmpfs", folder, "tmpfs", 0, "size=1m")
        for name in ("lower", "upper", "work", "root"):
            os.mkdir(f"{folder}/{name}")
        extra = ",userxattr" if userns else ""
        options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work{extra}"
        syscalls.mount("overlay", f"{folder}/root", "overlay", 0, options)
        with open(f"{folder}/root/file", "w") as file:
            file.write("x")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _try_bwrap() -> str:
    command = ["bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--unshare-pid", "--unshare-net"]
    command += ["--unshare-ipc", "--unshare-uts", "--die-with-parent", "--", "/bin/sh", "-c", ":"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"it ended with {done.returncode}"
