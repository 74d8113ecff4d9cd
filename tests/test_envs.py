import os
import tempfile
from pathlib import Path

import pytest

from vllm_omni import envs
from vllm_omni.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in envs.VARIABLES:
        monkeypatch.delenv(name, raising=False)


NOT_SECONDS = ["soon", "0", "-1", "inf", "nan", ""]


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


def test_media_may_take_a_quarter_of_the_memory_that_the_container_leaves(monkeypatch, tmp_path):
    monkeypatch.setattr("vllm_omni.cgroups.control_groups", lambda: [tmp_path / "inner", tmp_path])
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert physical // 4 == envs.VLLM_OMNI_MAX_MEDIA_BYTES
    for limit, expected in [("400000000", 100_000_000), ("max", physical // 4), (str(2**63 - 4096), physical // 4)]:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert expected == envs.VLLM_OMNI_MAX_MEDIA_BYTES, limit


def test_an_invalid_value_names_variable_value_and_range(monkeypatch):
    cases = [("VLLM_OMNI_STAGE_READY_TIMEOUT_S", text, "a number of seconds above 0") for text in NOT_SECONDS]
    cases += [("VLLM_OMNI_RUNTIME_DIR", text, "the path of an existing directory") for text in ("", "/no/directory")]
    cases += [("VLLM_OMNI_RELAY_BYTES", "1000", "a number of bytes, 1048576 or more, in whole pages")]
    cases += [("VLLM_OMNI_RELAY_BYTES", "1048577", "a number of bytes, 1048576 or more, in whole pages")]
    cases += [("VLLM_OMNI_RELAY_BYTES", "1G", "a whole number")]
    cases += [("VLLM_OMNI_RELAY_HOST", text, "the name or address of one interface") for text in ("0.0.0.0", "")]
    for name, text, valid in cases:
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=f"{name}='{text}': must be {valid}"):
            getattr(envs, name)


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
