"""The chat template, held against prompts as transformers' template and processor write them."""

from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vllm_omni.model_executor.models.janus.config import BOS
from vllm_omni.model_executor.models.janus.prompt import CHAT_TEMPLATE, EOS, SYSTEM_PROMPT, picture_prompt

IMAGE = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def render(*messages: tuple[str, Any], **variables: Any) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    given = [{"role": role, "content": content} for role, content in messages]
    return environment.from_string(CHAT_TEMPLATE).render(messages=given, add_generation_prompt=True, **variables)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (" what is it? ", "what is it?"),
        ([text(" what is it? ")], "what is it?"),
        ([IMAGE, text("what is it? ")], "<image_placeholder>\nwhat is it?"),
        ([text(" this:"), IMAGE, text("or "), text("that? ")], "this:\n<image_placeholder>\nor  that?"),
        ([IMAGE, IMAGE], "<image_placeholder>\n\n<image_placeholder>"),
    ],
)
def test_a_question_follows_the_default_system_prompt(content: Any, said: str) -> None:
    assert render(("user", content)) == f"{BOS}{SYSTEM_PROMPT}<|User|>: {said}\n\n<|Assistant|>:"


def test_a_conversation_has_its_own_system_prompt_and_ends_replies() -> None:
    said = render(("system", "Be brief."), ("user", "hello"), ("assistant", "hi"), ("user", "bye"))
    turns = f"System: Be brief.{EOS}<|User|>: hello\n\n<|Assistant|>: hi{EOS}<|User|>: bye\n\n<|Assistant|>:"
    assert said == f"{BOS}{turns}"


def test_a_picture_follows_a_mark_and_no_system_prompt() -> None:
    assert render(("user", "a boat"), is_answered=False) == BOS + picture_prompt("a boat ")
    assert picture_prompt("a boat").endswith("<|Assistant|>:<begin_of_image>")
