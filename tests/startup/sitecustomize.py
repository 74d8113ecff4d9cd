"""Fewer garbage collections in every process that a test starts: ``tests/conftest.py`` puts this into PYTHONPATH.

A seventh of the time that importing vLLM takes goes into collections that find nothing.
"""

import gc

gc.set_threshold(50_000, 20, 20)
