"""Tensors between stages: a producer puts and announces a ``TensorRef``, the consumer pulls it when it is scheduled."""

from vllm_omni.relay.base import Relay, RelayStatistics
from vllm_omni.relay.inline import InlineRelay
from vllm_omni.relay.stream import StreamReader, StreamWriter

__all__ = ["InlineRelay", "Relay", "RelayStatistics", "StreamReader", "StreamWriter"]
