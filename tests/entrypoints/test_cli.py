"""The command line, up to where stages would be started."""

import contextlib
import gc
import json
import logging
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni import __version__
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.plugin import register
from vllm_omni.testing import llava as tiny_llava

VLLM = Path(sys.executable).with_name("vllm")


def rejected(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line on stderr with which the command line rejects the arguments."""
    with pytest.raises(SystemExit) as exit_info:
        main(args)
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# -- the commands ------------------------------------------------------------------------------------------------------


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    commands = ("serve", "generate", "config", "plan-memory", "cache", "graph", "doctor", "tiny")
    for args in ([], ["--help"], ["-h"]):
        main(args)
        out = capsys.readouterr().out
        assert [name for name in commands if f"  {name} " not in out] == [], args


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out.strip() == __version__


def test_unknown_command_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for word, meant in [("server", "serve"), ("generat", "generate"), ("--hlep", "--help")]:
        assert f"did you mean {meant!r}?" in rejected(capsys, word, "model")


def test_ctrl_c_is_no_error_of_the_library_that_it_interrupts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pydantic makes a SchemaError of it."""

    def tiny(args: list[str]) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as exc:
            raise ValueError("no schema") from exc

    monkeypatch.setattr("vllm_omni.entrypoints.cli.tiny.tiny", tiny)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores the signal
    try:
        with pytest.raises(SystemExit) as exit_info:
            main(["tiny"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert exit_info.value.code == 130
    assert capsys.readouterr().err == "vllm-omni: error: interrupted\n"


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command, flags in [
        (["generate"], ["--prompt TEXT", "--image FILE", "--speaker NAME", "--stage NAME.KEY=VALUE"]),
        (["config", "show"], ["--deploy-config FILE", "--json"]),
        (["config"], ["config show MODEL"]),
        (["plan-memory"], ["--device-memory SIZE", "--stage NAME.KEY=VALUE"]),
        (["serve"], ["--dry-run", "--inventory FILE", "--device-memory SIZE"]),
        (["doctor"], ["--clean", "--json"]),
        (["cache"], ["{stats,verify,clear}", "--disk PATH", "--directory PATH", "--layout ID", "--json"]),
    ]:
        with contextlib.suppress(SystemExit):
            main([*command, "--help"])
        out = capsys.readouterr().out
        assert [flag for flag in flags if flag not in out] == [], command
        assert "(default: None)" not in out


def test_commands_that_start_nothing_import_no_vllm(
    tiny_checkpoint: Path, tiny_pipeline: Callable[[str], Path]
) -> None:
    graphs = Path(__file__).parents[2] / "examples" / "graphs" / "qwen_omni.py"
    commands = [["--help"], ["cache", "--help"], ["config", "--help"], ["config", "shwo"], ["tiny", "qwen"], ["doctor"]]
    for args in [*commands, *(["graph", str(one)] for one in (graphs, tiny_checkpoint, tiny_pipeline("qwen-image")))]:
        code = (
            "import sys; from vllm_omni.entrypoints.cli.main import main\n"
            f"try: main({args})\n"
            "except SystemExit: pass\n"
            "print({'vllm', 'torch', 'transformers', 'diffusers'} & set(sys.modules), file=sys.stderr)"
        )
        result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
        assert result.stderr.splitlines()[-1] == "set()", args


# -- tiny --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("qwen2_5_omni", "qwen2_5_omni"), ("qwen3_omni", "qwen3_omni_moe"), ("mimo_audio", "qwen2")],
)
def test_tiny_writes_a_checkpoint(
    name: str, model_type: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(["tiny", name, str(tmp_path / "tiny"), "--seed", "3"])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "tiny")
    assert json.loads((tmp_path / "tiny" / "config.json").read_text())["model_type"] == model_type


def test_tiny_writes_a_language_model_that_reads_images(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["tiny", "llava-1.5", str(tmp_path / "tiny"), "--seed", "3"])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "tiny")
    assert json.loads((tmp_path / "tiny" / "config.json").read_text())["model_type"] == "llava"
    written = (tmp_path / "tiny" / "model.safetensors").read_bytes()
    assert (tiny_llava.build(tmp_path / "again", seed=3) / "model.safetensors").read_bytes() == written
    assert (tiny_llava.build(tmp_path / "other", seed=4) / "model.safetensors").read_bytes() != written


def test_tiny_writes_a_pipeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["tiny", "wan2.2-t2v", str(tmp_path / "tiny")])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "tiny")
    assert json.loads((tmp_path / "tiny" / "model_index.json").read_text())["_class_name"] == "WanPipeline"


