"""Which of a model's tiny checkpoints to build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Shape = TypeVar("Shape")


def find_variant(variants: Mapping[str, Shape], variant: str) -> Shape:
    """Find a variant by its name.

    Raises:
        ValueError: there is none.
    """
    if variant not in variants:
        raise ValueError(f"no variant {variant!r}; known: {sorted(variants)}")
    return variants[variant]
