"""Qwen3-TTS: talker, codec."""
