"""The section ``epd`` of a stage: mixes of instances, and the errors for wrong ones."""

import json
from pathlib import Path

import pytest

from vllm_omni.config import LANGUAGE, load_config
from vllm_omni.config.epd import Tasks, needless_encoder, no_encoder, parse_instances
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


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown", "architectures": ["UnknownModel"]}))
    with pytest.raises(ConfigError, match=r"'unknown' is not supported, and vLLM has no architecture 'UnknownModel': "):
        load_config(tmp_path)


def test_tasks_are_ordered_and_written_as_letters() -> None:
    assert [str(kind) for kind in (Tasks.D | Tasks.E, Tasks["PD"], Tasks.EPD & ~Tasks.E)] == ["ED", "PD", "PD"]
    assert [str(task) for task in Tasks.EPD] == ["E", "P", "D"]
    assert Tasks.PD.first is Tasks.P
    assert [Tasks.EPD.leading(kind) for kind in (Tasks.EP, Tasks.ED, Tasks.PD)] == [Tasks.EP, Tasks.E, Tasks(0)]


def test_a_mix_is_read(model: Path) -> None:
    for text, mix in [
        ("E:1,PD:2", {"E": 1, "PD": 2}),
        ("e:1, dp:1", {"E": 1, "PD": 1}),
        ("EPD", {"EPD": 1}),
        ("EP:1,D:3", {"EP": 1, "D": 3}),
        ("ED:1,P:1", {"ED": 1, "P": 1}),
        ("E:1,P:1,D:1", {"E": 1, "P": 1, "D": 1}),
        ("EPD:1,g:2", {"EPD": 1, "G": 2}),
    ]:
        deployment = load_config(model, epd=text).stages[0].deployment
        assert deployment.instances == mix
        assert deployment.mix == {Tasks[name]: number for name, number in mix.items()}


def test_caches_travel_where_tasks_are_on_different_instances(model: Path) -> None:
    for text, encode, decode in [
        ("E:1,PD:1", True, False),
        ("EP:1,D:1", False, True),
        ("ED:1,P:1", True, True),
        ("EPD:2", False, False),
        ("PD:1,EPD:1", False, False),
        ("EPD:1,G:1", False, True),
    ]:
        deployment = load_config(model, epd=text).stages[0].deployment
        assert (deployment.separates_encode, deployment.separates_decode) == (encode, decode), text


def test_errors_for_a_wrong_mix_say_what_is_valid(model: Path) -> None:
    for text, message in [
        ("E:1", r"epd = 'E:1': no instance prefills: give E:1,P:1, or EP:1"),
        ("E:1,P:2", r"no instance decodes: give E:1,P:2,D:1, or E:1,PD:2"),
        ("E:1,D:1", r"no instance prefills: give E:1,D:1,P:1, or E:1,PD:1"),
        ("X:1,PD:1", r"no kind 'X' \(E encodes, P prefills, D decodes, G generates pictures\): valid: E, P, D"),
        ("EPD:1,PG:1", r"no kind 'PG' .*did you mean 'P'\?"),
        ("P:1,G:1", r"no instance decodes: give P:1,G:1,D:1, or PD:1,G:1"),
        ("PDD", r"no kind 'PDD' .*did you mean 'PD'\?"),
        ("E:0,PD:1", r"E = 0: must be a number of instances, from 1 to 64"),
        ("E:one,PD:1", r"'E:one': must be KIND:NUMBER, as in E:1,PD:1"),
        ("PD:1,DP:2", r"PD is given twice: give PD:3"),
        ("", r"must be KIND:NUMBER"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_config(model, epd=text)


def test_an_error_in_the_section_names_its_place(model: Path, tmp_path: Path) -> None:
    deploy = tmp_path / "deploy.yaml"
    for section, message in [
        ("balence: least_work", r"deploy.yaml:4: stages.language.epd.balence = .*did you mean 'balance'\?"),
        ("balance: round", r"epd.balance = 'round': did you mean 'round_robin'\?"),
        ("transport: smh", r"epd.transport = 'smh': did you mean 'shm'\?"),
        ("admission_timeout_s: 0", r"epd.admission_timeout_s = 0: must be above 0"),
        ("instances: {PD: 0}", r"epd.instances.PD = 0: PD = 0: must be a number of instances"),
        ("engine_args: {Q: {}}", r"epd.engine_args.Q = {}: no kind 'Q'"),
        ("engine_args: {E: {max_num_seq: 2}}", r"epd.engine_args.E.max_num_seq = 2: .*did you mean 'max_num_seqs'\?"),
    ]:
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


def test_only_the_first_stage_has_instances(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni"}))
    with pytest.raises(ConfigError, match=r"stage 'talker': epd: only the first stage"):
        load_config(tmp_path, stage_overrides=["talker.epd.instances=PD:2"])
    assert load_config(tmp_path, epd="E,PD").stage("thinker").deployment.instances == {"E": 1, "PD": 1}


def test_a_stage_that_is_not_unified_has_an_engine_for_pictures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bagel"}))
    for given, instances in [
        ("unified=false", {"EPD": 1, "G": 1}),
        ("unified=true", {}),
        ("epd.instances=E:1,PD:1,G:2", {"E": 1, "PD": 1, "G": 2}),
    ]:
        deployment = load_config(tmp_path, stage_overrides=[f"language_model.{given}"]).stages[0].deployment
        assert (deployment.instances, deployment.separates_pictures) == (instances, "G" in instances), given
    for override, epd, message in [
        ("language_model.unified=true", "EPD:1,G:1", "unified = true: cannot be combined with instances of kind G"),
        ("language_model.unified=false", "EPD:2", "unified = false: an instance must generate pictures: add G:1"),
        ("language_model.unified=fasle", None, "unified = 'fasle': must be true or false"),
        ("image_decoder.unified=false", None, "'image_decoder': unified: only the first stage"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path, stage_overrides=[override], epd=epd)


def test_advice_on_a_mix_that_does_not_suit_the_model() -> None:
    for mix, advice in [("E:1,PD:2", "give EPD:2"), ("EP:1,D:1", "give P:1,D:1"), ("ED:1,P:1", "give D:1,P:1")]:
        assert needless_encoder(parse_instances(mix)).endswith(advice)
    for mix, advice in [("PD:2", "give PD:2,E:1, or EPD:2"), ("P:1,D:1", "give P:1,D:1,E:1, or EP:1,D:1")]:
        assert no_encoder(parse_instances(mix)).endswith(advice)
