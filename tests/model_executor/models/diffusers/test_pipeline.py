"""The rule from class name to output modality must agree with the source of every diffusers pipeline."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import GraphParser
from vllm_omni.model_executor.generation_model import GenerationConfig
from vllm_omni.model_executor.models.diffusers.graph import modality_of
from vllm_omni.model_executor.models.diffusers.pipeline import DiffusersPipeline


def made_by_diffusers() -> dict[str, str]:
    """Class -> modality, for every pipeline whose ``__call__`` ends in ``return SomethingOutput(images=...)``."""
    spec = find_spec("diffusers")
    assert spec is not None and spec.origin is not None
    modalities = {"images": "image", "frames": "video", "audios": "audio"}
    found = {}
    for path in Path(spec.origin).parent.glob("pipelines/*/pipeline_*.py"):
        for text in re.split(r"^(?=class )", path.read_text(), flags=re.MULTILINE):
            name = re.match(r"class (\w+Pipeline)\(", text)
            fields = set(re.findall(r"return \w+Output\(\s*(\w+)=", text))
            if name and len(fields) == 1 and (field := fields.pop()) in modalities:
                found[name[1]] = modalities[field]
    return found


def test_the_class_name_of_a_pipeline_gives_its_output_modality() -> None:
    expected = made_by_diffusers()
    assert len(expected) > 200, "the sources were found"
    wrong = {name: modality for name, modality in expected.items() if modality_of(name) != modality}
    assert wrong == {}


def hf_config(class_name: str) -> PreTrainedConfig:
    return GenerationConfig(architectures=["DiffusersPipeline"], model_config={"_class_name": class_name})


def test_the_graph_has_one_stage_and_one_output_of_the_pipelines_kind() -> None:
    pipeline = DiffusersPipeline("nowhere", hf_config("WanPipeline"))
    plan = GraphParser(pipeline.graph).parse()
    assert [node.role for node in plan.nodes.values()] == ["diffusion"]
    assert (dict(pipeline.modalities), [stage.output_type for stage in pipeline.stages]) == (
        {"video": "video"},
        ["video"],
    )


def test_an_option_is_rejected() -> None:
    pipeline = DiffusersPipeline("nowhere", hf_config("WanPipeline"))
    assert pipeline.validate({}) == {}
    with pytest.raises(InvalidRequest, match="unknown option 'speaker': WanPipeline has none"):
        pipeline.validate({"speaker": "Chelsie"})
