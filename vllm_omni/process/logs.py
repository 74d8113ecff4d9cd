"""``LogFilter``: what a server's processes log through vLLM's handler, and under which name."""

from __future__ import annotations

import logging
import os

from vllm_omni.vllm_patches import filter_logs, name_processes

KEPT = ("vllm.v1.metrics", "vllm.v1.core.kv_cache_utils", "vllm.entrypoints.serve.utils.request_logger")
"""Modules of vLLM whose lines of level INFO are kept: the size of a stage's KV cache, and the lines that
``--enable-logging-iteration-details``, ``--enable-log-requests`` and ``--enable-log-outputs`` ask for."""

ABOUT_SETTINGS = ("vllm.config", "vllm.platforms", "vllm.v1.worker.cpu_worker")
"""Modules of vLLM whose warnings describe the machine and the deployment: one of each is enough. Those of the first two
come from the front end, which makes the stages' configurations, and again from every process that reads one."""

ABOUT_US = (
    "Async scheduling will be disabled because it is not supported with the `vllm_omni.",
    "Unknown vLLM environment variable detected: VLLM_OMNI_",
    "Using custom scheduler class",
    # Of transformers, about ids of the thinker's vocabulary in the configuration of a talker.
    "Model config: audio_",
    "Model config: tts_text_",
    "Model config: vision_",
)
"""Starts of warnings that concern how this project uses vLLM: no user can do anything about them."""


class LogFilter(logging.Filter):
    """Leaves out lines of no use to a user, and marks those of a stage's process with the stage's name.

    Lines of level INFO of vLLM itself, some fifty for each stage that starts, appear with VLLM_LOGGING_LEVEL.

    Args:
        stage: the stage, or instance, that the process belongs to; None: the front end.
    """

    def __init__(self, stage: str | None = None) -> None:
        super().__init__()
        self._stage = stage
        self._has_details = "VLLM_LOGGING_LEVEL" in os.environ
        self._said: set[str] = set()  # warnings of ABOUT_SETTINGS

    def filter(self, record: logging.LogRecord) -> bool:
        if self._stage is not None:
            self._mark(record, self._stage)
        if record.name.startswith("vllm_omni"):
            return True
        message = record.getMessage()
        if message.startswith(ABOUT_US):
            return False
        if record.name.startswith(ABOUT_SETTINGS) and record.levelno == logging.WARNING:
            return self._is_new(record.name, message)
        return record.levelno != logging.INFO or self._has_details or record.name.startswith(KEPT)

    def _is_new(self, name: str, message: str) -> bool:
        if self._has_details:
            return True
        is_new = message not in self._said and (self._stage is None or not name.startswith(ABOUT_SETTINGS[:2]))
        self._said.add(message)
        return is_new

    def _mark(self, record: logging.LogRecord, stage: str) -> None:
        """Change "EngineCore" to "talker", and "Worker_TP1" to "talker Worker_TP1"."""
        name = getattr(record, "vllm_process_name", "").removeprefix("EngineCore").removeprefix("_")
        if not name.startswith(stage):  # a record may have several handlers
            record.vllm_process_name = f"{stage} {name}".rstrip()


def enter_front_end() -> None:
    filter_logs(LogFilter())


def name_stage_process(stage: str) -> None:
    """Name the process and its lines; call it before vLLM sets up the process."""
    filter_logs(LogFilter(stage))
    name_processes(stage)
