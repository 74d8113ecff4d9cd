"""``serve --dry-run``: where each engine would go, without a start."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.entrypoints.test_cli import rejected
from vllm_omni.entrypoints.cli.main import main

FLAGS = ["--dtype=float32", "--max-model-len=1024", "--enforce-eager"]


@pytest.fixture(autouse=True)
def no_cache_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


@pytest.fixture
def inventory(tmp_path: Path) -> str:
    file = tmp_path / "inventory.yaml"
    file.write_text("""
    hosts:
      box-a: {devices: 1, memory: 24GiB, address: 10.0.0.1}
      box-b: {devices: 4, memory: 80GiB, address: 10.0.0.2}
      front: {memory: 16GiB}
    """)
    return f"--inventory={file}"


def dry_run(capfd: pytest.CaptureFixture[str], model: Path, *args: str) -> list[list[str]]:
    """The cells of each line."""
    main(["serve", str(model), *FLAGS, "--dry-run", "--port=1", *args])
    lines = capfd.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell] for line in lines]


def test_on_this_host_all_engines_share_its_memory(capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path) -> None:
    header, *engines, (device,) = dry_run(capfd, tiny_checkpoint)
    assert header == ["engine", "layer", "host", "address", "devices", "weights", "activations", "cache"]
    assert [(one[0], one[1], *one[3:7]) for one in engines] == [
        ("thinker", "0", "127.0.0.1", "cpu", "1.8 MiB", "5.8 MiB"),
        ("talker", "1", "127.0.0.1", "cpu", "948.2 KiB", "7.8 MiB"),
        ("token2wav", "2", "127.0.0.1", "cpu", "1.2 MiB", "294.8 KiB"),
    ]
    assert device.startswith("cpu: ")
    assert device.endswith(" rest")


def test_engines_are_placed_on_the_hosts_of_an_inventory(
    capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path, inventory: str
) -> None:
    stages = ["thinker.tensor_parallel_size=2", "talker.replicas=2", "token2wav.layer=0"]
    _, *engines = dry_run(capfd, tiny_checkpoint, inventory, *(f"--stage={one}" for one in stages))
    assert [one[:5] for one in engines[:4]] == [
        ["thinker", "0", "box-b", "10.0.0.2", "cuda:0,1"],
        ["talker/0", "1", "box-b", "10.0.0.2", "cuda:0"],
        ["talker/1", "1", "box-b", "10.0.0.2", "cuda:1"],
        ["token2wav", "0", "box-a", "10.0.0.1", "cuda:0"],
    ]
    assert [one[0].partition(":")[0] + one[0].partition(":")[2][:2] for one in engines[4:]] == [
        "box-b cuda0:",
        "box-b cuda1:",
        "box-a cuda0:",
        "not used f",
    ]
    assert engines[-1] == ["not used: front"]


def test_what_finds_no_place_is_one_line_with_the_nearest_change(
    capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path, inventory: str
) -> None:
    args = ["serve", str(tiny_checkpoint), *FLAGS, "--dry-run", inventory, "--stage=token2wav.layer=0"]
    three = ["--stage=thinker.layer=0", "--stage=thinker.tensor_parallel_size=2", "--stage=thinker.replicas=3"]
    assert rejected(capsys, *args, *three).endswith(
        "replica thinker/2 finds no place: it needs 2 cards on one host that no other replica of layer 0 owns, and of "
        "3 hosts box-a has 1: leave thinker.layer out, so that it shares"
    )
    line = rejected(capsys, *args, "--stage=token2wav.replicas=7")
    assert "replica token2wav/5 (and 1 more of token2wav) finds no place: it needs a card that no other" in line
    assert line.endswith(": leave token2wav.layer out, so that it shares")


def test_ranks_may_span_hosts(capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "inventory.yaml"
    file.write_text("hosts: {a: {memory: 8GiB}, b: {memory: 8GiB}}")
    stages = ["--stage=thinker.tensor_parallel_size=2", "--stage=thinker.nodes=2"]
    _, first, second, *_ = dry_run(capfd, tiny_checkpoint, f"--inventory={file}", *stages)
    assert (first[:5], second[:5]) == (["thinker", "0", "a", "-", "cpu"], ["thinker", "0", "b", "-", "cpu"])


def test_what_vllm_places_is_named(capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path, inventory: str) -> None:
    *_, last = dry_run(
        capfd, tiny_checkpoint, inventory, "--stage=thinker.tensor_parallel_size=2", "--stage=thinker.nnodes=2"
    )
    assert last == ["not planned, their devices are left to vLLM: thinker"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device-memory=24GiB"], "--device-memory: a plan's, with --dry-run"),
        (["--inventory=hosts.yaml"], "--inventory: a plan's, with --dry-run"),
        (
            ["--dry-run", "--inventory=hosts.yaml", "--device-memory=24GiB"],
            "--device-memory: cannot be combined with --inventory",
        ),
        (["--dry-run", "--inventory=none.yaml"], "inventory 'none.yaml' cannot be read: No such file or directory"),
    ],
)
def test_flags_of_a_plan_go_with_it(
    capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path, args: list[str], message: str
) -> None:
    assert message in rejected(capsys, "serve", str(tiny_checkpoint), *FLAGS, *args)


@pytest.mark.long  # the program itself; quick: test_on_this_host_all_engines_share_its_memory
def test_the_table_is_all_that_is_on_stdout(tiny_checkpoint: Path) -> None:
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(tiny_checkpoint), "--omni", "--dry-run"]
    done = subprocess.run([*command, *FLAGS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["engine", "thinker", "talker", "token2wav", "cpu:"]
