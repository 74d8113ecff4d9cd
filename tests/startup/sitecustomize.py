"""What is done in every process that a test starts: ``tests/conftest.py`` puts this into PYTHONPATH.

Fewer garbage collections: a seventh of the time that importing vLLM takes goes into collections that find nothing.
Short names of configurations: for lines that are not logged, transformers renders each one that it reads as JSON, for
0.1 s or more, several times in each start. And no warm-up of processors: vLLM processes the largest media that a model
takes at each start, for 0.3 s.
"""

import gc
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

gc.set_threshold(50_000, 20, 20)


def _shorten_names(module: Any) -> None:
    module.PreTrainedConfig.__repr__ = object.__repr__


def _leave_out_warm_up(module: Any) -> None:
    module.BaseRenderer._warmup_mm_processor = lambda *_, **__: None


CHANGES = {"transformers.configuration_utils": _shorten_names, "vllm.renderers.base": _leave_out_warm_up}
"""Module -> what is changed in it once it has been imported."""


class _Changed(MetaPathFinder):
    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        change = CHANGES.pop(fullname, None)
        if change is None:
            return None
        spec = find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Changed())
