"""Imports point one way, and what must work without vLLM does."""

import ast
import functools
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni.compat import check_vllm_version
from vllm_omni.errors import MissingDependency

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vllm_omni"

# A package imports from the rows above its own, and from itself.
ORDER = [
    ["errors", "names", "complaints", "descriptors", "cgroups"],
    ["compat", "envs", "files", "media", "vllm_patches"],
    ["messages"],
    ["config", "flow", "ops"],
    ["process", "relay"],
    ["diffusion", "epd", "hosts", "kv", "speech", "unified"],
    ["testing", "model_executor"],
    ["core", "worker"],
    ["capacity", "engine"],
    ["deploy"],
    ["entrypoints", "plugin"],
]
RANK = {name: rank for rank, row in enumerate(ORDER) for name in row}

# Within a package: a folder imports from those before it, and from itself.
INNER_ORDER = {"flow": ["graph", "run", "remote"]}

MAY_IMPORT_VLLM = (
    "capacity/simulator.py",
    "compat.py",
    "config/",
    "core/sched/",
    "engine/",
    "entrypoints/",
    "kv/pool/offload/",
    "messages/",
    "model_executor/",
    "plugin.py",
    "vllm_patches.py",
    "worker/",
)
FILES = sorted(PACKAGE.rglob("*.py"))


# Importing vLLM's worker for the CPU replaces torch's events, streams and memory of devices for the whole process: on a
# GPU nothing would wait for a copy any more.
CPU_WORKERS = re.compile(r"vllm\.v1\.worker\.cpu|vllm_omni\.(worker\.cpu_worker|engine\.preloaded)")
PROCESSES_OF_THE_CPU = {"worker/cpu_worker.py", "engine/preloaded.py"}


def imported_modules(path: Path, package: Path = PACKAGE) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, wherever in the file; ``from a import b`` gives ``a.b``."""
    parents = list(path.relative_to(package.parent).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


@functools.cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    return list(imported_modules(path))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def unit(path: Path) -> str:
    """The name in ORDER that a file belongs to; empty for ``vllm_omni/__init__.py``, which imports lazily."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def test_every_module_has_a_place_in_the_order():
    assert not {unit(path) for path in FILES} - {""} - set(RANK)


def order_violations(path: Path) -> Iterator[str]:
    here, inner = unit(path), INNER_ORDER.get(unit(path), [])
    for line, name in imports_of(path):
        parts = name.split(".")
        where = f"{relative(path)}:{line}: {name}"
        if parts[0] != "vllm_omni" or not here or len(parts) < 2 or parts[1] == "__version__":
            continue
        if parts[1] not in RANK:
            yield f"{where} has no place in the order"
        elif parts[1] != here and RANK[parts[1]] >= RANK[here]:
            yield f"{where}: {here} may not import {parts[1]}"
        elif parts[1] == here and inner and len(path.relative_to(PACKAGE).parts) > 2:
            folder = path.relative_to(PACKAGE).parts[1]
            if len(parts) < 3 or parts[2] not in inner:
                yield f"{where} is not in {inner}"
            elif inner.index(parts[2]) > inner.index(folder):
                yield f"{where}: {here}/{folder} may not import {here}/{parts[2]}"


def test_imports_point_to_the_left():
    violations = [one for path in FILES for one in order_violations(path)]
    assert not violations, "\n".join(violations)


def may_import_vllm(path: str) -> bool:
    if path.startswith("diffusion/"):
        return False
    is_connector = path.startswith("kv/") and path.endswith("_connector.py")
    return is_connector or path.startswith(MAY_IMPORT_VLLM)


def is_allowed(path: Path, imported: str) -> bool:
    """Whether a file may import from this top-level package."""
    file = relative(path)
    if imported == "vllm":
        return may_import_vllm(file)
    if imported == "ray":
        return file == "deploy/ray.py"
    if imported == "redis":
        return path.name == "redis.py"
    if file.startswith("flow/"):
        return imported not in ("torch", "transformers", "numpy") and (imported != "zmq" or path.name == "link.py")
    return True


