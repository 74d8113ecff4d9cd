"""Tiny random checkpoints in the layout of the real ones, built offline, for tests and demonstrations."""
