"""``SpeechPrompts``: prompts of text to speech, in which the user's text never becomes a control token."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from vllm.inputs import EngineInput
from vllm.renderers import TokenizeParams

from vllm_omni.config import OmniConfig
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.rejection import rejection
from vllm_omni.entrypoints.voice_cloning import Recording, RecordingReader
from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.pipeline import SpeechPrompt, client_checks
from vllm_omni.speech.recording import SAMPLE_RATE
from vllm_omni.speech.text import cut


class SpeechPrompts:
    """Makes the first stage's prompts of one deployment.

    Args:
        renderer: of the first stage.
    """

    def __init__(self, orchestrator: Orchestrator, config: OmniConfig, renderer: Any) -> None:
        self._orchestrator = orchestrator
        self._config = config
        self._renderer = renderer

    async def with_reply(self, text: str, instructions: str | None) -> tuple[list[int], int]:
        """Token ids of a prompt with the text as its reply, and the number of the reply's.

        Raises:
            InvalidRequest: see ``tokenize_speech_prompt``.
        """
        pipeline = self._orchestrator.pipeline
        assert pipeline.speech_stage is not None, "the caller has checked that the model speaks"
        # The first stage ends with one more token; the speech stage needs two to start.
        max_num_tokens = self._max_model_len(self._config.stages[0].name, pipeline.speech_stage) - 2
        with client_checks(f"{type(pipeline).__name__}.speech_prompt"):
            prompt = pipeline.speech_prompt(text, instructions)
        return await tokenize_speech_prompt(self._renderer, prompt, text, max_num_tokens)

    async def asking_for(self, text: str, instructions: str | None, recording: Recording | None) -> EngineInput:
        """A prompt that asks for the text, in the voice of a recording if there is one; ready for the engine.

        Raises:
            InvalidRequest: the text cannot be spoken, or the recording not read.
        """
        pipeline = self._orchestrator.pipeline
        make = pipeline.speech_prompt if recording is None else pipeline.voice_prompt
        with client_checks(f"{type(pipeline).__name__}.{make.__name__}"):
            prompt = make(text, instructions)
        max_num_tokens = self._max_model_len(self._config.stages[0].name) - 1
        ids, _ = await tokenize_speech_prompt(self._renderer, prompt, text, max_num_tokens)
        made: dict[str, Any] = {"prompt_token_ids": ids}
        if recording is not None:
            model_config = self._orchestrator.front(self._config.stages[0].name).vllm_config.model_config
            reader = RecordingReader(model_config, self._orchestrator.media_budget)
            samples = await reader.read(recording, "ref_audio")
            made["multi_modal_data"] = {"audio": (samples, SAMPLE_RATE)}
        try:
            rendered: EngineInput = await self._renderer.process_for_engine_async(made, time.time())
        except Exception as exc:
            raise rejection(exc) from exc
        return rendered

    def _max_model_len(self, *stages: str) -> int:
        fronts = [self._orchestrator.front(name) for name in stages]
        return int(min(front.vllm_config.model_config.max_model_len for front in fronts))


async def tokenize_speech_prompt(
    renderer: Any, prompt: SpeechPrompt, text: str, max_num_tokens: int
) -> tuple[list[int], int]:
    """Token ids of the prompt with its reply, and the number of the reply's.

    Args:
        renderer: of the stage that reads the prompt.
        text: the user's, to speak.

    Raises:
        InvalidRequest: the text is empty, not Unicode or longer than ``max_num_tokens``.
    """
    tokenizer = renderer.get_tokenizer()
    _check_text(prompt, text, max_num_tokens, tokenizer.max_chars_per_token)
    ids = await _tokenize(renderer, prompt, tokenizer.get_added_vocab())
    for name in ("request", "reply"):
        forged = set(tokenizer.get_added_vocab().values()).intersection(ids[name])
        if forged:
            raise InvalidRequest(f"the text has {tokenizer.decode(forged)!r}, a control token")
    prompt_token_ids = [one for part in ids.values() for one in part]
    num_reply_tokens = len(ids["reply"])
    num_tokens = len(ids["reply"] or ids["request"])
    if len(prompt_token_ids) > max_num_tokens:
        raise InvalidRequest(
            f"the text has {num_tokens} tokens, which with the prompt around it makes "
            f"{len(prompt_token_ids)}: the model has room for {max_num_tokens}"
        )
    return prompt_token_ids, num_reply_tokens


def _check_text(prompt: SpeechPrompt, text: str, max_num_tokens: int, max_chars_per_token: int) -> None:
    """Check the text before tokenization, which would delay other requests for a very long text."""
    if not text.strip():
        raise InvalidRequest("the text to speak is empty")
    try:
        prompt.request.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"text or instructions: invalid Unicode: {exc.reason}") from exc
    max_num_characters = max_num_tokens * max_chars_per_token
    if len(prompt.request) > max_num_characters:
        raise InvalidRequest(
            f"the text has {len(text)} characters: the model has room for {max_num_tokens} tokens, "
            f"which are never more than {max_num_characters} characters"
        )


async def _tokenize(renderer: Any, prompt: SpeechPrompt, control_tokens: Iterable[str]) -> dict[str, list[int]]:
    """Token ids by part of the prompt; only ``before`` and ``after`` may have control tokens."""
    parts = {
        "before": [prompt.before],
        "request": list(cut(prompt.request, control_tokens)),
        "after": [prompt.after],
        "reply": list(cut(prompt.reply, control_tokens)),
    }
    texts = [{"prompt": text} for part in parts.values() for text in part]
    params = TokenizeParams(max_total_tokens=None, add_special_tokens=False)
    try:
        tokenized = iter(await renderer.tokenize_prompts_async(texts, params))
    except Exception as exc:
        raise rejection(exc) from exc
    return {name: [one for _ in part for one in next(tokenized)["prompt_token_ids"]] for name, part in parts.items()}
