"""Qwen3-Omni without speech (Thinking, Captioner): the thinker alone."""
