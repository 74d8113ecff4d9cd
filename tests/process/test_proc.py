"""Processes as Linux reports them."""

import os
import subprocess
import sys

import psutil

from vllm_omni.process.proc import resident_bytes


def test_resident_memory_is_that_of_all_processes() -> None:
    own = resident_bytes([os.getpid()])
    assert abs(own - psutil.Process().memory_info().rss) < 16 << 20
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert resident_bytes([os.getpid(), process.pid]) > own
        process.communicate(b"\n")


def test_a_process_that_has_ended_has_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert resident_bytes([process.pid]) == resident_bytes([]) == 0
