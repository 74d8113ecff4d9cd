"""What the page shows of a server that changes: the load, the speed and the memory of each engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from vllm_omni.engine.function_node import FunctionNode
from vllm_omni.engine.metrics import METRICS
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.stage import StageEngine
from vllm_omni.process.proc import resident_bytes


async def read_state(orchestrator: Orchestrator) -> dict[str, Any]:
    """The state of each engine and function now.

    Counters are totals since the server's start, so that readers, however many and however often they ask, can
    calculate rates over any time.
    """
    engines = list(orchestrator.engines.values())
    # In a thread: it reads files.
    memory = await asyncio.to_thread(lambda: [_resident_bytes(one) for one in engines])
    statistics = orchestrator.runtime.statistics()
    return {
        "time": time.time(),
        "num_open_calls": statistics.num_open_calls,
        "num_buffered_frames": statistics.num_buffered_frames,
        "engines": [_engine_state(one, num_bytes) for one, num_bytes in zip(engines, memory, strict=True)],
        "functions": [
            {
                "name": node.name,
                **asdict(node.current_status()),
                "num_runs": node.num_runs,
                "num_failed": node.num_failed,
            }
            for node in orchestrator.nodes.values()
            if isinstance(node, FunctionNode)
        ],
    }


def _resident_bytes(engine: StageEngine) -> int:
    """Of one on another host, as that host has last reported."""
    return resident_bytes(engine.pids()) if engine.remote is None else engine.remote.resident_bytes()


def _engine_state(engine: StageEngine, num_bytes: int) -> dict[str, Any]:
    totals = METRICS.totals(engine.vllm_config)
    return {
        "name": engine.name,
        "stage": engine.config.name,
        **asdict(engine.current_status()),
        "num_requests": engine.num_requests,
        "num_waiting": None if totals is None else totals.num_waiting,
        "num_tokens": totals.num_tokens if totals is not None and engine.kind.generates_tokens else None,
        "num_ended": None if totals is None else totals.num_ended,
        "latency_s": None if totals is None else totals.latency_s,
        "resident_bytes": num_bytes,
    }
