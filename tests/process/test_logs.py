"""Which lines a server's processes log, and under which name."""

import logging

import pytest

from vllm_omni.process.logs import LogFilter


def make_record(name: str, level: int, message: str, process: str = "EngineCore") -> logging.LogRecord:
    record = logging.LogRecord(name, level, "file.py", 1, message, (), None)
    record.vllm_process_name = process
    return record


def is_kept(name: str, level: int, message: str = "a line") -> bool:
    return LogFilter().filter(make_record(name, level, message))


@pytest.fixture(autouse=True)
def no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)


def test_our_lines_and_warnings_are_kept_and_details_of_vllm_are_not() -> None:
    assert is_kept("vllm_omni.engine.stage", logging.INFO)
    assert is_kept("vllm.v1.metrics.loggers", logging.INFO)
    assert is_kept("vllm.entrypoints.serve.utils.request_logger", logging.INFO)  # flags ask for these
    assert is_kept("vllm.config.model", logging.WARNING)
    assert not is_kept("vllm.config.model", logging.INFO)
    assert is_kept("vllm.config.model", logging.DEBUG)  # only logged if a flag asks for it


def test_warnings_about_how_vllm_is_used_are_left_out() -> None:
    warning = "Using custom scheduler class vllm_omni.x. This scheduler interface is not public"
    assert not is_kept("vllm.config.scheduler", logging.WARNING, warning)


def test_warnings_about_settings_come_once_and_from_the_front_end() -> None:
    front, stage = LogFilter(), LogFilter("talker")
    record = make_record("vllm.platforms.cpu", logging.WARNING, "Triton is not installed.")
    assert [front.filter(record), front.filter(record), stage.filter(record)] == [True, False, False]
    record = make_record("vllm.v1.worker.cpu_worker", logging.WARNING, "libiomp is not found")
    assert [stage.filter(record), stage.filter(record)] == [True, False]
    assert stage.filter(make_record("vllm.platforms.cpu", logging.ERROR, "no such device"))


def test_a_level_that_is_set_brings_the_details(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert is_kept("vllm.config.model", logging.INFO)


@pytest.mark.parametrize(
    ("process", "shown"),
    [
        ("EngineCore", "talker"),
        ("EngineCore_DP1", "talker DP1"),
        ("Worker_TP1", "talker Worker_TP1"),
        ("talker Worker_TP1", "talker Worker_TP1"),
    ],
)
def test_lines_of_a_stage_have_its_name(process: str, shown: str) -> None:
    record = make_record("vllm.x", logging.WARNING, "a line", process)
    assert LogFilter("talker").filter(record)
    assert record.vllm_process_name == shown
