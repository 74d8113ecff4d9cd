"""``Report``: what an examination saw, and what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """Something wrong, and its remedy."""

    what: str
    remedy: str


@dataclass
class Report:
    """Facts by section, and findings."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Finding] = field(default_factory=list)  # no server could run here
    warnings: list[Finding] = field(default_factory=list)  # a server could run here, but perhaps not well

    def problem(self, what: str, remedy: str) -> None:
        self.problems.append(Finding(what, remedy))

    def warn(self, what: str, remedy: str) -> None:
        self.warnings.append(Finding(what, remedy))


def format_size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
