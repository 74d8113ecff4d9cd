"""Registries of replicas: they join, send heartbeats, and leave.

From: Omni-Flow section 3.5, Service Discovery & Load Balancing.
"""

from vllm_omni.flow.remote.registry.base import Replica, ServiceRegistry
from vllm_omni.flow.remote.registry.memory import MemoryRegistry

__all__ = ["MemoryRegistry", "Replica", "ServiceRegistry"]
