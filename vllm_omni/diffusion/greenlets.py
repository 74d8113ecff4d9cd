"""What suspends a computation in the middle of code that knows nothing of it: greenlets, where that is safe."""

from __future__ import annotations

from typing import Any

import torch

from vllm_omni.errors import MissingDependency


def import_greenlet(needed_by: str) -> Any:
    """The package ``greenlet``.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import greenlet
    except ImportError as exc:
        raise MissingDependency(f"{needed_by} needs greenlet: the extras cpu and cuda bring it ({exc})") from exc
    return greenlet


def return_here(running: Any) -> None:
    """Let a greenlet that stops, ends or raises go on where the caller is."""
    current = import_greenlet("a suspended computation").getcurrent()
    if running.parent is not current:
        running.parent = current


def is_autocast() -> bool:
    """Whether a thread's state is set that would hold for whoever goes on meanwhile."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
