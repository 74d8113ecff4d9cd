"""The routes of images and videos for a pipeline that begins with a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from vllm.entrypoints.generate.base.serving import SESSION_ID_HEADER
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.chat import OmniServingChat
from vllm_omni.entrypoints.openai.diffusion import DiffusionServing
from vllm_omni.entrypoints.openai.diffusion_app import add_media_routes
from vllm_omni.entrypoints.openai.diffusion_protocol import DiffusionFields
from vllm_omni.entrypoints.openai.media_metrics import ImageMetrics
from vllm_omni.entrypoints.openai.results import Results
from vllm_omni.entrypoints.pictures import picture_args
from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import StaticPlan

MODALITIES = ("image", "video")


class GraphMediaServing(DiffusionServing):
    """Sends the text of a request through the chat template to the first stage, and its parameters to the diffusion
    stage whose output is asked for; where something else makes it, parameters are rejected.
    """

    def __init__(self, omni: AsyncOmni, chat: OmniServingChat, modality: str, metrics: ImageMetrics | None) -> None:
        super().__init__(omni, chat.models.registry, modality, metrics)
        self._chat = chat

    def check(self, modality: str) -> None:
        if modality != self.modality:
            made = ", ".join(self.pipeline.modalities)
            raise InvalidRequest(f"this model has no {modality} output; it has {made}", param="model")

    def _stage_params(self, fields: DiffusionFields) -> Any:
        plan, name = self._plan_of(fields.model), self.pipeline.modalities[self.modality]
        if name not in plan.outputs:
            served = [model.name for model in self._models.base_model_paths]
            valid = ", ".join(one for one in served if name in self._plan_of(one).outputs)
            said = f"model = {fields.model!r} has no {self.modality} output: valid: {valid}"
            raise InvalidRequest(said, param="model")
        role = self._omni.orchestrator.stage_of(name, plan.name)
        params, config = fields.params(), self._omni.config
        if self._omni.draws and self.modality == "image":
            return {config.stages[0].name: picture_args(params)}
        if role in config.stage_names and config.stage(role).is_diffusion:
            return {role: params}
        default = DiffusionParams()
        for one, value in params.items():
            if one not in fields.WISHES and value != getattr(default, one):
                said = f"{role!r} makes the {self.modality}, and is no diffusion pipeline: leave it out"
                raise InvalidRequest(f"{one} = {value!r} has no effect: {said}", param=one)
        return None

    def _plan_of(self, model: str | None) -> StaticPlan:
        return self._omni.orchestrator.plan_of(self._omni.graph_of(model))

    def _arguments(self, fields: DiffusionFields, raw_request: Request) -> dict[str, Any]:
        return {
            "modalities": [self.modality],
            "graph": self._omni.graph_of(fields.model),
            "session_id": raw_request.headers.get(SESSION_ID_HEADER),
        }

    async def _engine_prompt(self, prompt: str, media: Mapping[str, Any]) -> Any:
        images = media.get("multi_modal_data", {}).get("image", ())
        parts: list[Any] = [{"type": "image_pil", "image_pil": image} for image in images]
        parts.append({"type": "text", "text": prompt})
        wanted, pipeline = [self.modality], self.pipeline
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": parts}],
            chat_template_kwargs=dict(pipeline.chat_template_kwargs(wanted)) or None,
            mm_processor_kwargs=dict(pipeline.mm_processor_kwargs(wanted)) or None,
        )
        rendered = await self._chat.render_chat_request(request)
        if isinstance(rendered, ErrorResponse):
            raise InvalidRequest(rendered.error.message)
        _, (engine_prompt,) = rendered
        return engine_prompt


def add_graph_media_routes(
    app: FastAPI, omni: AsyncOmni, chat: OmniServingChat, results: Results, keep_alive_s: float
) -> None:
    """Add the routes of the modalities that the pipeline has beside text and speech."""
    metrics = ImageMetrics() if app.state.log_stats else None
    made = [modality for modality in MODALITIES if modality in omni.orchestrator.pipeline.modalities]
    if made:
        servings = {one: GraphMediaServing(omni, chat, one, metrics) for one in made}
        add_media_routes(app, servings, results, omni.orchestrator.requests, keep_alive_s)
