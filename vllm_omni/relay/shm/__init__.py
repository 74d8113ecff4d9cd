"""Shared memory between processes of one host."""

from vllm_omni.relay.shm.relay import ShmRelay

__all__ = ["ShmRelay"]
