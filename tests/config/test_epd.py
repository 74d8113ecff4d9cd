"""Which mixes of instances there can be, and what is said of those that cannot."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config import LANGUAGE, load_config
from vllm_omni.config.epd import BUDGET_KEYS, needless_encoder, no_encoder, parse_instances
from vllm_omni.engine.instances import make_instances
from vllm_omni.epd.budget import EPDConfig
from vllm_omni.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]})
    )
    return tmp_path


def test_a_checkpoint_that_vllm_serves_is_one_stage(model: Path) -> None:
    config = load_config(model)
    assert (config.model_type, config.stage_names) == (LANGUAGE, ("language",))


def test_an_architecture_that_nobody_has_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobodys", "architectures": ["NobodysModel"]}))
    with pytest.raises(ConfigError, match=r"'nobodys' is not supported, and vLLM has no architecture 'NobodysModel': "):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "mix"),
    [
        ("E:1,PD:2", {"E": 1, "PD": 2}),
        ("e:1, dp:1", {"E": 1, "PD": 1}),
        ("EPD", {"EPD": 1}),
        ("EP:1,D:3", {"EP": 1, "D": 3}),
        ("ED:1,P:1", {"ED": 1, "P": 1}),
        ("E:1,P:1,D:1", {"E": 1, "P": 1, "D": 1}),
    ],
)
def test_a_mix_is_read(model: Path, text: str, mix: dict[str, int]) -> None:
    assert load_config(model, epd=text).stages[0].deployment.instances == mix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("E:1", r"epd = 'E:1': nobody would prefill: give E:1,P:1, or EP:1"),
        ("E:1,P:2", r"nobody would decode: give E:1,P:2,D:1, or E:1,PD:2"),
        ("E:1,D:1", r"nobody would prefill: give E:1,D:1,P:1, or E:1,PD:1"),
        ("X:1,PD:1", r"no kind 'X' \(E encodes, P prefills, D decodes\): valid: E, P, D"),
        ("PDD", r"no kind 'PDD' .*did you mean 'PD'\?"),
        ("E:0,PD:1", r"E = 0: must be a number of instances, from 1 to 64"),
        ("E:one,PD:1", r"'E:one': must be KIND:NUMBER, as in E:1,PD:1"),
        ("PD:1,DP:2", r"PD is given twice: give PD:3"),
        ("", r"must be KIND:NUMBER"),
    ],
)
def test_a_mix_that_cannot_be_says_what_can(model: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(model, epd=text)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("balence: least_work", r"deploy.yaml:4: stages.language.epd.balence = .*did you mean 'balance'\?"),
        ("balance: round", r"epd.balance = 'round': did you mean 'round_robin'\?"),
        ("transport: smh", r"epd.transport = 'smh': did you mean 'shm'\?"),
        ("admission_timeout_s: 0", r"epd.admission_timeout_s = 0: must be a number of seconds, above 0"),
        ("instances: {PD: 0}", r"epd.instances.PD = 0: PD = 0: must be a number of instances"),
        ("engine_args: {Q: {}}", r"epd.engine_args.Q = {}: no kind 'Q'"),
        ("engine_args: {E: {max_num_seq: 2}}", r"epd.engine_args.E.max_num_seq = 2: .*did you mean 'max_num_seqs'\?"),
    ],
)
def test_a_mistake_in_the_section_is_named_with_its_place(
    model: Path, tmp_path: Path, section: str, message: str
) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(f"stages:\n  language:\n    epd:\n      {section}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(model, deploy_config=deploy)


def test_the_flag_adds_to_the_section_of_a_file(model: Path, tmp_path: Path) -> None:
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text("stages: {language: {epd: {tpot_ms: 30, engine_args: {DP: {max_num_seqs: 2}}}}}")
    stage = load_config(model, deploy_config=deploy, epd="E:1,PD:1").stages[0]
    assert stage.budgets == {"tpot_ms": 30}
    assert stage.deployment.engine_args == {"PD": {"max_num_seqs": 2}}
    assert stage.deployment.is_split


def test_one_instance_may_have_arguments_of_its_own(model: Path) -> None:
    args = {"PD": {"max_num_seqs": 4}, "DP1": {"device_ids": ["1"]}}
    stage = load_config(model, epd={"instances": "E:1,PD:2", "engine_args": args}).stages[0]
    instances = {one.name: one for one in make_instances(stage)}
    assert list(instances) == ["language/E0", "language/PD0", "language/PD1"]
    assert instances["language/E0"].engine_args["mm_encoder_only"] is True
    assert instances["language/PD0"].engine_args["max_num_seqs"] == 4
    assert instances["language/PD1"].engine_args["device_ids"] == ["1"]
    assert [name for name, one in instances.items() if one.is_front] == ["language/PD0"]


@pytest.mark.parametrize(
    ("mix", "roles"),
    [
        ("E:1,PD:1", {"E0": "ec_producer", "PD0": "ec_consumer"}),
        ("E:1,P:1,D:1", {"E0": "ec_producer", "P0": "ec_consumer kv_producer", "D0": "ec_consumer kv_consumer"}),
        ("EP:1,D:1", {"EP0": "kv_producer", "D0": "kv_consumer"}),
        ("ED:1,P:1", {"ED0": "ec_both kv_consumer", "P0": "ec_consumer kv_producer"}),
        ("EPD:2", {"EPD0": "", "EPD1": ""}),
        ("EP:1,D:1,PD:1", {"EP0": "kv_producer", "D0": "kv_consumer", "PD0": "kv_both"}),
    ],
)
def test_each_instance_has_the_connectors_that_its_mix_needs(model: Path, mix: str, roles: dict[str, str]) -> None:
    found = {}
    for one in make_instances(load_config(model, epd=mix).stages[0]):
        args = one.engine_args
        of_one = (args.get("ec_transfer_config", {}).get("ec_role"), args.get("kv_transfer_config", {}).get("kv_role"))
        found[one.name.removeprefix("language/")] = " ".join(filter(None, of_one))
    assert found == roles


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"E": {"mm_encoder_only": True}}, r"epd.engine_args.E.mm_encoder_only: set by the mix"),
        ({"PD1": {"max_num_seqs": 1}}, r"epd.engine_args.PD1: there is no such instance: did you mean 'PD'\?"),
        ({"P": {"max_num_seqs": 1}}, r"epd.engine_args.P: there is no such instance: .*valid: E, PD, E0, PD0"),
    ],
)
def test_arguments_of_instances_that_cannot_be_are_refused(model: Path, args: dict[str, Any], message: str) -> None:
    stage = load_config(model, epd={"instances": "E:1,PD:1", "engine_args": args}).stages[0]
    with pytest.raises(ConfigError, match=message):
        make_instances(stage)


def test_only_the_first_stage_has_instances(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni"}))
    with pytest.raises(ConfigError, match=r"stage 'talker': epd: only the first stage"):
        load_config(tmp_path, stage_overrides=["talker.epd.instances=PD:2"])
    assert load_config(tmp_path, epd="E,PD").stage("thinker").deployment.instances == {"E": 1, "PD": 1}


def test_the_section_knows_the_budgets_of_the_scheduler() -> None:
    assert set(BUDGET_KEYS) == {one.name for one in fields(EPDConfig)}


@pytest.mark.parametrize(
    ("mix", "advice"),
    [("E:1,PD:2", "give EPD:2"), ("EP:1,D:1", "give P:1,D:1"), ("ED:1,P:1", "give D:1,P:1")],
)
def test_a_model_of_text_needs_no_encoder(mix: str, advice: str) -> None:
    assert needless_encoder(parse_instances(mix)).endswith(advice)


@pytest.mark.parametrize(
    ("mix", "advice"),
    [("PD:2", "give PD:2,E:1, or EPD:2"), ("P:1,D:1", "give P:1,D:1,E:1, or EP:1,D:1")],
)
def test_a_model_of_images_needs_one(mix: str, advice: str) -> None:
    assert no_encoder(parse_instances(mix)).endswith(advice)
