import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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


class Tiny(NamedTuple):
    """A tiny pipeline, and the output of its usual call."""

    path: Path
    pipeline: DiffusionPipeline
    output: Tensor


@pytest.fixture(scope="module")
def tinies(tiny_pipeline: Callable[[str], Path]) -> Callable[[str], Tiny]:
    @cache
    def make(name: str) -> Tiny:
        pipeline = load(tiny_pipeline(name))
        return Tiny(tiny_pipeline(name), pipeline, call(pipeline, name))

    return make


# One pipeline of each output in `make test`, all of them in `make test-long`.
QUICK = ("qwen-image", "z-image", "wan2.2-t2v", "stable-audio")
OTHERS = tuple(name for name in PIPELINES if name not in QUICK)
all_pipelines = pytest.mark.parametrize("names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.long)])


def load(path: Path) -> DiffusionPipeline:
    pipeline = DiffusionPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def read_files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def difference(one: Tensor, other: Tensor) -> float:
    """The mean, over the spread of the first."""
    return float((one - other).abs().mean() / one.std())


@all_pipelines
def test_the_output_has_the_requested_shape_and_is_neither_flat_nor_saturated(
    names: Sequence[str], tinies: Callable[[str], Tiny]
) -> None:
    for name in names:
        output = tinies(name).output
        assert tuple(output.shape) == SHAPES[name], name
        assert 0.1 < output.std() < 0.4, name
        if name != "stable-audio":
            assert ((output <= 0) | (output >= 1)).float().mean() < 0.2, name


@all_pipelines
def test_the_same_call_gives_the_same_output_and_each_argument_changes_it(
    names: Sequence[str], tinies: Callable[[str], Tiny]
) -> None:
    changes: list[dict[str, Any]] = [{"prompt": "two cats on a stage"}, {"seed": 1}, {"steps": 3}]
    for name in names:
        _, pipeline, output = tinies(name)
        assert torch.equal(call(pipeline, name), output), name
        for changed in changes:
            assert difference(output, call(pipeline, name, **changed)) > 0.05, (name, changed)


@all_pipelines
def test_loads_without_missing_or_unexpected_keys(names: Sequence[str], tinies: Callable[[str], Tiny]) -> None:
    for name in names:
        path, pipeline, _ = tinies(name)
        for component, module in pipeline.components.items():
            if isinstance(module, torch.nn.Module):
                # Only the base class of transformers' models returns the report.
                is_transformers = isinstance(module, transformers.PreTrainedModel)
                base = transformers.PreTrainedModel if is_transformers else type(module)
                _, report = base.from_pretrained.__func__(type(module), path / component, output_loading_info=True)
                assert not any(report.values()), (name, component, report)


@all_pipelines
def test_the_directory_is_small_in_float32_and_the_same_for_the_same_seed(
    names: Sequence[str], tiny_pipeline: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in names:
        path = tiny_pipeline(name)
        files = read_files(path)
        assert sum(map(len, files.values())) < 4_000_000, name
        for file in path.rglob("*.safetensors"):
            with safe_open(file, "pt") as weights:
                dtypes = {key: weights.get_slice(key).get_dtype() for key in weights.keys()}  # noqa: SIM118
            assert {dtype for key, dtype in dtypes.items() if "num_batches_tracked" not in key} == {"F32"}, name
        assert read_files(build(tmp_path / name, name)) == files, name


def test_another_seed_changes_only_the_weights(tmp_path: Path, tiny_pipeline: Callable[[str], Path]) -> None:
    files = read_files(tiny_pipeline("wan2.2-t2v"))
    others = read_files(build(tmp_path, "wan2.2-t2v", seed=1))
    assert {name for name in files if files[name] != others[name]} == {
        name for name in files if name.endswith(".safetensors")
    }


def test_experts_differ(tiny_pipeline: Callable[[str], Path]) -> None:
    files = read_files(tiny_pipeline("wan2.2-t2v"))
    weights = "diffusion_pytorch_model.safetensors"
    assert files[f"transformer/{weights}"] != files[f"transformer_2/{weights}"]


def test_each_expert_computes_some_of_the_steps(tiny_pipeline: Callable[[str], Path]) -> None:
    pipeline = load(tiny_pipeline("wan2.2-t2v"))
    used: list[str] = []
    for component in ("transformer", "transformer_2"):
        pipeline.components[component].register_forward_pre_hook(lambda *_, component=component: used.append(component))
    call(pipeline, "wan2.2-t2v", steps=4)
    assert used == ["transformer"] * 4 + ["transformer_2"] * 4  # each step with and without the prompt


@all_pipelines
def test_rounding_is_not_amplified(names: Sequence[str], tinies: Callable[[str], Tiny]) -> None:
    """Weights changed by a millionth change the output little more, so that sums in another order compare equal."""
    for name in names:
        path, _, output = tinies(name)
        nudged = load(path)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in nudged.transformer.parameters():
                parameter.mul_(1 + 1e-6 * torch.randn(parameter.shape, generator=generator))
        assert (call(nudged, name) - output).abs().max() < 5e-5, name


def test_every_pipeline_has_a_small_call() -> None:
    assert set(CALLS) == set(PIPELINES)


@pytest.mark.parametrize("name", ["qwen-image", "qwen-image-edit", "qwen-image-edit-plus"])
def test_the_qwen_template_is_removed_up_to_the_prompt(name: str, tiny_pipeline: Callable[[str], Path]) -> None:
    pipeline = load(tiny_pipeline(name))
    ids = pipeline.tokenizer(pipeline.prompt_template_encode.format("fox")).input_ids
    kept = pipeline.tokenizer.decode(ids[pipeline.prompt_template_encode_start_idx :])
    assert kept.removeprefix("<|vision_start|><|image_pad|><|vision_end|>").startswith("fox<|im_end|>")


def test_the_llama_template_is_removed_up_to_the_prompt(tiny_pipeline: Callable[[str], Path]) -> None:
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


def test_an_unknown_name_is_rejected_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'qwen_image': did you mean 'qwen-image'\?"):
        build(tmp_path, "qwen_image")
    assert not any(tmp_path.iterdir())


def test_import_needs_neither_torch_nor_diffusers() -> None:
    code = (
        "import sys; from vllm_omni.testing import diffusion as tiny\n"
        "assert not {'vllm', 'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
