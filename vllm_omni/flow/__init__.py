"""Control flow: a pipeline is declared as a graph, compiled to a plan, and run by one controller per node.

From: Omni-Flow section 3. Depends on the standard library and msgspec only.
"""

from vllm_omni.flow.call import FlowStatistics, GraphCall, GraphRuntime
from vllm_omni.flow.clock import Clock, LoopClock, TimerHandle
from vllm_omni.flow.controller import NodeController
from vllm_omni.flow.dsl import Field, GlobalParameters, Graph, Placeholder, Role, Scheduling, interface
from vllm_omni.flow.frame import ENTRY, CallInfo, Chunk, Emission, EndReason, Frame, OutputFrame, TransferFunction
from vllm_omni.flow.linear import LinearStage, linear_graph
from vllm_omni.flow.link import InProcessLink, Link
from vllm_omni.flow.node import Activation, Node, Yield
from vllm_omni.flow.parser import GraphParser, parse_graphs
from vllm_omni.flow.plan import StaticPlan

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
    "LinearStage",
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
    "linear_graph",
    "parse_graphs",
]
