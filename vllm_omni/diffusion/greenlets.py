"""Suspend and resume unmodified pipeline code at a model call, by greenlets."""

from __future__ import annotations

from typing import Any

import torch

from vllm_omni.errors import MissingDependency, how_to_install


def import_greenlet(needed_by: str) -> Any:
    """Import the package ``greenlet``.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import greenlet
    except ImportError as exc:
        raise MissingDependency(f"{needed_by} needs greenlet; {how_to_install('cpu', 'cuda')} ({exc})") from exc
    return greenlet


def return_here(running: Any) -> None:
    """Make the current greenlet the one that continues when ``running`` suspends, ends or raises."""
    current = import_greenlet("a suspended computation").getcurrent()
    if running.parent is not current:
        running.parent = current


def is_autocast() -> bool:
    """Whether autocast is on: it is per thread, so other greenlets would run under it during a suspension."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
