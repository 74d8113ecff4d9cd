"""Prompts of chats and of texts to speak have the markup of the published code."""

from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.models.mimo_audio.processing import PLACEHOLDER, SPOKEN
from vllm_omni.model_executor.models.mimo_audio.prompt import (
    CHAT_TEMPLATE,
    check_instructions,
    instructed_speech,
    plain_speech,
)
from vllm_omni.testing.mimo_audio import build

U, A, E, S = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n", "<|im_start|>system\n"
SOUND = {"type": "audio"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def message(role: str, *content: dict[str, str]) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(build(tmp_path_factory.mktemp("mimo_audio")))


def rendered(tokenizer, messages, **variables) -> str:
    return tokenizer.apply_chat_template(
        messages, chat_template=CHAT_TEMPLATE, tokenize=False, add_generation_prompt=True, **variables
    )


SPOKEN_TURN = [message("user", SOUND), message("assistant", text("I see."), SOUND), message("user", SOUND)]
CASES = {
    "understanding": (
        [message("user", SOUND, text("What is it?"))],
        {},
        f"{U}{PLACEHOLDER}What is it?{E}{A}<think>\n\n</think>\n",
    ),
    "thinking": ([message("user", text("Why?"))], {"enable_thinking": True}, f"{U}Why?{E}{A}<think>\n"),
    "plain_content": ([{"role": "user", "content": "Why?"}], {}, f"{U}Why?{E}{A}<think>\n\n</think>\n"),
    "dialogue": (
        [message("system", text("Be brief")), message("user", SOUND)],
        {"is_spoken": True},
        f"{U}Be brief\n\n{PLACEHOLDER}{E}{A}<|sostm|>",
    ),
    "dialogue_in_a_voice": (
        [message("system", text("Your voice should be:"), SOUND), message("system", text("Be brief")), SPOKEN_TURN[0]],
        {"is_spoken": True},
        f"{S}Your voice should be:{PLACEHOLDER}{E}{U}Be brief\n\n{PLACEHOLDER}{E}{A}<|sostm|>",
    ),
    "spoken_history": (
        [message("system", text("Be brief")), *SPOKEN_TURN],
        {"is_spoken": True},
        f"{U}Be brief\n\n{PLACEHOLDER}{E}{A}{SPOKEN.format(text='I see.')}{E}{U}{PLACEHOLDER}{E}{A}<|sostm|>",
    ),
    "written_history": (
        [message("user", SOUND), message("assistant", text("I see.")), message("user", SOUND)],
        {"enable_thinking": True},
        f"{U}{PLACEHOLDER}{E}{A}I see.{E}{U}{PLACEHOLDER}{E}{A}<think>\n",
    ),
    "in_context": (
        [message("system", text("Convert the voice.")), *SPOKEN_TURN],
        {"in_context": True, "is_spoken": True},
        f"[Int]:Convert the voice.\n{PLACEHOLDER}\n{SPOKEN.format(text='I see.')} \n\n{PLACEHOLDER}\n<|sostm|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_chat_has_the_markup_of_its_task(name, tokenizer):
    messages, variables, expected = CASES[name]
    assert rendered(tokenizer, messages, **variables) == expected


@pytest.mark.parametrize(
    "messages, reason",
    [
        ([message("assistant", SOUND, SOUND)], "has 2 sounds: one is supported"),
        ([message("tool", text("4"))], "role tool are not supported"),
    ],
)
def test_what_the_model_was_not_trained_for_is_rejected(messages, reason, tokenizer):
    with pytest.raises(jinja2.TemplateError, match=reason):
        rendered(tokenizer, messages)


def test_a_text_to_speak_is_asked_for_in_its_language():
    prompt = plain_speech("GOOD MORNING")
    assert (prompt.before, prompt.request) == (f"{U}Please convert this text to speech:", " Good morning")
    assert (prompt.after, prompt.reply) == (f"{E}{A}<|sostm|>", "")
    assert plain_speech("今天 A").before == f"{U}请将这段文字转换为语音:"
    assert plain_speech("As it is").request == " As it is"


def test_instructions_have_a_system_turn_with_the_voice():
    prompt = instructed_speech("Good day", "slowly", has_voice=False)
    assert (
        prompt.before == f"{S}你需要根据指定的风格指令和文本内容来生成语音。{E}{U}Please convert this text to speech:"
    )
    assert (prompt.request, prompt.after) == (" Good day(slowly)", f"{E}{A}<think>\n")
    before = instructed_speech("Good day", "slowly", has_voice=True).before
    assert before.startswith(S) and f"你的音色应该是：{PLACEHOLDER}{E}" in before
    with pytest.raises(InvalidRequest, match="instructions on how to speak"):
        check_instructions(" ")
