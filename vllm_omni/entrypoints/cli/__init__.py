"""The command line: ``vllm-omni``, and ``vllm serve MODEL --omni``."""
