"""Prompts of Janus-Pro: the chat template, which gives what transformers' template and processor give together."""

from __future__ import annotations

from vllm_omni.model_executor.models.janus.config import BOS, IMAGE, IMAGE_START

EOS = "<｜end▁of▁sentence｜>"
SYSTEM_PROMPT = (
    "You are a helpful language and vision assistant. "
    "You are able to understand the visual content that the user provides, "
    "and assist the user with a variety of tasks using natural language.\n\n"
)

# Variables: ``is_answered`` (the model writes a text; else the picture follows the prompt).
CHAT_TEMPLATE = (
    """
{{- 'BOS' -}}
{%- if is_answered is not false and messages[0]['role'] != 'system' -%}
  {{- SYSTEM -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message['role'] in ('user', 'assistant') -%}
    {{- '<|' + message['role'] | capitalize + '|>: ' -}}
  {%- else -%}
    {{- message['role'] | capitalize + ': ' -}}
  {%- endif -%}
  {%- if message['content'] is string -%}
    {{- message['content'] | trim -}}
  {%- elif message['content'] -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] != 'text' -%}
        {{- ('' if loop.first else '\\n') + 'IMAGE' + ('' if loop.last else '\\n') -}}
      {%- else -%}
        {%- if not loop.first and loop.previtem['type'] == 'text' -%}
          {{- ' ' -}}
        {%- endif -%}
        {%- if loop.first and loop.last -%}
          {{- part['text'] | trim -}}
        {%- elif loop.first -%}
          {{- part['text'].lstrip() -}}
        {%- elif loop.last -%}
          {{- part['text'].rstrip() -}}
        {%- else -%}
          {{- part['text'] -}}
        {%- endif -%}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {%- if not loop.last or add_generation_prompt -%}
    {{- '\\n\\n' if message['role'] == 'user' else 'EOS' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|Assistant|>:' -}}
  {%- if is_answered is false -%}
    {{- 'START' -}}
  {%- endif -%}
{%- endif -%}
""".replace("BOS", BOS)
    .replace("EOS", EOS)
    .replace("START", IMAGE_START)
    .replace("IMAGE", IMAGE)
    .replace("SYSTEM", repr(SYSTEM_PROMPT))
)


def picture_prompt(text: str) -> str:
    """A prompt whose answer is a picture; the tokenizer adds the first token."""
    return f"<|User|>: {text.strip()}\n\n<|Assistant|>:{IMAGE_START}"
