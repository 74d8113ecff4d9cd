"""Every command of the documents, run as it stands but for what a small machine without a network has not.

Those of the documents about HTTP are run against a server in ``openai/test_documented_requests.py``.
"""

import os
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml

from tests.documents import DOCUMENTS, ROOT, Block, read_blocks
from vllm_omni.config import load_config
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.model_executor.models.qwen2_5_omni import tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCKS = {document.name: read_blocks(document) for document in DOCUMENTS}
SMALL = ["--max-model-len=1024", "--enforce-eager", "--dtype=float32"]


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
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


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


def test_make_demo(checkout: Path) -> None:
    """In the environment of this test, which `make` has set up or somebody else."""
    assert ["make", "demo"] in commands("README.md")
    out = run(["make", "--no-print-directory", "demo", f"VENV={sys.prefix}", "STAMP=installed.stamp"], checkout)
    assert "text    '" in out
    assert (checkout / "output" / "answer.wav").stat().st_size > 24000
    assert "token2wav" in out.splitlines()[-1]


def test_extras_that_are_installed_exist() -> None:
    extras = {command[3].strip(".[]") for command in commands("README.md") if command[:3] == ["pip", "install", "-e"]}
    assert extras == {"cpu", "cuda"}
    assert extras <= set(metadata("vllm-omni").get_all("Provides-Extra"))


def test_the_offline_program_of_the_readme(checkout: Path) -> None:
    """With the threads of a user, who sets no number: steps take cores by their size."""
    (program,) = [block for block in BLOCKS["README.md"] if block.is_program and "OmniLLM" in block.text]
    path = checkout / "program.py"
    path.write_text(program.text)
    out = run([sys.executable, str(path)], checkout, OMP_NUM_THREADS=None)
    assert "'total'" in out.splitlines()[-1]
    assert (checkout / "story.wav").stat().st_size > 44


@pytest.mark.parametrize("document", ["README.md", "cli.md", "http.md"])
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
        parse_serve_args([word for word in command[2:] if word != "--omni"]).load_config()


def test_the_generate_of_the_readme(checkout: Path) -> None:
    (command,) = [command for command in commands("README.md") if command[:2] == ["vllm-omni", "generate"]]
    assert run([*command, *SMALL], checkout)
    assert (checkout / "story.wav").exists()


def test_commands_of_the_command_line(checkout: Path) -> None:
    for command in commands("cli.md"):
        if "serve" in command:
            continue
        if command[1] == "tiny":
            shutil.rmtree(checkout / command[-1], ignore_errors=True)
        if ">" in command:
            command, (_, path) = command[:-2], command[-2:]
            (checkout / path).write_text(run(command, checkout))
        elif "doctor" in command:  # it is right to complain of this machine, but not to fail
            assert "vllm" in run(command, checkout, VLLM_OMNI_RUNTIME_DIR=str(checkout))
        else:
            run(command, checkout)
    assert (checkout / "build" / "answer.flac").stat().st_size > 44
    assert all((checkout / "build" / f"cat-{index}.png").exists() for index in range(2))
    assert yaml.safe_load((checkout / "build" / "deploy.yaml").read_text())["model_type"] == "qwen2_5_omni"


def test_commands_of_the_guide_to_diffusion(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its requests to a server, which are asked in ``tests/e2e/test_images.py``."""
    make_checkpoint, generate, serve, _ = commands("diffusion.md")
    run(make_checkpoint, checkout)
    assert run(generate, checkout).splitlines()[-1] == str(checkout / "cat.png")
    program, _ = [block for block in BLOCKS["diffusion.md"] if block.is_program]
    (checkout / "cat.png").unlink()
    (checkout / "program.py").write_text(program.text)
    assert "(64, 64)" in run([sys.executable, "program.py"], checkout)
    assert (checkout / "cat.png").exists()
    monkeypatch.chdir(checkout)
    assert "--omni" in serve
    parse_serve_args([word for word in serve[2:] if word != "--omni"]).load_config()
    (deployment,) = [block for block in BLOCKS["diffusion.md"] if block.language == "yaml"]
    (checkout / "deploy.yaml").write_text(deployment.text)
    (stage,) = load_config("tiny-image", deploy_config="deploy.yaml").stages
    assert stage.diffusion["attention_backend"] == "flash"
    assert stage.engine_args["max_num_seqs"] == 16


def test_commands_of_adding_a_model(checkout: Path) -> None:
    """The package is installed beside this environment, not into it."""
    installed = checkout / "installed"
    pip, make_checkpoint, echo, generate = commands("adding_a_model.md")
    run([sys.executable, "-m", *pip, "--no-index", "--target", str(installed)], checkout)
    shutil.rmtree(checkout / make_checkpoint[-1], ignore_errors=True)
    run(make_checkpoint, checkout)
    assert echo[2:] == [">", "build/morse.yaml"]
    (checkout / echo[3]).write_text(echo[1])
    run(generate, checkout, PYTHONPATH=os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")]))
    assert (checkout / "build" / "morse.wav").stat().st_size > 44


def test_benchmarks_tell_what_they_compare() -> None:
    for path in sorted((ROOT / "benchmarks").glob("[a-z]*.py")):
        assert "\nBaseline: " in (import_module(f"benchmarks.{path.stem}").__doc__ or "")


def excerpts(document: str) -> list[Block]:
    return [block for block in BLOCKS[document] if block.language == "python" and not block.is_program]


def test_excerpts_of_the_guide_stand_in_the_example() -> None:
    source = "".join(path.read_text() for path in sorted((ROOT / "examples" / "morse").rglob("*.py")))
    lines = {line.strip().replace("self.graph", "graph") for line in source.splitlines()}
    for block in excerpts("adding_a_model.md"):
        for line in filter(None, map(str.strip, block.text.splitlines())):
            assert line in lines, f"{block.document}:{block.line}: {line}"
