import dataclasses
import json

import pytest

from tests.cases import case, rejected
from vllm_omni import config
from vllm_omni.config import EdgeConfig, OmniConfig, Origin, StageConfig, load_config
from vllm_omni.config.layers import find_config
from vllm_omni.config.vllm_args import AR_STAGE_ARGS, EVERY_STAGE_ARGS, PER_STAGE_ARGS, check_engine_args
from vllm_omni.errors import ConfigError


@pytest.fixture
def model(tmp_path):
    """A checkpoint directory with nothing but the model type."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni"}))
    return str(directory)


@pytest.fixture
def deploy(tmp_path):
    """Write a deployment file and return its path."""

    def write(text):
        path = tmp_path / "deploy.yaml"
        path.write_text(text)
        return path

    return write


# --- layers


def test_bundled_configuration_of_qwen2_5_omni(model):
    omni = load_config(model)
    assert omni.model_type == "qwen2_5_omni"
    assert [(s.stage_id, s.name, s.engine_type) for s in omni.stages] == [
        (0, "thinker", "ar"),
        (1, "talker", "ar"),
        (2, "token2wav", "generation"),
    ]
    assert {s.model for s in omni.stages} == {model}
    assert omni.stage("talker").default_sampling_params["top_k"] == 40
    edge = omni.edge("thinker", "talker")
    assert (edge.transport, edge.stream, edge.credits) == ("auto", "auto", 256)


def test_user_yaml_overlays_key_by_key(model, deploy):
    path = deploy("stages:\n  talker:\n    engine_args: {max_num_seqs: 4}\n    default_sampling_params: {top_p: 0.5}\n")
    talker = load_config(model, deploy_config=path, seed=1).stage("talker")
    assert talker.engine_args == {"max_num_seqs": 4, "seed": 1}
    assert talker.default_sampling_params["top_p"] == 0.5
    assert talker.default_sampling_params["top_k"] == 40


def test_engine_argument_may_stand_directly_under_a_stage(model, deploy):
    omni = load_config(model, deploy_config=deploy("stages:\n  thinker: {max_num_seqs: 4}\n"))
    assert omni.stage("thinker").engine_args["max_num_seqs"] == 4


def test_each_layer_wins_over_the_one_before(model, deploy):
    path = deploy("stages:\n  thinker: {max_num_seqs: 2}\n")
    overrides = {"stages": {"thinker": {"max_num_seqs": 3}}}

    def seqs(**kwargs):
        return load_config(model, deploy_config=path, **kwargs).stage("thinker").engine_args["max_num_seqs"]

    assert seqs() == 2
    assert seqs(overrides=overrides) == 3
    assert seqs(overrides=overrides, max_num_seqs=4) == 4
    assert seqs(overrides=overrides, max_num_seqs=4, stage_overrides=["thinker.max_num_seqs=5"]) == 5


def test_overrides_may_be_stages_alone_by_id_or_name(model):
    omni = load_config(model, overrides={0: {"max_num_seqs": 3}, "talker": {"engine_args": {"seed": 7}}})
    assert omni.stage("thinker").engine_args["max_num_seqs"] == 3
    assert omni.stage("talker").engine_args["seed"] == 7


def test_plain_argument_goes_to_the_stages_that_use_it(model):
    given = {"dtype": "float32", "seed": 3, "max_model_len": 512, "limit_mm_per_prompt": {"image": 2}}
    given["kernel_config"] = {"enable_jit_warmup": False}
    omni = load_config(model, **given)
    assert {key: [s.name for s in omni.stages if key in s.engine_args] for key in given} == {
        "dtype": ["thinker", "talker", "token2wav"],
        "seed": ["thinker", "talker"],
        "max_model_len": ["thinker", "talker"],
        "kernel_config": ["thinker", "talker"],
        "limit_mm_per_prompt": ["thinker"],
    }


def test_prefix_caching_asked_for_without_a_stage_leaves_the_talker_alone(model):
    omni = load_config(model, enable_prefix_caching=True)
    assert omni.stage("thinker").engine_args["enable_prefix_caching"] is True
    assert "enable_prefix_caching" not in omni.stage("talker").engine_args


def test_share_of_memory_must_be_given_by_stage(model):
    with pytest.raises(ConfigError, match=r"thinker\.gpu_memory_utilization, talker\.gpu_memory_utilization"):
        load_config(model, gpu_memory_utilization=0.5)
    omni = load_config(model, stage_overrides=["talker.gpu_memory_utilization=0.2"])
    assert omni.stage("talker").engine_args["gpu_memory_utilization"] == 0.2


def test_top_level_engine_args_of_a_file_are_plain_arguments(model, deploy):
    omni = load_config(model, deploy_config=deploy("engine_args: {dtype: float32}\nstages:\n  talker: {dtype: half}\n"))
    assert [s.engine_args["dtype"] for s in omni.stages] == ["float32", "half", "float32"]


def test_stage_flag(model):
    for text, field, expected in [
        ("thinker.max_num_seqs=8", "engine_args", {"max_num_seqs": 8}),
        ("0.max_num_seqs=8", "engine_args", {"max_num_seqs": 8}),
        ("thinker.engine_args.max_num_seqs=8", "engine_args", {"max_num_seqs": 8}),
        ("thinker.enforce_eager=true", "engine_args", {"enforce_eager": True}),
        ("thinker.limit_mm_per_prompt={image: 2}", "engine_args", {"limit_mm_per_prompt": {"image": 2}}),
        (
            "thinker.default_sampling_params.temperature=1e-3",
            "default_sampling_params",
            {"max_tokens": 1024, "temperature": 0.001},
        ),
        ("thinker.executor_class=uni", "executor_class", "uni"),
        ("thinker.model=/elsewhere", "model", "/elsewhere"),
    ]:
        assert getattr(load_config(model, stage_overrides=[text]).stage("thinker"), field) == expected, text


def test_stage_may_have_its_own_model(model, deploy):
    omni = load_config(model, deploy_config=deploy("stages:\n  token2wav: {model: /other}\n"))
    assert [s.model for s in omni.stages] == [model, model, "/other"]


def test_empty_file_and_empty_keys_change_nothing(model, deploy):
    assert load_config(model, deploy_config=deploy("")) == load_config(model)
    assert load_config(model, deploy_config=deploy("stages:\n  thinker:\nedges:\n")) == load_config(model)


def test_each_value_has_an_origin(model, deploy):
    path = deploy("engine_args: {seed: 1}\nstages:\n  1:\n    max_num_seqs: 2\n")
    omni = load_config(
        model,
        deploy_config=path,
        overrides={"talker": {"default_sampling_params": {"top_k": 3}}},
        max_model_len=512,
        stage_overrides=["0.seed=5"],
    )
    at = omni.origins
    assert at["model_type",] == Origin("checkpoint", model)
    assert at["stages", "thinker", "engine_args", "seed"] == Origin("stage", "0.seed=5")
    assert at["stages", "talker", "engine_args", "seed"] == Origin("file", str(path), 1)
    assert at["stages", "talker", "engine_args", "max_num_seqs"] == Origin("file", str(path), 4)
    assert at["stages", "talker", "engine_args", "max_model_len"] == Origin("argument", "max_model_len")
    assert at["stages", "talker", "default_sampling_params", "top_k"] == Origin("overrides", "overrides")
    assert at["stages", "talker", "default_sampling_params", "top_p"].kind == "bundled"
    assert at["stages", "talker", "engine_type"].kind == "bundled"
    assert at["edges", "thinker->talker", "transport"].kind == "bundled"
    assert ("stages", "talker", "executor_class") not in at
    assert load_config(model) == dataclasses.replace(load_config(model), origins={})


def test_dumped_value_reads_back_unchanged(model):
    for value in [
        None,
        True,
        3,
        1e-5,
        "text",
        "1e3",
        "yes",
        "a: b",
        "ü\n",
        [1, "x"],
        {"a": {"b": [True]}},
        {"a": "1e3"},
        {},
    ]:
        text = config.dump_value(value)
        assert "\n" not in text
        stage = load_config(model, stage_overrides=[f"thinker.hf_overrides={text}"]).stage("thinker")
        assert stage.engine_args["hf_overrides"] == value, value


# --- mistakes in a file name the file, the line, the key and the nearest name


def test_mistake_in_a_file(model, deploy):
    for text, message in [
        ("stage: {}\n", r"deploy.yaml:1: stage: unknown key 'stage': did you mean 'stages'\?"),
        ("stages:\n  thinkr: {}\n", r"deploy.yaml:2: stages.thinkr: no stage 'thinkr': did you mean 'thinker'\?"),
        ("stages:\n  3: {}\n", r"no stage '3': valid: thinker, talker, token2wav \(or an id from 0 to 2\)"),
        (
            "stages:\n  talker:\n    max_num_seq: 1\n",
            r"deploy.yaml:3: stages.talker.max_num_seq: unknown key .* did you mean 'max_num_seqs'\?",
        ),
        ("stages:\n  talker: {engine_typ: ar}\n", r"did you mean 'engine_type'\?"),
        ("stages:\n  talker: {engine_type: arr}\n", r"engine_type = 'arr': .*valid: ar, generation, diffusion"),
        (
            "stages:\n  talker: {max_num_seqs: 0}\n",
            r"stages.talker.max_num_seqs = 0: must be at least 1",
        ),
        (
            "stages:\n  talker:\n    engine_args:\n      max_num_seqs: x\n",
            r"deploy.yaml:4: stages.talker.engine_args.max_n",
        ),
        (
            "stages:\n  talker: {dtype: float23}\n",
            r"dtype = 'float23': did you mean 'float32'\? valid: auto, half, float16",
        ),
        ("stages:\n  talker: {gpu_memory_utilization: 1.5}\n", r"must be at most 1"),
        (
            "stages:\n  talker: {engine_args: {modle: x}}\n",
            r"engine_args.modle = 'x': vLLM has no such engine argument",
        ),
        ("stages:\n  talker: {engine_args: {model: x}}\n", r"set it by the stage's own key 'model'"),
        ("stages:\n  talker: {engine_args: 3}\n", r"engine_args = 3: must be a mapping"),
        (
            "stages:\n  talker: {default_sampling_params: {temprature: 1}}\n",
            r"default_sampling_params.temprature = 1: unknown sampling parameter: did you mean 'temperature'\?",
        ),
        ("stages:\n  talker: {default_sampling_params: {top_p: 2}}\n", r"default_sampling_params = .*top_p must be in"),
        ("stages: [1]\n", r"deploy.yaml:1: stages = \[1\]: must be a mapping"),
        ("stages:\n  talker: 1\n", r"deploy.yaml:2: stages.talker = 1: must be a mapping"),
        ("edges: {thinker-talker: {}}\n", r"an edge is written SOURCE->TARGET"),
        ("edges: {thinker->speaker: {}}\n", r"no stage 'speaker'"),
        ("edges: {thinker->talker: {transport: carrier}}\n", r"transport = 'carrier': valid: auto, inline, local, shm"),
        ("edges: {thinker->talker: {transports: inline}}\n", r"did you mean 'transport'\?"),
        ("edges: {thinker->talker: {stream: 1}}\n", r"thinker->talker.stream = 1: must be true or false"),
        ("edges: {thinker->talker: {credits: 0}}\n", r"thinker->talker.credits = 0: must be at least 1"),
        ("model_type: qwen2_6_omni\n", r"deploy.yaml:1: model_type = 'qwen2_6_omni': did you mean 'qwen2_5_omni'\?"),
        ("engine_args: {max_num_seqs: -1}\n", r"deploy.yaml:1: engine_args.max_num_seqs = -1: must be at least 1"),
        ("voices: [alloy]\n", r"deploy.yaml:1: voices = \['alloy'\]: must be a mapping"),
        ("- 1\n", r"must be a mapping with the keys model_type, stages, edges, engine_args, voices"),
        ("stages:\n  thinker: {\n", r"deploy.yaml:3: not valid YAML"),
        ("a: 1\n\tb: 2\n", r"deploy.yaml:2: not valid YAML"),
        ("stages: &a\n  thinker: *a\n", r"not valid YAML"),
        ("stages: !!python/object:os.system {}\n", r"deploy.yaml:1: stages: no tag .*python/object"),
        ("stages:\n  talker: {max_num_seqs: !!python/name:os.system }\n", r"deploy.yaml:2: not valid YAML"),
        ("? [a]\n: 1\n", r"deploy.yaml:1: top level: a key must be a plain word"),
        (
            "stages:\n  talker: {}\n  thinker: {}\n  talker: {}\n",
            r"deploy.yaml:4: stages.talker: given twice, first on line 2",
        ),
    ]:
        with rejected(ConfigError, message, text):
            load_config(model, deploy_config=deploy(text))


def test_voices_of_the_layers_are_joined(model, deploy):
    file = deploy("voices: {alloy: Chelsie, onyx: Chelsie}\n")
    omni = load_config(model, deploy_config=file, overrides={"voices": {"onyx": "Ethan"}})
    assert omni.voices == {"alloy": "Chelsie", "onyx": "Ethan"}
    assert omni.origins["voices", "alloy"].line == 1
    assert omni.origins["voices", "onyx"].kind == "overrides"


def test_anchors_and_merge_keys_work(model, deploy):
    text = "stages:\n  thinker: &common {max_num_seqs: 4, seed: 1}\n  talker: {<<: *common, seed: 2}\n"
    omni = load_config(model, deploy_config=deploy(text))
    assert omni.stage("talker").engine_args["max_num_seqs"] == 4
    assert omni.stage("talker").engine_args["seed"] == 2


def test_file_that_cannot_be_read_is_named(model, tmp_path):
    with pytest.raises(ConfigError, match=r"absent.yaml' cannot be read"):
        load_config(model, deploy_config=tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary.yaml"):
        load_config(model, deploy_config=tmp_path / "binary.yaml")


def test_mistake_in_a_stage_flag(model):
    for text, message in [
        ("thinker", r"must be NAME.KEY=VALUE, for example thinker.max_num_seqs=8"),
        ("thinker=3", r"must be NAME.KEY=VALUE"),
        ("thinkr.seed=3", r"no stage 'thinkr': did you mean 'thinker'\?"),
        ("thinker.sede=3", r"--stage thinker.sede: unknown key 'sede' of stage 'thinker': did you mean 'seed'\?"),
        ("thinker.seed=x", r"--stage thinker.seed = 'x': must be a whole number"),
        ("thinker.seed=[", r"not valid YAML"),
        (
            "thinker.seed.x=1",
            r"only engine_args, default_sampling_params, diffusion, epd, kv_pool have keys below them",
        ),
        ("thinker.name=x", r"unknown key 'name'"),
    ]:
        with rejected(ConfigError, message, text):
            load_config(model, stage_overrides=[text])


def test_unknown_keyword_names_the_nearest(model):
    for arguments, message in [
        ({"max_num_seq": 8}, "unknown argument 'max_num_seq': did you mean 'max_num_seqs'"),
        ({"dtype": "float33", "max_num_seq": 8}, "unknown argument 'max_num_seq': did you mean 'max_num_seqs'"),
        ({"stage_override": ["thinker.seed=1"]}, "unknown argument 'stage_override': did you mean 'stage_overrides'"),
        ({"deploy_confg": "x"}, "unknown argument 'deploy_confg': did you mean 'deploy_config'"),
    ]:
        with rejected(ConfigError, message, arguments):
            load_config(model, **arguments)
    with rejected(ConfigError, "unknown argument 'log_stat': did you mean 'log_stats'", "beside a config"):
        find_config(None, load_config(model), None, {"log_stat": True})


def test_misspelt_environment_variable_is_rejected_at_load(model, monkeypatch):
    monkeypatch.setenv("VLLM_OMNI_STAGE_READY_TIMEOUT", "1")
    with pytest.raises(ConfigError, match="VLLM_OMNI_STAGE_READY_TIMEOUT_S"):
        load_config(model)


# --- the checkpoint


def test_unsupported_model_type_says_what_is_supported(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"model_type = 'llama' is not supported: valid: bagel, diffusers, "):
        load_config(tmp_path)


def test_broken_config_json_is_named(tmp_path):
    for text in ["", "{", "[1]", '"a"']:
        (tmp_path / "config.json").write_text(text)
        with rejected(ConfigError, r"config.json: not a JSON object", text):
            load_config(tmp_path)


def test_directory_without_config_json(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"has neither config.json nor model_index.json; .*supported model types: bagel, diff",
    ):
        load_config(tmp_path)


def test_missing_checkpoint(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ["/no/such/directory", "nowhere", "./a", "no-such-org/no-such-model"]:
        with rejected(ConfigError, r"no such directory, .*supported model types: bagel, diffusers, ", name):
            load_config(name)


def test_model_type_of_a_file_needs_no_config_json(tmp_path, deploy):
    omni = load_config(tmp_path / "anywhere", deploy_config=deploy("model_type: qwen2_5_omni\n"))
    assert omni.model_type == "qwen2_5_omni"


# --- the schema itself


def test_stage_config_is_frozen():
    stage = StageConfig(stage_id=0, name="thinker", model="/m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        stage.name = "other"


def test_stage_config_rejects_wrong_fields():
    for fields, message in [
        ({"stage_id": -1}, r"stage 'thinker': stage_id = -1: must be at least 0"),
        ({"name": "a b"}, r"name = 'a b': must be letters"),
        ({"engine_type": "AR"}, r"engine_type = 'AR'"),
        ({"engine_args": {"max_num_seqs": True}}, r"engine_args.max_num_seqs = True: must be a whole number"),
        ({"executor_class": 3}, r"executor_class = 3: must be 'package.module.Class'"),
        ({"executor_class": "uni", "engine_args": {"distributed_executor_backend": "mp"}}, r"set the same thing"),
        ({"vllm_config": object(), "engine_args": {"seed": 1}}, r"engine_args or a ready vllm_config, not both"),
        ({"model": ""}, r"model: the path of a checkpoint is needed"),
    ]:
        with rejected(ConfigError, message, fields):
            StageConfig(**{"stage_id": 0, "name": "thinker", "model": "/m", **fields})


def test_ready_vllm_config_needs_no_model():
    assert StageConfig(stage_id=0, name="thinker", vllm_config=object()).model == ""


def test_omni_config_from_stage_configs():
    stages = [StageConfig(stage_id=i, name=name, model="/m") for i, name in enumerate(("thinker", "talker"))]
    omni = OmniConfig(model="/m", model_type="qwen2_5_omni", stages=stages)
    assert omni.stage("talker") is stages[1]
    assert omni.stage(0) is stages[0]
    edge = omni.edge("thinker", "talker")
    assert (edge.transport, edge.stream, edge.credits) == ("auto", "auto", 256)
    with pytest.raises(ConfigError, match=r"did you mean 'talker'"):
        omni.stage("talke")


def test_omni_config_rejects_wrong_stages_and_edges():
    for names, ids, edges, message in [
        ([], [], [], r"at least one stage"),
        (["a", "a"], [0, 1], [], r"the name 'a' is used 2 times"),
        (["a", "b"], [0, 2], [], r"stage 'b': stage_id = 2: its place in the list is 1"),
        (["a", "b"], [0, 1], [("a", "c")], r"edge a->c: no stage 'c'"),
        (["a", "b"], [0, 1], [("a", "b"), ("a", "b")], r"edge a->b is given 2 times"),
    ]:
        stages = [StageConfig(stage_id=i, name=name, model="/m") for i, name in zip(ids, names, strict=True)]
        with rejected(ConfigError, message, (names, ids, edges)):
            OmniConfig(
                model="/m", model_type="x", stages=stages, edges=[EdgeConfig(source=s, target=t) for s, t in edges]
            )


def test_edge_config_rejects_an_unknown_transport():
    with pytest.raises(ConfigError, match=r"edge a->b: transport = 'rdma': valid: auto, inline"):
        EdgeConfig(source="a", target="b", transport="rdma")


def test_edge_config_rejects_credits_that_are_not_a_number():
    with pytest.raises(ConfigError, match=r"edge a->b: credits = 'many': must be a whole number"):
        EdgeConfig(source="a", target="b", credits="many")


def test_a_config_is_found_in_one_way_only(model):
    omni = load_config(model)
    stages = [StageConfig(stage_id=0, name="thinker", model=model)]
    assert find_config(None, omni, None, {"overrides": None, "stage_overrides": (), "epd": None}) is omni
    assert find_config(None, None, stages, {"stage_overrides": []}).stages == tuple(stages)
    assert find_config(model, None, None, {"stage_overrides": ["thinker.seed=1"]}).stage(0).engine_args == {"seed": 1}
    for arguments, message in [
        ((model, omni, None, {}), "`config` cannot be combined with other arguments"),
        ((None, omni, None, {"seed": 0}), "`config` cannot be combined with other arguments"),
        ((None, None, stages, {"max_num_seqs": 1}), "`stage_configs` cannot be combined with arguments that change"),
        ((None, None, [], {}), "stage_configs: at least one stage is needed"),
        ((None, None, None, {}), "give a model"),
    ]:
        with rejected(ConfigError, message, arguments):
            find_config(*arguments)


# --- against vLLM


def test_defaults_of_vllm_pass_our_checks():
    from vllm.engine import arg_utils

    for arg in dataclasses.fields(arg_utils.EngineArgs):
        if arg.default is not dataclasses.MISSING and not arg.name.startswith("_") and arg.name != "model":
            check_engine_args({arg.name: arg.default})


def test_mappings_are_checked_by_vllms_configuration_classes(model):
    def load(**engine_args):
        return StageConfig(stage_id=0, name="thinker", model=model, engine_args=engine_args).engine_args

    for key, value in [
        ("compilation_config", {"mode": 0, "cudagraph_mode": "NONE"}),
        ("profiler_config", {"profiler": "torch", "torch_profiler_dir": "/tmp"}),
        ("attention_config", {"backend": "TORCH_SDPA"}),
        ("attention_backend", "TORCH_SDPA"),
        ("limit_mm_per_prompt", {"image": 2, "video": {"count": 1, "num_frames": 2}}),
        ("hf_overrides", {"text_config": {"num_hidden_layers": 1}}),
        ("override_generation_config", {}),
        ("distributed_executor_backend", "mp"),
        ("optimization_level", 0),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
        ("device_ids", ["0", 1]),
    ]:
        with case(key):
            assert load(**{key: value})[key] == value
    for key, value, message in [
        ("compilation_config", {"modee": 0}, r"compilation_config.* = 0: unknown key|modee"),
        ("profiler_config", {"profiler": "torhc"}, r"profiler.* 'torhc'"),
        ("limit_mm_per_prompt", {"image": "many"}, r"image.* = 'many': must be"),
        ("limit_mm_per_prompt", 3, r"limit_mm_per_prompt = 3: must be a mapping"),
    ]:
        with rejected(ConfigError, message, (key, value)):
            load(**{key: value})


def test_arguments_that_are_shared_between_stages_exist_in_vllm():
    from vllm.engine import arg_utils

    names = {arg.name for arg in dataclasses.fields(arg_utils.EngineArgs)}
    assert names >= EVERY_STAGE_ARGS | AR_STAGE_ARGS | PER_STAGE_ARGS


def test_every_bundled_file_loads(tmp_path):
    for model_type in config.supported_model_types():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert load_config(tmp_path).model_type == model_type


@pytest.mark.parametrize("architecture", ["MiMoAudioModel", "MiMoV2ASRForCausalLM"])
def test_an_architecture_tells_a_model_from_that_whose_layers_it_has(architecture, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": [architecture]}))
    assert load_config(tmp_path).model_type == "mimo_audio"


# --- diffusion stages


@pytest.fixture
def pipeline(tmp_path):
    """A directory in diffusers' layout with nothing but the name of its pipeline."""
    directory = tmp_path / "pipeline"
    directory.mkdir()
    (directory / "model_index.json").write_text(json.dumps({"_class_name": "QwenImagePipeline"}))
    return str(directory)


