"""The memory of a host, with and without a limit of its control groups."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni.process.host_memory import host_memory

GIB = 1 << 30
PEAK_OF_A_BLOCK = """
from vllm_omni.process.proc import reset_peak_rss, transient_rss

if not reset_peak_rss():
    raise SystemExit(print("cannot reset"))
print(transient_rss())
block = bytearray(b"x") * (128 << 20)
print(transient_rss())
del block
print(transient_rss())
reset_peak_rss()
print(transient_rss())
"""


def write(directory: Path, **files: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = directory / name.replace("__", "/").replace("memory_", "memory.", 1)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{text}\n")
    return directory


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {10 * GIB // 1024} kB\n")
    return path


def test_without_a_limit_it_is_the_machine(tmp_path: Path, meminfo: Path) -> None:
    group = write(tmp_path / "group", memory_max="max", memory_current=GIB)
    assert host_memory([group], meminfo) == (16 * GIB, 10 * GIB)


def test_the_lowest_limit_holds_and_cached_files_count_as_available(tmp_path: Path, meminfo: Path) -> None:
    outer = write(tmp_path / "outer", memory_max=12 * GIB, memory_current=4 * GIB, memory_stat="inactive_file 0")
    inner = write(
        outer / "inner", memory_max=8 * GIB, memory_current=4 * GIB, memory_stat=f"anon 1\ninactive_file {GIB}"
    )
    assert host_memory([inner, outer], meminfo) == (8 * GIB, 5 * GIB)


def test_version_1_of_control_groups(tmp_path: Path, meminfo: Path) -> None:
    files = {"limit_in_bytes": 8 * GIB, "usage_in_bytes": 4 * GIB, "stat": f"total_inactive_file {GIB}"}
    group = write(tmp_path / "v1" / "memory", **{f"memory_{name}": text for name, text in files.items()}).parent
    assert host_memory([group], meminfo) == (8 * GIB, 5 * GIB)


def test_this_host_has_memory() -> None:
    total, available = host_memory()
    assert 0 < available < total


def test_the_peak_of_resident_memory_is_measured_from_its_reset() -> None:
    """In a process of its own: threads of others in this one would change what is measured."""
    ended = subprocess.run([sys.executable, "-c", PEAK_OF_A_BLOCK], capture_output=True, text=True, check=True)
    if ended.stdout == "cannot reset\n":
        pytest.skip("the kernel does not let a process reset its peak")
    before, with_block, after, reset = (int(number) >> 20 for number in ended.stdout.split())
    assert after > 96
    assert max(before, with_block, reset) < 32
