"""``plan-memory``: the stages' memory, without a start."""

from pathlib import Path

import pytest

from tests.entrypoints.test_cli import rejected
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.process.memory import parse_bytes

FLAGS = ["--dtype=float32", "--max-model-len=1024", "--enforce-eager"]


@pytest.fixture(autouse=True)
def no_cache_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def plan(capfd: pytest.CaptureFixture[str], model: Path, *args: str) -> list[list[str]]:
    """The cells of each line but the last."""
    main(["plan-memory", str(model), *FLAGS, *args])
    lines = capfd.readouterr().out.splitlines()
    return [[cell for cell in line.split("  ") if cell] for line in lines[:-1]]


def test_the_plan_is_a_table_of_stages(capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path) -> None:
    header, talker, thinker, token2wav = (
        [cell.strip() for cell in row] for row in plan(capfd, tiny_checkpoint, "--device-memory=1GiB")
    )
    assert header == ["stage", "device", "weights", "activations", "cache min", "planned", "max"]
    assert talker == ["talker", "cpu", "948.2 KiB", "7.8 MiB", "1.1 MiB", "128.1 MiB", "128.1 MiB"]
    assert thinker == ["thinker", "cpu", "1.8 MiB", "5.8 MiB", "864.0 KiB", "96.1 MiB", "96.1 MiB"]  # with its rows
    assert token2wav == ["token2wav", "cpu", "1.2 MiB", "294.8 KiB", "-", "-", "-"]


def test_a_device_that_is_too_small_for_the_maxima_is_divided(
    capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path
) -> None:
    _, talker, thinker, _ = plan(capfd, tiny_checkpoint, "--device-memory=96MiB")
    assert (talker[5].strip(), thinker[5].strip()) == ("40.4 MiB", "30.3 MiB")


def test_the_plan_of_this_machine_counts_what_is_free(capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path) -> None:
    main(["plan-memory", str(tiny_checkpoint), *FLAGS])
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("cpu: ")
    assert " free of " in last
    assert last.endswith(" rest")


def test_what_does_not_fit_is_an_error_with_the_nearest_change(
    capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path
) -> None:
    args = ["plan-memory", str(tiny_checkpoint), "--dtype=float32", "--enforce-eager", "--device-memory=56MiB"]
    line = rejected(capsys, *args)
    assert "device cpu: " in line
    assert "missing for its stages: talker: weights 948.2 KiB" in line
    assert "it has 56.0 MiB free of 56.0 MiB: give talker.max_model_len=" in line
    length = line.rpartition("=")[2]
    main([*args, f"--stage=talker.max_model_len={length}"])
    assert capsys.readouterr().err == ""


def test_sizes_of_devices_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"24GiB": 24 << 30, "1.5gib": 3 << 29, "80 GB": 80 * 10**9, "512": 512}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("24PiB", "much", "0GiB", "-1GiB", ""):
        line = rejected(capsys, "plan-memory", "m", f"--device-memory={text}")
        assert f"{text!r} is not a size: give for example 24GiB, 80GB or 512MiB" in line