def test_tiny_rejects(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = str(tmp_path / "tiny")
    for args, why in [
        (["qwen2_5_onmi", "DIR"], "invalid value 'qwen2_5_onmi': did you mean 'qwen2_5_omni'?"),
        (["qwen2_5_omni", "DIR", "--sed=1"], "unknown flag '--sed': did you mean '--seed'?"),
        (["--sed", "1", "qwen2_5_omni", "DIR"], "unknown flag '--sed': did you mean '--seed'?"),
        (["qwen2_5_omni", "DIR", "--seed", "one"], "--seed: invalid int value: 'one'"),
        (["qwen2_5_omni", "DIR", "--variant", "wyde"], "no variant 'wyde'"),
        (["qwen_image", "DIR"], "invalid value 'qwen_image': did you mean 'qwen-image'?"),
        (["qwen-image", "DIR", "--variant", "wide"], "no variant 'wide': qwen-image has one shape"),
        (["llava", "DIR"], "invalid value 'llava': did you mean 'llava-1.5'?"),
        (["llava-1.5", "DIR", "--variant", "wide"], "no variant 'wide': llava-1.5 has one shape"),
        (["qwen2_5_omni"], "DIR"),
    ]:
        assert why in rejected(capsys, "tiny", *(directory if arg == "DIR" else arg for arg in args)), args


def test_a_disk_that_is_full_leaves_nothing_in_the_way_of_another_try(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name in ("qwen2_5_omni", "llava-1.5", "qwen-image"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        try:
            with pytest.raises(SystemExit) as exit_info:
                main(["tiny", name, str(tmp_path / name)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert exit_info.value.code == 1
        assert f"{tmp_path / name} cannot be written: " in capsys.readouterr().err.splitlines()[-1]
        assert not list((tmp_path / name).iterdir())
    main(["tiny", "qwen-image", str(tmp_path / "qwen-image")])
    assert (tmp_path / "qwen-image" / "model_index.json").exists()


def test_tiny_overwrites_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    assert "not an empty directory" in rejected(capsys, "tiny", "qwen2_5_omni", str(tmp_path))


# -- serve -------------------------------------------------------------------------------------------------------------


def test_only_engine_flags_that_were_given_reach_the_stages() -> None:
    parsed = parse_serve_args(
        ["m", "--max-num-seqs", "8", "--enforce_eager", "--port=9000", "--no-enable-prefix-caching"]
    )
    assert parsed.engine_args == {"max_num_seqs": 8, "enforce_eager": True, "enable_prefix_caching": False}
    assert parsed.args.model == "m"
    assert parsed.args.port == 9000


def test_a_flag_with_its_default_value_is_given_all_the_same() -> None:
    default = parse_serve_args(["m"]).args.gpu_memory_utilization
    parsed = parse_serve_args(["m", "--gpu-memory-utilization", str(default)])
    assert parsed.engine_args == {"gpu_memory_utilization": default}


def test_flags_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("max-num-seqs: 8\nport: 9000\ndtype: float32\n")
    parsed = parse_serve_args(["m", "--config", str(path), "--dtype", "bfloat16"])
    assert parsed.engine_args == {"max_num_seqs": 8, "dtype": "bfloat16"}
    assert parsed.args.port == 9000


def test_no_warning_for_a_repeated_flag(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    logging.getLogger("vllm.utils.argparse_utils").addHandler(caplog.handler)
    parsed = parse_serve_args(["m", "--stage", "a.seed=1", "--stage", "b.seed=2"])
    logging.getLogger("vllm.utils.argparse_utils").removeHandler(caplog.handler)
    assert parsed.args.stage == ["a.seed=1", "b.seed=2"]
    assert caplog.messages == []


def test_flags_of_one_stage(tiny_checkpoint: Path, tmp_path: Path) -> None:
    deployment = tmp_path / "deploy.yaml"
    deployment.write_text("stages:\n  talker:\n    max_num_seqs: 2\n    max_model_len: 512\n")
    flags = {
        "--deploy-config": str(deployment),
        "--max-num-batched-tokens": "300",
        "--stage-overrides": '{"talker": {"max_num_seqs": 3}}',
        "--stage": "thinker.max_num_seqs=4",
    }
    given = [word for flag in flags.items() for word in flag]
    parsed = parse_serve_args([str(tiny_checkpoint), *given, "--stage=token2wav.max_num_seqs=5"])
    stages = {stage.name: dict(stage.engine_args) for stage in parsed.load_config().stages}
    assert stages == {
        "thinker": {"max_num_batched_tokens": 300, "max_num_seqs": 4},
        "talker": {"max_num_batched_tokens": 300, "max_num_seqs": 3, "max_model_len": 512},
        "token2wav": {"max_num_seqs": 5},
    }


def test_serve_rejects_wrong_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for args, why in [
        (["m", "--max-num-seq", "8"], "unknown flag '--max-num-seq': did you mean '--max-num-seqs'?"),
        (["m", "--max-num-seq=8", "--stages=x"], "unknown flag '--stages': did you mean '--stage'?"),
        (["m", "--dtype", "flaot32"], "--dtype: invalid value 'flaot32': did you mean 'float32'?"),
        (["m", "--max-num-seqs", "many"], "--max-num-seqs: invalid int value: 'many'"),
        (["m", "extra"], "unexpected argument 'extra'"),
        (["m", "--stage-overrides", "{talker"], "--stage-overrides: not JSON"),
        (["m", "--stage-overrides", "[]"], "must be a JSON object"),
        ([], "no model"),
        (["m", "--headless"], "--headless: give --join HOST:PORT"),
        (["m", "--api-server-count", "0"], "--api-server-count 0: must be at least 1"),
        (["m", "--grpc"], "--grpc"),
        (["m", "--enable-auto-tool-choice"], "requires --tool-call-parser"),
        (["m", "--chat-template", "/nowhere/template.jinja"], "doesn't exist"),
    ]:
        assert why in rejected(capsys, "serve", *args), args


def test_several_front_ends_reject_adapters_that_only_one_would_know(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    assert parse_serve_args(["m", "--api-server-count", "1"]).args.api_server_count == 1
    why = "--api-server-count: not with VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    assert why in rejected(capsys, "serve", "m", "--api-server-count", "2")


def test_serve_rejects_a_wrong_deployment(capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path) -> None:
    for args, why in [
        (["--stage", "talkr.max_num_seqs=8"], "no stage 'talkr': did you mean 'talker'?"),
        (
            ["--stage", "talker.max_num_seq=8"],
            "unknown key 'max_num_seq' of stage 'talker': did you mean 'max_num_seqs'?",
        ),
        (["--stage", "talker.max_num_seqs=0"], "at least 1"),
        (["--stage", "talker"], "must be NAME.KEY=VALUE"),
        (["--deploy-config", "/nowhere/deploy.yaml"], "cannot be read"),
        (["--kv-cache-memory-bytes", "1G"], "must be given for each stage"),
        (["--enable-auto-tool-choice", "--tool-call-parser=hermies"], "invalid tool call parser: hermies"),
        (["--max-model-len", "1000000000"], "stage 'thinker': User-specified max_model_len (1000000000) is greater"),
    ]:
        with pytest.raises(SystemExit) as exit_info:
            main(["serve", str(tiny_checkpoint), "--port=0", *args])
        assert exit_info.value.code == 2, args
        assert why in capsys.readouterr().err.splitlines()[-1]


def test_serve_rejects_a_port_in_use(capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path) -> None:
    with socket.socket() as sock, pytest.raises(SystemExit) as exit_info:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        main(["serve", str(tiny_checkpoint), "--host=127.0.0.1", f"--port={port}"])
    assert exit_info.value.code == 2
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err.splitlines()[-1]
    with pytest.warns(ResourceWarning, match="unclosed <socket"):  # vLLM's; the process would have ended by now
        del exit_info
        gc.collect()


def test_serve_rejects_a_directory_without_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "has neither config.json nor model_index.json" in rejected(capsys, "serve", str(tmp_path))


def test_serve_help_has_our_flags_and_vllms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    out = capsys.readouterr().out
    assert "vllm-omni serve MODEL" in out
    assert "--stage NAME.KEY=VALUE" in out
    assert "SchedulerConfig" in out


# -- vLLM's own command ------------------------------------------------------------------------------------------------


@pytest.mark.long  # quick: tests/server.py serves so, and test_serve_rejects_wrong_flags
def test_vllm_serve_with_omni_is_ours() -> None:
    command = [VLLM, "serve", "m", "--omni", "--stage-override={}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert "unknown flag '--stage-override': did you mean '--stage-overrides'?" in result.stderr.splitlines()[-1]


def test_vllm_serve_without_omni_is_as_before() -> None:
    register()
    parser = make_arg_parser(FlexibleArgumentParser())
    assert not {"--omni", "--stage", "--deploy-config"} & set(parser._option_string_actions)
