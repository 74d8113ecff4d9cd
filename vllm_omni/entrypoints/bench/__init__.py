"""Requests for media under load and their figures, for ``vllm bench serve --omni`` and ``vllm-omni bench load``."""
