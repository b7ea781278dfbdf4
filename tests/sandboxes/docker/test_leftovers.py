"""Whose containers may be removed. No daemon."""

from __future__ import annotations

import os
import subprocess

from rl360.sandboxes.docker import leftovers


def test_this_process_lives() -> None:
    assert not leftovers.is_dead(leftovers.owner())


def test_a_process_that_ended_is_dead() -> None:
    host, boot, _, start = leftovers.owner().split("/")
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert leftovers.is_dead(f"{host}/{boot}/{ended.pid}/{start}")
    assert leftovers.is_dead(f"{host}/{boot}/{os.getpid()}/1")  # the number was given to another process
    assert leftovers.is_dead(f"{host}/another-boot/{os.getpid()}/{start}")


def test_what_cannot_be_known_is_left_alone() -> None:
    _, boot, pid, _start = leftovers.owner().split("/")
    assert not leftovers.is_dead(f"another-host/{boot}/{pid}/1")
    assert not leftovers.is_dead("")
    assert not leftovers.is_dead("garbage")
