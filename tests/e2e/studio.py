"""A pipeline of another package: Qwen2.5-Omni, whose reply is also painted and filmed."""

from transformers import PreTrainedConfig

from tests.e2e.graphs.pipelines import to_picture
from vllm_omni.flow import Field, Role, interface
from vllm_omni.model_executor.models.diffusers.pipeline import diffusers_stage
from vllm_omni.model_executor.models.qwen2_5_omni.pipeline import Qwen2_5OmniPipeline


class Painter(Role):
    paint = interface([["prompt"]], {"image": Field("image", streamed=True)})


class Filmer(Role):
    film = interface([["prompt"]], {"video": Field("video", streamed=True)})


class StudioPipeline(Qwen2_5OmniPipeline):
    modalities = {"text": "text", "audio": "audio", "image": "image", "video": "video"}

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        super().__init__(model, hf_config, revision)
        text = self.graph.declarations.outputs["text"]
        painter, filmer = self.graph.role(Painter, "painter"), self.graph.role(Filmer, "filmer")
        self.graph.output(image=painter.paint(prompt=text.via(to_picture)).image)
        self.graph.output(video=filmer.film(prompt=text.via(to_picture)).video)
        self.stages = (*self.stages, diffusers_stage("painter", "image"), diffusers_stage("filmer", "video"))
