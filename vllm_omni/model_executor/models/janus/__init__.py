"""Janus-Pro: one language model that reads text and images, and writes text or a picture."""
