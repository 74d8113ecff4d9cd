"""The directory of the pool: which node holds which pages, and which of them may be evicted.

``memory`` is the embedded default, for one process; ``redis`` is the same for several processes and hosts.
``docs/pool.md`` describes both. Engines of several hosts share one in Redis (``hosts.py``); those of one host read each
other's slabs (``host_peers.py``).
"""

from vllm_omni.kv.pool.directory.base import (
    Directory,
    Event,
    Match,
    MatchedPage,
    Member,
    Outcome,
    Page,
    Reason,
    Replica,
    Statistics,
    Tier,
)
from vllm_omni.kv.pool.directory.layout import Layout, make_layout
from vllm_omni.kv.pool.directory.membership import Membership
from vllm_omni.kv.pool.directory.memory import MemoryDirectory
from vllm_omni.kv.pool.directory.subscription import Subscription

__all__ = [
    "Directory",
    "Event",
    "Layout",
    "Match",
    "MatchedPage",
    "Member",
    "Membership",
    "MemoryDirectory",
    "Outcome",
    "Page",
    "Reason",
    "Replica",
    "Statistics",
    "Subscription",
    "Tier",
    "make_layout",
]