def test_heavy_packages_only_in_their_places():
    violations = [
        f"{relative(path)}:{line}: {name}"
        for path in FILES
        for line, name in imports_of(path)
        if not is_allowed(path, name.partition(".")[0])
    ]
    assert not violations, "\n".join(violations)


def test_the_reader_of_imports_sees_relative_and_nested_ones(tmp_path):
    package = tmp_path / "vllm_omni"
    (package / "flow").mkdir(parents=True)
    file = package / "flow" / "plan.py"
    file.write_text("from . import dsl\nfrom ..relay.base import Relay\ndef f():\n    import torch.nn\n")
    assert list(imported_modules(file, package)) == [
        (1, "vllm_omni.flow.dsl"),
        (2, "vllm_omni.relay.base.Relay"),
        (4, "torch.nn"),
    ]


# --- without vLLM


def run_without_vllm(code: str) -> subprocess.CompletedProcess:
    blocker = """
        import importlib.abc, sys
        class Blocker(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "vllm":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Blocker())
    """
    program = textwrap.dedent(blocker) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)


def without_vllm_names() -> list[str]:
    names = ["vllm_omni", "vllm_omni.config", "vllm_omni.envs"]
    placement = ("deploy/placement", "deploy/resources", "deploy/search", "deploy/shortage")
    packages = ("files", "flow", "kv/pool/directory", "relay", "ops", "diffusion", "epd", "speech", *placement)
    for path in FILES:
        file = relative(path)
        if file.startswith(packages) and path.name not in ("redis.py", "frame_kernels.py"):  # an extra's, and Triton's
            dotted = ".".join(("vllm_omni", *path.relative_to(PACKAGE).with_suffix("").parts))
            names.append(dotted.removesuffix(".__init__"))
    return names


def test_flow_relay_and_ops_import_without_vllm():
    result = run_without_vllm("\n".join(f"import {name}" for name in without_vllm_names()))
    assert result.returncode == 0, result.stderr


def test_importing_the_package_imports_neither_torch_nor_vllm():
    result = run_without_vllm("import vllm_omni, vllm_omni.config\nassert 'torch' not in sys.modules")
    assert result.returncode == 0, result.stderr


def test_names_that_need_vllm_report_which_extra_to_install():
    names = ["OmniLLM", "Omni", "AsyncOmni"]
    result = run_without_vllm(f"""
        import vllm_omni
        for name in {names}:
            try:
                getattr(vllm_omni, name)
            except ImportError as exc:
                print(type(exc).__name__, exc)
    """)
    for name, line in zip(names, result.stdout.splitlines(), strict=True):
        assert line.startswith(f"MissingDependency vllm_omni.{name} needs vLLM >=0.32.0,<0.33, which is not installed")
        assert "in the checkout of this project: pip install -e '.[cpu]' (or '.[cuda]')" in line


def test_configuration_loads_without_vllm(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_omni"}')
    result = run_without_vllm(f"""
        from vllm_omni.config import load_config
        omni = load_config({str(tmp_path)!r}, dtype="float32", stage_overrides=["talker.seed=1"])
        print([stage.engine_args["dtype"] for stage in omni.stages])
    """)
    assert result.stdout == "['float32', 'float32', 'float32']\n", result.stderr


def test_only_processes_of_the_cpu_import_its_workers():
    importers = {relative(path) for path in FILES for _, name in imports_of(path) if CPU_WORKERS.match(name)}
    assert importers == PROCESSES_OF_THE_CPU


def test_supported_versions():
    for version in ("0.32.0", "0.32.0+cpu", "0.32.4", "0.32.1.dev3+g1234567", "0.32.0.post1"):
        check_vllm_version(version)


def test_an_unsupported_version_is_rejected_with_the_range():
    for version in ("0.31.9", "0.33.0", "0.33.0.dev1", "0.32.0rc1", "0.32.0.dev5", "0.320.0", "1.0", "dev", ""):
        with pytest.raises(MissingDependency, match=rf"vLLM {re.escape(version)} is not .* only >=0\.32\.0,<0\.33"):
            check_vllm_version(version)


def test_unknown_attribute_is_an_attribute_error():
    import vllm_omni

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = vllm_omni.Nothing
