"""Tokenize prompts of text to speech: the user's text never becomes a control token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.renderers import TokenizeParams

from vllm_omni.engine.rejection import rejection
from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.pipeline import SpeechPrompt


async def tokenize_speech_prompt(renderer: Any, prompt: SpeechPrompt, max_num_tokens: int) -> tuple[list[int], int]:
    """Token ids of the prompt with its reply, and the number of the reply's.

    Args:
        renderer: of the stage that reads the prompt.

    Raises:
        InvalidRequest: the text is empty, not Unicode or longer than ``max_num_tokens``.
    """
    tokenizer = renderer.get_tokenizer()
    _check_text(prompt, max_num_tokens, tokenizer.max_chars_per_token)
    ids = await _tokenize(renderer, prompt, tokenizer.get_added_vocab())
    for name in ("request", "reply"):
        forged = set(tokenizer.get_added_vocab().values()).intersection(ids[name])
        if forged:
            raise InvalidRequest(f"the text has {tokenizer.decode(forged)!r}, a control token")
    prompt_token_ids = [one for part in ids.values() for one in part]
    num_reply_tokens = len(ids["reply"])
    if len(prompt_token_ids) > max_num_tokens:
        raise InvalidRequest(
            f"the text has {num_reply_tokens} tokens, which with the prompt around it makes "
            f"{len(prompt_token_ids)}: the model has room for {max_num_tokens}"
        )
    return prompt_token_ids, num_reply_tokens


def _check_text(prompt: SpeechPrompt, max_num_tokens: int, max_chars_per_token: int) -> None:
    """Check the text before tokenization, which would delay other requests for a very long text."""
    if not prompt.reply.strip():
        raise InvalidRequest("the text to speak is empty")
    try:
        prompt.request.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"text or instructions: invalid Unicode: {exc.reason}") from exc
    max_num_characters = max_num_tokens * max_chars_per_token
    if len(prompt.request) > max_num_characters:
        raise InvalidRequest(
            f"the text has {len(prompt.reply)} characters: the model has room for {max_num_tokens} tokens, "
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


def cut(text: str, control_tokens: Iterable[str]) -> Iterator[str]:
    """Split the text so that no part holds a whole control token.

    A tokenizer's own switch for this is state that requests in other threads would see.
    """
    spelled = re.compile("|".join(re.escape(one) for one in sorted(control_tokens) if len(one) > 1) or "(?!)")
    start = 0
    while found := spelled.search(text, start):
        yield text[start : found.start() + 1]
        start = found.start() + 1
    yield text[start:]
