"""Every command of the documents, run as it stands, except what needs a network or a large machine.

Those of the documents about HTTP are run against a server in ``openai/test_documented_requests.py``.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from importlib.metadata import metadata
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml

from tests import zygote
from tests.documents import DOCUMENTS, ROOT, Block, read_blocks
from tests.kv.pool.stores import fill, make_disk, make_slab
from tests.media.test_image import decode
from vllm_omni.config import load_config
from vllm_omni.config.budgets import BUDGET_KEYS
from vllm_omni.config.kv_pool import KVPoolConfig
from vllm_omni.engine.instance_args import make_instances
from vllm_omni.entrypoints.cli.generate import parse_generate_args
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.entrypoints.cli.quiet import VARIABLES
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.kv.pool import ownership
from vllm_omni.testing import llava as tiny_llava
from vllm_omni.testing import qwen2_5_omni as tiny

pytestmark = pytest.mark.timeout(600)

BLOCKS = {document.name: read_blocks(document) for document in DOCUMENTS}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the commands read, and a checkpoint by a real one's name, whose replies end by themselves."""
    directory = tmp_path_factory.mktemp("checkout")
    for name in ("Makefile", "pyproject.toml", "README.md", "LICENSE", "vllm_omni", "examples", "requirements"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, directory / name, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
            )
        else:
            shutil.copy(source, directory / name)
    tiny.build(directory / "Qwen" / "Qwen2.5-Omni-7B", variant="short")
    (directory / "installed.stamp").touch()  # the last of all: newer than what make would install anew for
    return directory


def run(command: list[str], cwd: Path, **variables: str | None) -> str:
    """``None`` takes a variable away."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {name: value for name, value in (os.environ | {"PATH": programs} | variables).items() if value is not None}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with zygote.Popen(command, cwd=cwd, env=env, text=True, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what `make` has started as well
            raise
    assert process.returncode == 0, f"{command}\n{out}\n{err}"
    return out


def commands(document: str) -> list[list[str]]:
    return [command for block in BLOCKS[document] for command in block.commands]


def test_the_commands_of_the_documents_are_these() -> None:
    """Another program needs another test here."""
    assert {command[0] for document in BLOCKS for command in commands(document)} == {
        "make",
        "pip",
        "vllm",
        "vllm-omni",
        "python",
        "echo",
        "curl",
    }


@pytest.mark.long
def test_make_demo(checkout: Path) -> None:
    """In this test's environment, which `make` need not have set up."""
    assert ["make", "demo"] in commands("README.md")
    out = run(["make", "--no-print-directory", "demo", f"VENV={sys.prefix}", "STAMP=installed.stamp"], checkout)
    assert "text    '" in out
    assert str(checkout / "output" / "answer.wav") in out
    samples, sample_rate = soundfile.read(checkout / "output" / "answer.wav")
    assert (len(samples), sample_rate) == (400 * 480, 24000)  # the codes of examples/offline.py
    assert all(stage in out.splitlines()[-1] for stage in ("thinker", "talker", "token2wav", "total"))


def test_extras_that_are_installed_exist() -> None:
    extras = {command[3].strip(".[]") for command in commands("README.md") if command[:3] == ["pip", "install", "-e"]}
    assert extras == {"cpu", "cuda"}
    assert extras <= set(metadata("vllm-omni-flow").get_all("Provides-Extra"))


@pytest.mark.long
def test_the_offline_program_of_the_readme(checkout: Path) -> None:
    """With a user's number of threads, which is unset: steps take cores by their size."""
    (program,) = [block for block in BLOCKS["README.md"] if block.is_program and "OmniLLM" in block.text]
    path = checkout / "program.py"
    path.write_text(program.text)
    out = run([sys.executable, str(path)], checkout, OMP_NUM_THREADS=None)
    assert any("'total'" in line for line in out.splitlines())  # vLLM may log after it
    assert (checkout / "story.wav").stat().st_size > 44