def test_a_directory_with_a_model_index_is_one_diffusion_stage(pipeline):
    omni = load_config(pipeline)
    assert omni.model_type == "diffusers"
    assert [(stage.name, stage.engine_type) for stage in omni.stages] == [("diffusion", "diffusion")]
    assert omni.stage("diffusion").diffusion["max_rows"] == 8


def test_a_model_index_without_a_pipeline_is_rejected(tmp_path):
    for text in ["", "{", "[1]", "{}", '{"_class_name": 3}']:
        (tmp_path / "model_index.json").write_text(text)
        with rejected(ConfigError, r"model_index.json: (names no pipeline of diffusers|not a JSON object)", text):
            config.read_model_index(str(tmp_path))


def test_the_section_of_a_diffusion_stage_is_overlaid_key_by_key(pipeline, deploy):
    path = deploy("stages:\n  diffusion:\n    diffusion: {max_rows: 2, cache_threshold: 1e-1}\n")
    stage = load_config(pipeline, deploy_config=path, stage_overrides=["diffusion.diffusion.max_rows=3"]).stage(0)
    assert (stage.diffusion["max_rows"], stage.diffusion["cache_threshold"]) == (3, 0.1)
    assert stage.diffusion["max_wait_batches"] == 4


def test_a_wrong_value_of_the_section_is_named_with_what_is_valid(pipeline, deploy):
    for section, said in [
        (
            "{max_rows: 0}",
            r"deploy.yaml:3: .*diffusion.max_rows = 0: must be at least 1",
        ),
        ("{max_row: 1}", r"diffusion.max_row = 1: unknown key: did you mean 'max_rows'"),
        ("{merge: 1}", r"diffusion.merge = 1: must be true or false"),
        ("{cache_threshold: -1}", r"diffusion.cache_threshold = -1: must be at least 0"),
        ("{attention_backend: 3}", r"diffusion.attention_backend = 3: must be text"),
        ("7", r"diffusion = 7: must be a mapping"),
    ]:
        with rejected(ConfigError, said, section):
            load_config(pipeline, deploy_config=deploy(f"stages:\n  diffusion:\n    diffusion: {section}\n"))


