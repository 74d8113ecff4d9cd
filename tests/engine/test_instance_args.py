"""Engine arguments of instances: the connectors that a mix needs, and what a deployment gives to single instances."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.reference import llama
from vllm_omni import OmniLLM
from vllm_omni.config import load_config
from vllm_omni.engine.instance_args import make_instances
from vllm_omni.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]})
    )
    return tmp_path


def test_one_instance_may_have_arguments_of_its_own(model: Path) -> None:
    args = {"PD": {"max_num_seqs": 4}, "DP1": {"device_ids": ["1"]}}
    stage = load_config(model, epd={"instances": "E:1,PD:2", "engine_args": args}).stages[0]
    instances = {one.name: one for one in make_instances(stage)}
    assert list(instances) == ["language/E0", "language/PD0", "language/PD1"]
    assert instances["language/E0"].engine_args["mm_encoder_only"] is True
    assert instances["language/PD0"].engine_args["max_num_seqs"] == 4
    assert instances["language/PD1"].engine_args["device_ids"] == ["1"]
    assert [name for name, one in instances.items() if one.is_front] == ["language/PD0"]


def test_each_instance_has_the_connectors_that_its_mix_needs(model: Path) -> None:
    for mix, roles in [
        ("E:1,PD:1", {"E0": "ec_producer", "PD0": "ec_consumer"}),
        ("E:1,P:1,D:1", {"E0": "ec_producer", "P0": "ec_consumer kv_producer", "D0": "ec_consumer kv_consumer"}),
        ("EP:1,D:1", {"EP0": "kv_producer", "D0": "kv_consumer"}),
        ("ED:1,P:1", {"ED0": "ec_both kv_consumer", "P0": "ec_consumer kv_producer"}),
        ("EPD:2", {"EPD0": "", "EPD1": ""}),
        ("EP:1,D:1,PD:1", {"EP0": "kv_producer", "D0": "kv_consumer", "PD0": "kv_both"}),
        ("EPD:1,G:1", {"EPD0": "kv_both", "G0": "kv_consumer"}),
        (
            "P:1,ED:1,G:1",
            {"P0": "ec_consumer kv_producer", "ED0": "ec_both kv_consumer", "G0": "ec_consumer kv_consumer"},
        ),
    ]:
        found = {}
        for one in make_instances(load_config(model, epd=mix).stages[0]):
            ec, kv = (one.engine_args.get(f"{name}_transfer_config", {}) for name in ("ec", "kv"))
            found[f"{one.kind}{one.number}"] = " ".join(filter(None, (ec.get("ec_role"), kv.get("kv_role"))))
        assert found == roles, mix


def test_wrong_arguments_of_instances_are_rejected(model: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"E": {"mm_encoder_only": True}}, r"epd.engine_args.E.mm_encoder_only: set by the mix"),
        ({"PD1": {"max_num_seqs": 1}}, r"epd.engine_args.PD1: there is no such instance: did you mean 'PD'\?"),
        ({"P": {"max_num_seqs": 1}}, r"epd.engine_args.P: there is no such instance: .*valid: E, PD, E0, PD0"),
    ]
    for args, message in cases:
        stage = load_config(model, epd={"instances": "E:1,PD:1", "engine_args": args}).stages[0]
        with pytest.raises(ConfigError, match=message):
            make_instances(stage)


def test_an_encoder_is_rejected_where_there_is_nothing_to_encode(tmp_path: Path) -> None:
    model = llama.build(tmp_path / "model")
    for mix, advice in [("E:1,PD:1", "give EPD:1"), ("E:2,P:1,D:1", "give P:1,D:1"), ("EP:1,D:1", "give P:1,D:1")]:
        with pytest.raises(ConfigError, match=f"'language': epd: this model reads text alone.*{advice}"):
            OmniLLM(model, epd=mix, skip_tokenizer_init=True)


def test_a_model_of_texts_has_no_engine_for_pictures(tmp_path: Path) -> None:
    model = llama.build(tmp_path / "model")
    for key, given in {
        "epd: G": {"epd": "EPD:1,G:1"},
        "unified": {"stage_overrides": ["language.unified=true"]},
    }.items():
        with pytest.raises(ConfigError, match=f"'language': {key}: only a language model that generates pictures"):
            OmniLLM(model, skip_tokenizer_init=True, **given)
