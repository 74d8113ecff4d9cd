"""Caches that move between engines."""
