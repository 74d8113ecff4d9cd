"""Prompts of MiMo-Audio: the chat template, and what asks for a text to be spoken.

The checkpoints' own template is that of a text model. Markup and templates are those of the published code.
"""

from __future__ import annotations

from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.models.mimo_audio.config import SPOKEN_START
from vllm_omni.model_executor.models.mimo_audio.processing import PLACEHOLDER, SPOKEN
from vllm_omni.model_executor.pipeline import SpeechPrompt

USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
SYSTEM = "<|im_start|>system\n"
# The first of those among which the original chooses at random.
ENGLISH, CHINESE = "Please convert this text to speech", "请将这段文字转换为语音"
INSTRUCTED = "你需要根据指定的风格指令和文本内容来生成语音。"
IN_THE_VOICE = "你需要根据指定的风格指令和文本内容来生成和语音prompt具有相同音色的语音。你的音色应该是："

_SPOKEN_BEFORE, _SPOKEN_AFTER = SPOKEN.split("{text}")

# Variables: ``is_spoken`` (the reply has sound), ``enable_thinking``, ``in_context`` (examples, for Base checkpoints).
# A system message with a sound has a turn of its own, the reply's voice; one of text opens the user's turn.
CHAT_TEMPLATE = (
    """
{%- set state = namespace(system='', text='', body='', sounds=0) -%}
{%- for message in messages -%}
  {%- set state.text = '' -%}{%- set state.body = '' -%}{%- set state.sounds = 0 -%}
  {%- if message['content'] is string -%}
    {%- set state.text = message['content'] -%}{%- set state.body = message['content'] -%}
  {%- elif message['content'] -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] == 'text' -%}
        {%- set state.text = state.text + part['text'] -%}{%- set state.body = state.body + part['text'] -%}
      {%- else -%}
        {%- set state.sounds = state.sounds + 1 -%}{%- set state.body = state.body + 'PLACEHOLDER' -%}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {%- if message['role'] in ('system', 'developer') -%}
    {%- if in_context -%}
      {{- '[Int]:' + state.body + '\\n' -}}
    {%- elif state.sounds -%}
      {{- '<|im_start|>system\\n' + state.body + '<|im_end|>\\n' -}}
    {%- else -%}
      {%- set state.system = state.system + state.body + '\\n\\n' -%}
    {%- endif -%}
  {%- elif message['role'] == 'user' -%}
    {%- if in_context -%}
      {{- state.body + '\\n' -}}
    {%- else -%}
      {{- '<|im_start|>user\\n' + state.system + state.body + '<|im_end|>\\n' -}}
      {%- set state.system = '' -%}
    {%- endif -%}
  {%- elif message['role'] == 'assistant' -%}
    {%- if state.sounds > 1 -%}
      {{- raise_exception('a message of the assistant has ' ~ state.sounds ~ ' sounds: one is supported') -}}
    {%- elif state.sounds -%}
      {%- set state.body = 'SPOKEN_BEFORE' + state.text + 'SPOKEN_AFTER' -%}
    {%- endif -%}
    {%- if in_context -%}
      {{- state.body + ' \\n\\n' -}}
    {%- else -%}
      {{- '<|im_start|>assistant\\n' + state.body + '<|im_end|>\\n' -}}
    {%- endif -%}
  {%- else -%}
    {{- raise_exception('messages of the role ' ~ message['role'] ~ ' are not supported') -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {%- if in_context -%}
    {{- 'SPOKEN_START' -}}
  {%- elif is_spoken -%}
    {{- '<|im_start|>assistant\\nSPOKEN_START' -}}
  {%- elif enable_thinking -%}
    {{- '<|im_start|>assistant\\n<think>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' -}}
  {%- endif -%}
{%- endif -%}
""".strip()
    .replace("PLACEHOLDER", PLACEHOLDER)
    .replace("SPOKEN_BEFORE", _SPOKEN_BEFORE)
    .replace("SPOKEN_AFTER", _SPOKEN_AFTER)
    .replace("SPOKEN_START", SPOKEN_START)
)


def plain_speech(text: str) -> SpeechPrompt:
    """A text to speak as it is."""
    return SpeechPrompt(f"{USER}{_template(text)}:", f" {_written(text)}", f"{END}{ASSISTANT}{SPOKEN_START}")


def instructed_speech(text: str, instructions: str, *, has_voice: bool) -> SpeechPrompt:
    """A text to speak in a style; with the place of a voice's recording. The model thinks before it speaks."""
    system = IN_THE_VOICE + PLACEHOLDER if has_voice else INSTRUCTED
    return SpeechPrompt(
        f"{SYSTEM}{system}{END}{USER}{_template(text)}:",
        f" {_written(text)}({instructions})",
        f"{END}{ASSISTANT}<think>\n",
    )


def check_instructions(instructions: str | None) -> str:
    """Those that a voice needs.

    Raises:
        InvalidRequest: there are none.
    """
    if not instructions or not instructions.strip():
        raise InvalidRequest(
            "ref_audio: this model hears a voice only together with instructions on how to speak: give some",
            param="instructions",
        )
    return instructions


def _template(text: str) -> str:
    return CHINESE if any("\u4e00" <= one <= "\u9fff" for one in text) else ENGLISH


def _written(text: str) -> str:
    """A text that is all in capitals, or without one, as a sentence."""
    return text.capitalize() if text.isupper() or text.islower() else text
