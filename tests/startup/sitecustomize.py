"""Python reads this first in every process that a test starts: ``tests/conftest.py`` puts it into PYTHONPATH.

They import vLLM, and looking for garbage among what stays takes a seventh of that time.
"""

import gc

gc.set_threshold(50_000, 20, 20)
