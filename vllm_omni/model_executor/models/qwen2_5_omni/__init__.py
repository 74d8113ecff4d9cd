"""Qwen2.5-Omni: thinker, talker, token2wav."""
