"""Prompts of HunyuanImage-3: roles, sections that are tokenized one by one, and what stands in front of a picture.

A tokenizer may merge the end of a role's text with the start of the user's, so that their ids would differ from those
that the model was trained on. ``CUT`` stands between sections in a text, and is none of the model's tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from vllm_omni.model_executor.models.hunyuan_image_3.config import BOS, IMAGE

CUT = "<pad>"
USER, ASSISTANT, BLANK = "User: ", "Assistant: ", "\n\n"

_ROLES = re.compile(f"({re.escape(BOS)}|(?:(?<={re.escape(BOS)})|(?<={BLANK})){USER}|{BLANK}{ASSISTANT})")

# Variables: ``task`` ("recaption" or "think": the model writes a text of that kind first).
CHAT_TEMPLATE = (
    """
{{- 'BOS' -}}
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    {{- 'USERCUT' -}}
  {%- elif message['role'] == 'assistant' -%}
    {{- 'ASSISTANTCUT' -}}
  {%- endif -%}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- elif message['content'] -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] == 'text' -%}
        {{- part['text'] -}}
      {%- else -%}
        {{- 'IMAGE' -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- 'CUTBLANKCUT' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- 'ASSISTANT' -}}
  {%- if task is defined and task -%}
    {{- '<' + task + '>' -}}
  {%- endif -%}
{%- endif -%}
""".replace("BOS", BOS)
    .replace("USER", USER)
    .replace("ASSISTANT", ASSISTANT)
    .replace("IMAGE", IMAGE)
    .replace("CUT", CUT)
    .replace("BLANK", BLANK.replace("\n", "\\n"))
)


def sections_of(text: str) -> Iterator[str]:
    """The sections of a prompt: cut at roles, where ``CUT`` does not say them."""
    for part in text.split(CUT):
        for section in _ROLES.split(part):
            if section.startswith(BLANK) and section.endswith(ASSISTANT):
                yield from (BLANK, ASSISTANT)
            elif section:
                yield section


def picture_prompt(text: str, num_images: int, *, has_roles: bool) -> str:
    """A prompt that asks for a picture of a text and images.

    Args:
        has_roles: the checkpoint is one that follows instructions, rather than one that continues captions.
    """
    asked = f"{IMAGE * num_images}{text}"
    return f"{BOS}{USER}{CUT}{asked}{CUT}{BLANK}{CUT}{ASSISTANT}" if has_roles else f"{BOS}{asked}"


class Roles:
    """The ids of the roles' texts.

    Args:
        encode: a section's ids.
    """

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.user, self.assistant = encode(USER), [*encode(BLANK), *encode(ASSISTANT)]

    def asks(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the assistant's role."""
        return list(ids[-len(self.assistant) :]) == self.assistant

    def user_ranges(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """The tokens that are the user's: those of a prompt without roles are all his, but for the first."""
        ranges, at = [], 0
        while (start := _find(ids, self.user, at)) is not None:
            start += len(self.user)
            end = _find(ids, self.assistant, start)
            at = len(ids) if end is None else end
            ranges.append((start, at))
        return ranges or [(1, len(ids))]


def _find(ids: Sequence[int], wanted: Sequence[int], at: int) -> int | None:
    for index in range(at, len(ids) - len(wanted) + 1):
        if list(ids[index : index + len(wanted)]) == list(wanted):
            return index
    return None
