"""The flags of a front end with stages on other hosts, and of such a host; without a start."""

from pathlib import Path

import pytest

from tests.entrypoints.test_cli import rejected
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.entrypoints.cli.serve import parse_serve_args

JOINING = ["--headless", "--join=10.0.0.1:7654", "--token-file=token"]


def test_a_front_end_has_the_hosts_of_its_stages_and_where_they_join(tiny_checkpoint: Path) -> None:
    flags = ["--stage=talker.host=box-a", "--listen=10.0.0.1:7654", "--token-file=token"]
    config = parse_serve_args([str(tiny_checkpoint), *flags]).load_config()
    assert (config.stage("talker").host, config.listen, config.token_file) == ("box-a", "10.0.0.1:7654", "token")


def test_a_front_end_whose_stages_ray_places(tiny_checkpoint: Path) -> None:
    flags = ["--worker-backend=ray", "--ray-address=10.0.0.1:6379"]
    config = parse_serve_args([str(tiny_checkpoint), *flags]).load_config()
    assert (config.worker_backend, config.ray_address) == ("ray", "10.0.0.1:6379")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--join=10.0.0.1:7654"], "--join: a host's that serves stages for a front end: give --headless, too"),
        (["--listen=10.0.0.1:7654"], "--listen, --token-file: give both"),
        (["--headless", "--stage=talker", "--token-file=token"], "--headless: give --join HOST:PORT"),
        (["--headless", "--stage=talker", "--join=10.0.0.1:7654"], "--headless: give --token-file FILE"),
        (JOINING, "--headless: give the stages that run here, --stage NAME"),
        (
            [*JOINING, "--stage=talker.max_num_seqs=8"],
            "with --headless, a name; settings of stages are the front end's",
        ),
        ([*JOINING, "--stage=talker", "--epd=E:1,PD:1"], "--epd: not with --headless; it is the front end's"),
        ([*JOINING, "--stage=talker", "--worker-backend=ray"], "--worker-backend: not with --headless"),
        (["--ray-address=10.0.0.1:6379"], "--ray-address: give --worker-backend ray, too"),
        (["--worker-backend=ray", "--dry-run"], "--worker-backend ray: not with --dry-run, which asks no cluster"),
        ([*JOINING, "--stage=talker", "--dry-run"], "--dry-run: not with --headless"),
    ],
)
def test_flags_that_do_not_go_together_are_rejected(
    capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert said in rejected(capsys, "serve", "m", *flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-num-seqs=8"], "--max-num-seqs: not with --headless; settings of engines are the front end's"),
        (["--join=front"], "--join front: must be HOST:PORT"),
        ([], "/token: No such file or directory: make one with: (umask 077; openssl rand -hex 32 > FILE)"),
    ],
)
def test_a_host_that_is_started_wrongly_ends_at_once(
    capsys: pytest.CaptureFixture[str],
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(tiny_checkpoint), *JOINING, "--stage=talker", *flags])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--stage=talker.host=box-a"], "stage 'talker': host = 'box-a': the host joins this one: give --listen"),
        (["--listen=127.0.0.1:7654", "--token-file=token"], "no stage is on another host: give --stage NAME.host=HOST"),
    ],
)
def test_a_front_end_that_lacks_hosts_or_their_address_ends_at_once(
    capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path, flags: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(tiny_checkpoint), "--port=0", "--max-model-len=512", *flags])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_plans_for_this_host_and_names_the_rest(
    capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    flags = ["--stage=talker.host=box-a", "--listen=10.0.0.1:7654", "--token-file=token", "--max-model-len=1024"]
    main(["serve", str(tiny_checkpoint), "--dry-run", *flags])
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["thinker", "token2wav"]
    assert lines[-1] == "not planned, each host divides its own devices: talker (box-a)"


def test_a_dry_run_names_the_instances_on_other_hosts(
    capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    hosts = ["--epd=E:1,P:1,D:1", "--stage=thinker.host=[box-e, null, box-d]"]
    main(["serve", str(tiny_checkpoint), "--dry-run", *hosts, "--max-model-len=1024"])
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["thinker/P0", "talker", "token2wav"]
    assert lines[-1].endswith("its own devices: thinker/E0 (box-e), thinker/D0 (box-d)")