def test_only_a_diffusion_stage_has_the_section(model):
    with pytest.raises(ConfigError, match=r"stage 'talker': diffusion: only a stage with engine_type 'diffusion'"):
        load_config(model, stage_overrides=["talker.diffusion.max_rows=1"])


def test_default_parameters_of_a_diffusion_stage_are_those_of_diffusion(pipeline):
    overrides = ["diffusion.default_sampling_params.num_inference_steps=20"]
    assert load_config(pipeline, stage_overrides=overrides).stage(0).default_sampling_params == {
        "num_inference_steps": 20
    }
    with pytest.raises(ConfigError, match=r"temperature = 1: unknown diffusion parameter"):
        load_config(pipeline, stage_overrides=["diffusion.default_sampling_params.temperature=1"])


def test_the_batch_of_a_model_without_tokens_is_its_first_stages(pipeline):
    assert load_config(pipeline, max_num_seqs=3).stage(0).engine_args["max_num_seqs"] == 3


# --- rows beside the KV cache

CONNECTOR = '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'


def test_rows_are_kept_unless_the_deployment_says_otherwise(model):
    assert load_config(model).stage("thinker").row_cache is None
    assert load_config(model, stage_overrides=["thinker.row_cache=false"]).stage("thinker").row_cache is False


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["token2wav.row_cache=true"], "row_cache: only a stage with engine_type 'ar'"),
        (["thinker.row_cache=2"], "row_cache = 2: must be true or false"),
        (["thinker.row_cache=true", "thinker.enable_prefix_caching=false"], "leave enable_prefix_caching on"),
        (
            ["thinker.row_cache=true", f"thinker.kv_transfer_config={CONNECTOR}"],
            "pages that this kv_transfer_config loads have no rows",
        ),
    ],
)
def test_rows_that_cannot_be_kept_are_rejected(model, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(model, stage_overrides=overrides)