@pytest.mark.parametrize("document", ["README.md", "cli.md", "deployment.md", "http.md", "pool.md", "replicas.md"])
def test_commands_that_serve_are_valid(document: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a server comes of such a command, the fixture of the HTTP tests shows."""
    monkeypatch.chdir(checkout)
    served = [command for command in commands(document) if "serve" in command[:2]]
    assert served
    for command in served:
        if "tiny" in command:
            (checkout / "tiny").exists() or tiny.build(checkout / "tiny")
        elif (path := next((word for word in command if word.startswith("build/")), None)) is not None:
            (checkout / path).exists() or tiny.build(checkout / path)
        assert command[0] == "vllm-omni" or "--omni" in command
        parsed = parse_serve_args([word for word in command[2:] if word != "--omni"])
        if not parsed.args.headless:  # a host has the front end's deployment: tests/hosts run both
            parsed.load_config()


def test_commands_of_the_guide_to_deployment(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tables are as they stand there, but for the name and the memory of this machine."""
    monkeypatch.chdir(checkout)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    blocks = BLOCKS["deployment.md"]
    (inventory,) = [block for block in blocks if block.language == "yaml"]
    (checkout / "inventory.yaml").write_text(inventory.text)
    here, there = [block.text.splitlines() for block in blocks if block.text.startswith("engine ")]
    make_checkpoint, on_this_host, on_others, front_end, host, *of_hosts, front_ends = commands("deployment.md")
    *of_hosts, by_ray, spanning_by_ray = of_hosts
    drain, undrain, growing, scale, split, of_instance, spanning, of_part = of_hosts
    asked = [
        ["drain", "box-b"],
        ["undrain", "box-b"],
        ["scale", "talker=3"],
    ]  # tests/hosts/test_replicas.py: the routes
    assert [one[1:] for one in (drain, undrain, scale)] == asked
    grown = parse_serve_args([word for word in growing[2:] if word != "--omni"]).load_config().stage("talker")
    assert [grown.host_of(number) for number in range(grown.max_engines)] == [None, "box-b", "box-c"]
    stage = parse_serve_args([word for word in split[2:] if word != "--omni"]).load_config().stage("thinker")
    hosts = {"thinker/E0": "box-e", "thinker/P0": "box-p", "thinker/D0": None}
    assert dict(zip(stage.engine_names, stage.hosts, strict=True)) == hosts
    (name,) = parse_serve_args([word for word in of_instance[2:] if word != "--omni"]).args.stage
    assert hosts[name] is not None
    stage = parse_serve_args([word for word in spanning[2:] if word != "--omni"]).load_config().stage("thinker")
    assert dict(zip(stage.part_names, stage.part_hosts, strict=True)) == {"thinker": "box-a", "thinker/node1": "box-b"}
    assert parse_serve_args([word for word in of_part[2:] if word != "--omni"]).args.stage == [stage.name]
    shutil.rmtree(checkout / make_checkpoint[-1], ignore_errors=True)
    main(make_checkpoint[1:])
    capfd.readouterr()

    def printed(command: list[str]) -> list[str]:
        """The table, behind what is logged."""
        main(command[1:])
        lines = capfd.readouterr().out.splitlines()
        return lines[next(index for index, line in enumerate(lines) if line.startswith("engine ")) :]

    on_this = [line.replace(socket.gethostname(), "here").split() for line in printed(on_this_host)]
    assert on_this[:4] == [line.split() for line in here[:4]]
    assert printed(on_others) == there
    of_front_end, of_host = (
        parse_serve_args([word for word in one[2:] if word != "--omni"]) for one in (front_end, host)
    )
    away = [stage.name for stage in of_front_end.load_config().stages if stage.has_other_host]
    assert of_host.args.stage == away
    assert of_host.args.join == of_front_end.args.listen
    placed = parse_serve_args([word for word in by_ray[2:] if word != "--omni"]).load_config()
    assert (placed.worker_backend, [stage.host for stage in placed.stages]) == ("ray", [None, "box-b", None])
    stage = parse_serve_args([word for word in spanning_by_ray[2:] if word != "--omni"]).load_config().stage("thinker")
    assert (stage.nodes, stage.host) == (2, None)
    assert parse_serve_args(front_ends[2:]).args.api_server_count == 2
    with pytest.raises(SystemExit) as ended:
        main([*on_others[1:], "--stage", "thinker.replicas=3", "--stage", "thinker.layer=0"])
    assert ended.value.code == 2
    (message,) = [block.text for block in blocks if block.language == "text"]
    assert capfd.readouterr().err.splitlines()[-1] == " ".join(message.split())


def test_the_program_of_the_guide_to_deployment(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = [block for block in BLOCKS["deployment.md"] if block.is_program]
    exec(compile(program.text, "deployment.md", "exec"), {})
    assert capsys.readouterr().out == "('box-1',) ('cuda:0',)\n"


@pytest.mark.long
def test_commands_of_the_guide_to_instances(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its requests to a server, which are asked in ``tests/e2e/test_epd_instances.py``."""
    monkeypatch.chdir(checkout)
    tiny_llava.build(checkout / "llava-hf" / "llava-1.5-7b-hf")
    (make_checkpoint,) = [command for command in commands("epd.md") if command[1] == "tiny"]
    run(make_checkpoint, checkout)
    served = [command for command in commands("epd.md") if "serve" in command[:2]]
    assert all(command[0] == "vllm-omni" or "--omni" in command for command in served)
    parsed = [parse_serve_args([word for word in command[2:] if word != "--omni"]) for command in served]
    mixes = [make_instances(one.load_config().stages[0]) for one in parsed]
    assert [[one.name for one in mix] for mix in mixes] == [
        ["language/E0", "language/PD0"],
        ["language/E0", "language/P0", "language/D0", "language/D1"],
        ["thinker/E0", "thinker/PD0"],
        ["language/E0", "language/PD0"],
    ]
    (program,) = [block for block in BLOCKS["epd.md"] if block.is_program]
    (checkout / "program.py").write_text(program.text)
    # Warnings are lines of the output, too, for example of a process that a busy machine ends late.
    assert any(line.startswith("w") for line in run([sys.executable, "program.py"], checkout).splitlines())
    (deployment,) = [block for block in BLOCKS["epd.md"] if block.language == "yaml"]
    (checkout / "deploy.yaml").write_text(deployment.text)
    (stage,) = load_config("llava-hf/llava-1.5-7b-hf", deploy_config="deploy.yaml").stages
    keys = {field.name for field in fields(stage.deployment)}
    assert set(stage.epd) == {*keys, "tpot_ms", "ttft_ms"}
    assert make_instances(stage)[2].engine_args["max_num_seqs"] == 64
    guide = (ROOT / "docs" / "epd.md").read_text()
    assert all(f"`{key}`" in guide for key in (*keys, *BUDGET_KEYS))


def test_the_generate_of_the_readme_is_valid(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That an answer comes of such a command, the next test shows."""
    monkeypatch.chdir(checkout)
    (command,) = [command for command in commands("README.md") if command[:2] == ["vllm-omni", "generate"]]
    check_generate(command)


def check_generate(command: list[str]) -> None:
    options = parse_generate_args(command[2:])
    assert options.load_config().model == command[2]
    assert options.args.prompt
    assert options.args.output


@pytest.mark.long
def test_commands_of_the_command_line(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What starts stages is a process, as for a user; what does not is called here, where all is imported already."""
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("VLLM_OMNI_RUNTIME_DIR", str(checkout))
    monkeypatch.setattr(ownership, "slab_directory", lambda: checkout / "slabs")  # not this user's, which are cleared
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)  # the commands set them, and the test's end takes them back
    images = [checkout / "build" / f"cat-{index}.png" for index in range(2)]
    for command in commands("cli.md"):
        if "serve" in command:
            continue
        if command[1] == "tiny":
            shutil.rmtree(checkout / command[-1], ignore_errors=True)
        if command[0] == "vllm-omni" and command[1] != "generate":
            command, path = (command[:-2], command[-1]) if ">" in command else (command, None)
            capfd.readouterr()
            main(command[1:])
            out = capfd.readouterr().out
            if path is not None:
                Path(path).write_text(out)
            if "doctor" in command:  # it is right to complain of this machine, but not to fail
                assert "vllm" in out
        else:
            out = run(command, checkout, **dict.fromkeys(VARIABLES))
            if "-n" in command:  # images go to files, and their paths to stdout
                assert out.splitlines() == [str(path) for path in images]
    assert (checkout / "build" / "answer.flac").stat().st_size > 44
    assert 0 < soundfile.info(checkout / "build" / "cloned.wav").frames <= 25 * 1920
    assert [decode(path.read_bytes()).shape for path in images] == [(64, 64, 3)] * 2
    assert yaml.safe_load((checkout / "build" / "deploy.yaml").read_text())["model_type"] == "qwen2_5_omni"


def test_the_deployments_of_the_guide_to_the_pool(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    pools = []
    for deployment in (block for block in BLOCKS["pool.md"] if block.language == "yaml"):
        (checkout / "pool.yaml").write_text(deployment.text)
        pools.append(load_config("Qwen/Qwen2.5-Omni-7B", deploy_config="pool.yaml").stage("thinker").pool)
    assert pools == [
        KVPoolConfig(memory_bytes=16 << 30, disk="/var/cache/vllm_omni", disk_bytes=200 << 30),
        KVPoolConfig(memory_bytes=16 << 30, redis="redis://:PASSWORD@10.0.0.9:6379/0"),
    ]
    guide = (ROOT / "docs" / "pool.md").read_text()
    assert all(f"| `{field.name}` |" in guide for field in fields(KVPoolConfig))


def test_commands_of_the_guide_to_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the place of the pages on disk."""
    monkeypatch.setattr(ownership, "slab_directory", lambda: tmp_path / "slabs")
    with make_slab(tmp_path) as slab, make_disk(tmp_path) as disk:
        fill(slab, 1)
        fill(disk, 1)
    used = [command for command in commands("pool.md") if command[1] == "cache"]
    assert [command[2] for command in used] == ["stats", "verify", "clear"]
    for command in used:
        main([str(tmp_path / "disk") if word.startswith("/") else word for word in command[1:]])
        out = capsys.readouterr().out
        assert str(slab.path) in out and str(disk.path) in out, command
    assert not slab.path.exists() and not disk.path.exists()


@pytest.mark.long
def test_commands_of_the_guide_to_diffusion(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its requests to a server, which are asked in ``tests/e2e/test_images.py``."""
    make_checkpoint, generate, serve, _ = commands("diffusion.md")
    run(make_checkpoint, checkout)
    monkeypatch.chdir(checkout)
    check_generate(generate)  # it is one of the command line's, but for names
    program, _ = [block for block in BLOCKS["diffusion.md"] if block.is_program]
    (checkout / "program.py").write_text(program.text)
    assert "(64, 64)" in run([sys.executable, "program.py"], checkout)
    assert (checkout / "cat.png").exists()
    assert "--omni" in serve
    parse_serve_args([word for word in serve[2:] if word != "--omni"]).load_config()
    (deployment,) = [block for block in BLOCKS["diffusion.md"] if block.language == "yaml"]
    (checkout / "deploy.yaml").write_text(deployment.text)
    (stage,) = load_config("tiny-image", deploy_config="deploy.yaml").stages
    assert stage.diffusion["attention_backend"] == "flash"
    assert stage.engine_args["max_num_seqs"] == 16


@pytest.mark.long
def test_commands_of_adding_a_model(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed beside this environment, not into it."""
    installed = checkout / "installed"
    pip, make_checkpoint, echo, generate, serve = commands("adding_a_model.md")
    run([sys.executable, "-m", *pip, "--no-index", "--target", str(installed)], checkout)
    shutil.rmtree(checkout / make_checkpoint[-1], ignore_errors=True)
    run(make_checkpoint, checkout)
    monkeypatch.chdir(checkout)
    assert serve[2:4] == ["MODEL", "--omni"]
    config = parse_serve_args([make_checkpoint[-1], *serve[4:]]).load_config()
    assert [stage.name for stage in config.stages] == ["prefill", "decode"]
    assert echo[2:] == [">", "build/morse.yaml"]
    (checkout / echo[3]).write_text(echo[1])
    out = run(generate, checkout, PYTHONPATH=os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(installed)
    codes = import_module("omni_morse.model").CODES
    letters = {signs: letter for letter, signs in codes.items()}
    keyed = "".join(letter for letter in out.upper() if letter in codes)
    assert keyed
    assert read_morse(checkout / "build" / "morse.wav", letters) == keyed


def read_morse(path: Path, letters: dict[str, str]) -> str:
    samples, sample_rate = soundfile.read(path)
    assert sample_rate == 8000
    dot = 480  # samples
    is_on = np.abs(samples.reshape(-1, dot)).mean(axis=1) > 0.1
    text, letter = "", ""
    for on, part in groupby(is_on):
        length = len(list(part))
        if on:
            letter += {1: ".", 3: "-"}[length]
        elif length >= 3:
            text, letter = text + letters[letter], ""
    return text


def test_benchmarks_tell_what_they_compare() -> None:
    for path in sorted((ROOT / "benchmarks").glob("[a-z]*.py")):
        assert "\nBaseline: " in (import_module(f"benchmarks.{path.stem}").__doc__ or "")


def excerpts(document: str) -> list[Block]:
    return [block for block in BLOCKS[document] if block.language == "python" and not block.is_program]


def test_excerpts_of_the_guide_stand_in_the_examples() -> None:
    graphs = ROOT / "tests" / "e2e" / "graphs" / "pipelines.py"
    examples = (*sorted((ROOT / "examples" / "morse").rglob("*.py")), ROOT / "examples" / "prefill_decode.py")
    source = "".join(path.read_text() for path in (*examples, graphs))
    lines = {line.strip().replace("self.graph", "graph") for line in source.splitlines()}
    for block in excerpts("adding_a_model.md"):
        for line in filter(None, map(str.strip, block.text.splitlines())):
            assert line in lines, f"{block.document}:{block.line}: {line}"
