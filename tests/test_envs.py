import tempfile
from pathlib import Path

import pytest

from vllm_omni import envs
from vllm_omni.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in envs.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_default_when_not_set():
    assert envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S == 600.0
    assert Path(tempfile.gettempdir()) == envs.VLLM_OMNI_RUNTIME_DIR


def test_value_is_read_at_each_access(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_OMNI_STAGE_READY_TIMEOUT_S", "12.5")
    assert envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S == 12.5
    monkeypatch.setenv("VLLM_OMNI_STAGE_READY_TIMEOUT_S", "3")
    assert envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S == 3.0
    monkeypatch.setenv("VLLM_OMNI_RUNTIME_DIR", str(tmp_path))
    assert tmp_path == envs.VLLM_OMNI_RUNTIME_DIR


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan", ""])
def test_value_that_does_not_parse_names_variable_value_and_range(monkeypatch, text):
    monkeypatch.setenv("VLLM_OMNI_STAGE_READY_TIMEOUT_S", text)
    with pytest.raises(
        ConfigError, match=f"VLLM_OMNI_STAGE_READY_TIMEOUT_S='{text}': must be a number of seconds above 0"
    ):
        _ = envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S


@pytest.mark.parametrize("text", ["", "/no/such/directory"])
def test_runtime_directory_must_exist(monkeypatch, text):
    monkeypatch.setenv("VLLM_OMNI_RUNTIME_DIR", text)
    with pytest.raises(ConfigError, match="the path of an existing directory"):
        _ = envs.VLLM_OMNI_RUNTIME_DIR


def test_misspelt_variable_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'VLLM_OMNI_RUNTIME_DIR'"):
        envs.reject_unknown({"VLLM_OMNI_RUNTIMEDIR": "/tmp"})


def test_variables_of_other_projects_are_ignored():
    envs.reject_unknown({"VLLM_LOGGING_LEVEL": "INFO", "VLLM_OMNI_RUNTIME_DIR": "/tmp", "OMNI": "1"})


def test_undeclared_attribute_names_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'VLLM_OMNI_STAGE_READY_TIMEOUT_S'"):
        _ = envs.VLLM_OMNI_STAGE_READY_TIMEOUT


def test_every_variable_has_a_meaning():
    for name, variable in envs.VARIABLES.items():
        assert name.startswith(envs.PREFIX)
        assert variable.meaning


@pytest.mark.parametrize(
    ("name", "text", "valid"),
    [
        ("VLLM_OMNI_RELAY_BYTES", "1000", "1048576 or more"),
        ("VLLM_OMNI_RELAY_BYTES", "1048577", "whole pages"),
        ("VLLM_OMNI_RELAY_BYTES", "1G", "a whole number"),
        ("VLLM_OMNI_RELAY_HOST", "0.0.0.0", "one interface"),
        ("VLLM_OMNI_RELAY_HOST", "", "one interface"),
    ],
)
def test_the_relays_variables_are_checked(monkeypatch, name, text, valid):
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=valid):
        getattr(envs, name)
