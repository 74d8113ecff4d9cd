"""Who serves a role: instances join, tell that they are alive, and leave.

From: Omni-Flow section 3.5, Service Discovery & Load Balancing.
"""

from vllm_omni.flow.remote.registry.base import Instance, ServiceRegistry
from vllm_omni.flow.remote.registry.memory import MemoryRegistry

__all__ = ["Instance", "MemoryRegistry", "ServiceRegistry"]
