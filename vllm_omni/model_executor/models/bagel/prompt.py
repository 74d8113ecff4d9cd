"""Prompts of BAGEL: the chat template. Each text stands between markers, and an image has its own."""

from __future__ import annotations

from vllm_omni.model_executor.models.bagel.config import TEXT_END, TEXT_START
from vllm_omni.model_executor.models.bagel.processing import PLACEHOLDER

# Variables: ``is_answered`` (the model writes a text; else the picture follows the prompt). Roles have no markup.
CHAT_TEMPLATE = (
    """
{%- for message in messages -%}
  {%- if message['content'] is string -%}
    {{- 'START' + message['content'] + 'END' -}}
  {%- elif message['content'] -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] == 'text' -%}
        {{- 'START' + part['text'] + 'END' -}}
      {%- else -%}
        {{- 'IMAGE' -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and is_answered is not false -%}
  {{- 'START' -}}
{%- endif -%}
""".replace("START", TEXT_START)
    .replace("END", TEXT_END)
    .replace("IMAGE", PLACEHOLDER)
)
