"""Control flow: a pipeline is declared as a graph, compiled to a plan, and run by one controller per node.

From: Omni-Flow section 3. Depends on the standard library and msgspec only.
"""

from vllm_omni.flow.graph.declarations import Field, GlobalParameters, Scheduling
from vllm_omni.flow.graph.dsl import Graph, Placeholder, Role, interface
from vllm_omni.flow.graph.parser import GraphParser, parse_graphs
from vllm_omni.flow.graph.plan import StaticPlan
from vllm_omni.flow.graph.transfer import ENTRY, CallInfo, Chunk, TransferFunction, printable_transfer
from vllm_omni.flow.run.call import GraphCall
from vllm_omni.flow.run.clock import Clock, LoopClock, TimerHandle
from vllm_omni.flow.run.controller import NodeController
from vllm_omni.flow.run.frame import Emission, EndReason, Frame, OutputFrame
from vllm_omni.flow.run.link import InProcessLink, Link
from vllm_omni.flow.run.node import Activation, Node, Yield
from vllm_omni.flow.run.runtime import FlowStatistics, GraphRuntime

__all__ = [
    "ENTRY",
    "Activation",
    "CallInfo",
    "Chunk",
    "Clock",
    "Emission",
    "EndReason",
    "Field",
    "FlowStatistics",
    "Frame",
    "GlobalParameters",
    "Graph",
    "GraphCall",
    "GraphParser",
    "GraphRuntime",
    "InProcessLink",
    "Link",
    "LoopClock",
    "Node",
    "NodeController",
    "OutputFrame",
    "Placeholder",
    "Role",
    "Scheduling",
    "StaticPlan",
    "TimerHandle",
    "TransferFunction",
    "Yield",
    "interface",
    "parse_graphs",
    "printable_transfer",
]
