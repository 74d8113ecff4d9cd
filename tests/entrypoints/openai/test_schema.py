"""The OpenAPI schema names what it serves, and the valid values of fields."""

from fastapi import FastAPI

from vllm_omni.entrypoints.openai.diffusion_protocol import ImageRequest
from vllm_omni.entrypoints.openai.protocol import OmniChatCompletionRequest, SpeechRequest
from vllm_omni.entrypoints.openai.schema import describe_app
from vllm_omni.media.audio import AUDIO_FORMATS
from vllm_omni.media.image import IMAGE_FORMATS


def test_schema_has_a_title_and_a_description() -> None:
    app = FastAPI()
    describe_app(app, "tiny")
    info = app.openapi()["info"]
    assert info["title"] == "vllm_omni: tiny"
    assert "/v1/audio/voices" in info["description"]


def test_formats_and_bounds_are_in_the_schema() -> None:
    speech, image = SpeechRequest.model_json_schema(), ImageRequest.model_json_schema()
    assert speech["properties"]["response_format"]["enum"] == list(AUDIO_FORMATS)
    assert speech["properties"]["speed"]["minimum"] == 0.25
    assert image["properties"]["output_format"]["enum"] == list(IMAGE_FORMATS)
    assert image["properties"]["n"]["minimum"] == 1
    chat = OmniChatCompletionRequest.model_json_schema()
    assert set(chat["properties"]["slo"]["properties"]) == {"ttft_ms", "tpot_ms", "tpot_share"}
    assert chat["$defs"]["AudioOutput"]["properties"]["format"]["enum"] == list(AUDIO_FORMATS)


def test_every_field_of_ours_is_described() -> None:
    for body in (SpeechRequest, ImageRequest):
        undescribed = [name for name, field in body.model_fields.items() if not field.description]
        assert set(undescribed) <= NO_EFFECT | {"response_format", "stream"}, body


NO_EFFECT = {"background", "quality", "style", "moderation", "user", "safety_identifier", "input_fidelity"}
