"""vLLM is changed at run time in ``vllm_patches.py`` alone, as far as the source shows it."""

import ast
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import logger
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from vllm_omni import vllm_patches

PACKAGE = Path(vllm_patches.__file__).parent
PATCHES = Path(vllm_patches.__file__)
UPSTREAM_INSPECTION = registry._run_in_subprocess  # before a fixture or an engine replaces it

# Records of one request or step, which vLLM makes to be filled in and read: writing their fields changes no behaviour.
RECORDS = {
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "ModelRunnerOutput",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "SchedulerOutput",
    "VllmConfig",
}


def find_changes(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each statement that changes a module, class or object of vLLM, or the class of any object."""
    tree = ast.parse(source)
    yield from _changes_in(tree, frozenset(_imported_from_vllm(tree)))


def _changes_in(scope: ast.AST, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Search a module or function; ``known``: names of vLLM's objects there."""
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        known = known | _annotated_with(scope, known - RECORDS)
    for node in ast.iter_child_nodes(scope):
        if any(_changes(target, known) for target in _targets(node)) or _is_dict_update(node):
            yield node.lineno, ast.unparse(node).splitlines()[0]
        yield from _changes_in(node, known)


def _imported_from_vllm(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or "vllm" for alias in node.names if alias.name.split(".")[0] == "vllm"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _annotated_with(function: ast.FunctionDef | ast.AsyncFunctionDef, classes: frozenset[str]) -> set[str]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {one.arg for one in arguments if isinstance(one.annotation, ast.Name) and one.annotation.id in classes}


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        yield ast.Attribute(node.args[0], "", ast.Store())


def _changes(target: ast.expr, known: frozenset[str]) -> bool:
    if not isinstance(target, ast.Attribute):
        return False
    owner = target.value
    while isinstance(owner, ast.Attribute | ast.Subscript | ast.Call):
        owner = owner.func if isinstance(owner, ast.Call) else owner.value
    return target.attr == "__class__" or (isinstance(owner, ast.Name) and owner.id in known)


def _is_dict_update(node: ast.AST) -> bool:
    """``other.__dict__.update(...)``; an object may restore its own attributes (``__setstate__``)."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update"):
        return False
    attributes = node.func.value
    is_dict = isinstance(attributes, ast.Attribute) and attributes.attr == "__dict__"
    return is_dict and ast.unparse(attributes.value) != "self"


def test_nothing_of_vllm_is_changed_elsewhere() -> None:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PATCHES]
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in files
        for line, text in find_changes(path.read_text(encoding="utf-8"))
    ]
    assert not found, "these belong in vllm_patches.py, with a row in its table:\n" + "\n".join(found)


def test_every_function_has_a_row_in_the_table() -> None:
    functions = [node.name for node in ast.parse(PATCHES.read_text()).body if isinstance(node, ast.FunctionDef)]
    table = vllm_patches.__doc__ or ""
    assert functions
    assert all(f"\n``{name}`` " in table for name in functions)


def test_the_check_sees_each_way_to_change_vllm() -> None:
    for source in (
        "from vllm.loader import base\nbase.process = f",
        "from vllm.media import pool\npool._max_workers += 1",
        "import vllm\nvllm.envs.X = 1",
        "from vllm.x import Renderer\nsetattr(Renderer, 'render', f)",
        "from vllm.x import Renderer\ndef bind(renderer: Renderer):\n    renderer.a, renderer.b = f, g",
        "state.__class__ = Mine",
        "chat.__dict__.update(other.__dict__)",
    ):
        assert len(list(find_changes(source))) == 1, source


def test_kernels_of_a_platform_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    register = classmethod(lambda cls: calls.append("registered"))
    monkeypatch.setattr(type(current_platform), "register_triton_kernel_overrides", register)
    vllm_patches.register_kernels_once()
    current_platform.register_triton_kernel_overrides()
    assert calls == ["registered"]


@pytest.mark.long
def test_a_model_inspected_here_is_what_vllm_s_process_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm_omni.model_executor.models.qwen2_5_omni.talker", "Qwen2_5OmniTalker"
    monkeypatch.setattr(registry, "_run_in_subprocess", UPSTREAM_INSPECTION)
    monkeypatch.setattr(registry._LazyRegisteredModel, "_get_cache_dir", lambda _: tmp_path / "upstream")
    expected = registry._LazyRegisteredModel(*name).inspect_model_cls()
    vllm_patches.inspect_models_here()
    monkeypatch.setattr(registry.subprocess, "run", None)
    monkeypatch.setattr(registry._LazyRegisteredModel, "_get_cache_dir", lambda _: tmp_path / "here")
    assert registry._LazyRegisteredModel(*name).inspect_model_cls() == expected


def test_a_configuration_of_loggers_clears_their_caches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def configure(names: list[str]) -> None:
        for name in names:
            logging.getLogger(name).setLevel(logging.INFO)

    cleared: list[Any] = []
    monkeypatch.setattr(logging.Manager, "_clear_cache", cleared.append)
    monkeypatch.setattr(logger, "dictConfig", configure)
    vllm_patches.configure_logging_at_once()
    logger.dictConfig([f"{__name__}.{number}" for number in range(3)])  # type: ignore[arg-type]
    assert cleared == [logging.root.manager]


def test_a_wait_for_a_message_looks_for_one_without_a_notification_in_the_first_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int | None] = []
    monkeypatch.setattr(SpinCondition, "wait", lambda condition, timeout_ms=None: waited.append(timeout_ms))
    monkeypatch.setattr(SpinCondition.__init__, "__defaults__", SpinCondition.__init__.__defaults__)
    vllm_patches.wait_without_spinning()
    condition: Any = SimpleNamespace(last_read=time.monotonic())
    SpinCondition.wait(condition)
    SpinCondition.wait(condition, 5)
    condition.last_read -= 10.0
    SpinCondition.wait(condition, 60_000)
    assert waited == [vllm_patches.LOOK_MS, 5, 60_000]


def test_what_is_frozen_stays_so_to_the_end_of_a_process() -> None:
    """In a process of its own: in this one, nothing is frozen or given back any more (``conftest.py``)."""
    program = "import gc; from vllm_omni import vllm_patches; vllm_patches.end_without_collecting(); "
    program += "gc.freeze(); gc.unfreeze(); print(gc.get_freeze_count() > 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"
