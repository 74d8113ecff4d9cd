import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from safetensors import safe_open
from torch import Tensor

from tests.testing.calls import CALLS, SHAPES, call, work_on_small_inputs
from vllm_omni.testing.diffusion import PIPELINES, build


@pytest.fixture(scope="module", autouse=True)
def small_inputs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        work_on_small_inputs(monkeypatch)
        yield


@pytest.fixture(scope="module", params=PIPELINES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(name: str, tiny_pipeline: Callable[[str], Path]) -> Path:
    return tiny_pipeline(name)


@pytest.fixture(scope="module")
def pipeline(path: Path) -> DiffusionPipeline:
    return load(path)


@pytest.fixture(scope="module")
def output(pipeline: DiffusionPipeline, name: str) -> Tensor:
    return call(pipeline, name)


def load(path: Path) -> DiffusionPipeline:
    pipeline = DiffusionPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def read_files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def difference(one: Tensor, other: Tensor) -> float:
    """The mean, over the spread of the first."""
    return float((one - other).abs().mean() / one.std())


def test_output_has_the_shape_that_was_asked_for(name: str, output: Tensor) -> None:
    assert tuple(output.shape) == SHAPES[name]


def test_output_is_neither_flat_nor_saturated(name: str, output: Tensor) -> None:
    assert 0.1 < output.std() < 0.4
    if name != "stable-audio":
        assert ((output <= 0) | (output >= 1)).float().mean() < 0.2


def test_same_call_gives_the_same_output(pipeline: DiffusionPipeline, name: str, output: Tensor) -> None:
    assert torch.equal(call(pipeline, name), output)


@pytest.mark.parametrize("changed", [{"prompt": "two cats on a stage"}, {"seed": 1}, {"steps": 3}], ids=str)
def test_each_argument_shows_in_the_output(
    pipeline: DiffusionPipeline, name: str, output: Tensor, changed: dict[str, str | int]
) -> None:
    assert difference(output, call(pipeline, name, **changed)) > 0.05


def test_loads_without_missing_or_unexpected_keys(path: Path, pipeline: DiffusionPipeline) -> None:
    for component, module in pipeline.components.items():
        if isinstance(module, torch.nn.Module):
            # A pretrained model of transformers reports by the base class alone.
            base = transformers.PreTrainedModel if isinstance(module, transformers.PreTrainedModel) else type(module)
            load = base.from_pretrained.__func__
            _, report = load(type(module), path / component, output_loading_info=True)
            assert not any(report.values()), (component, report)


def test_directory_is_small_and_in_float32(path: Path) -> None:
    assert sum(map(len, read_files(path).values())) < 4_000_000
    for file in path.rglob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            dtypes = {key: weights.get_slice(key).get_dtype() for key in weights.keys()}  # noqa: SIM118
        assert {dtype for key, dtype in dtypes.items() if "num_batches_tracked" not in key} == {"F32"}


def test_same_seed_gives_the_same_bytes(name: str, path: Path, tmp_path: Path) -> None:
    assert read_files(build(tmp_path / "again", name)) == read_files(path)


def test_another_seed_gives_other_weights_alone(tmp_path: Path, tiny_pipeline: Callable[[str], Path]) -> None:
    files = read_files(tiny_pipeline("wan2.2-t2v"))
    others = read_files(build(tmp_path, "wan2.2-t2v", seed=1))
    assert {name for name in files if files[name] != others[name]} == {
        name for name in files if name.endswith(".safetensors")
    }


def test_experts_differ(tiny_pipeline: Callable[[str], Path]) -> None:
    files = read_files(tiny_pipeline("wan2.2-t2v"))
    weights = "diffusion_pytorch_model.safetensors"
    assert files[f"transformer/{weights}"] != files[f"transformer_2/{weights}"]


def test_each_expert_takes_a_part_of_the_steps(tiny_pipeline: Callable[[str], Path]) -> None:
    pipeline = load(tiny_pipeline("wan2.2-t2v"))
    used: list[str] = []
    for component in ("transformer", "transformer_2"):
        pipeline.components[component].register_forward_pre_hook(lambda *_, component=component: used.append(component))
    call(pipeline, "wan2.2-t2v", steps=4)
    assert used == ["transformer"] * 4 + ["transformer_2"] * 4  # each step with and without the prompt


def test_rounding_is_not_multiplied(name: str, path: Path, output: Tensor) -> None:
    """Another order of sums must not look like another result: weights a millionth off change little more than that."""
    nudged = load(path)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in nudged.transformer.parameters():
            parameter.mul_(1 + 1e-6 * torch.randn(parameter.shape, generator=generator))
    assert (call(nudged, name) - output).abs().max() < 5e-5


def test_every_pipeline_has_a_small_call() -> None:
    assert set(CALLS) == set(PIPELINES)


@pytest.mark.parametrize("name", ["qwen-image", "qwen-image-edit", "qwen-image-edit-plus"])
def test_qwen_template_is_cut_off_where_the_prompt_begins(name: str, tiny_pipeline: Callable[[str], Path]) -> None:
    pipeline = load(tiny_pipeline(name))
    ids = pipeline.tokenizer(pipeline.prompt_template_encode.format("fox")).input_ids
    kept = pipeline.tokenizer.decode(ids[pipeline.prompt_template_encode_start_idx :])
    assert kept.removeprefix("<|vision_start|><|image_pad|><|vision_end|>").startswith("fox<|im_end|>")


def test_llama_template_is_cut_off_where_the_prompt_begins(tiny_pipeline: Callable[[str], Path]) -> None:
    tokenizer = load(tiny_pipeline("hunyuan-video")).tokenizer
    ids = tokenizer(DEFAULT_PROMPT_TEMPLATE["template"].format("fox")).input_ids
    assert tokenizer.decode(ids[DEFAULT_PROMPT_TEMPLATE["crop_start"] :]) == "fox<|eot_id|>"


@pytest.mark.parametrize("name", ["qwen-image", "z-image", "hunyuan-video"])
def test_byte_level_tokenizer_keeps_any_text(name: str, tiny_pipeline: Callable[[str], Path]) -> None:
    tokenizer = load(tiny_pipeline(name)).tokenizer
    text = "Ein Fuchs – 狐 – maintaining consistency"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_pipeline_settings_are_those_of_the_real_one(tiny_pipeline: Callable[[str], Path]) -> None:
    index = json.loads((tiny_pipeline("wan2.2-t2v") / "model_index.json").read_text())
    assert (index["_class_name"], index["boundary_ratio"]) == ("WanPipeline", 0.875)
    scheduler = load(tiny_pipeline("qwen-image")).scheduler.config
    assert (scheduler.shift_terminal, scheduler.max_shift, scheduler.use_dynamic_shifting) == (0.02, 0.9, True)


def test_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'qwen_image': did you mean 'qwen-image'\?"):
        build(tmp_path, "qwen_image")
    assert not any(tmp_path.iterdir())


def test_import_needs_neither_torch_nor_diffusers() -> None:
    code = (
        "import sys; from vllm_omni.testing import diffusion as tiny\n"
        "assert not {'vllm', 'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
