"""``TextReader``: token ids of the texts of a request, from which no control token can come."""

from __future__ import annotations

from vllm.tokenizers import cached_get_tokenizer

from vllm_omni.errors import InvalidRequest
from vllm_omni.speech.text import cut

START, END = "<|im_start|>", "<|im_end|>"


class TextReader:
    """Reads the texts of requests to one checkpoint.

    Args:
        max_num_tokens: of a text; a longer one is rejected, before it is tokenized if it has too many characters.
    """

    def __init__(self, model: str, revision: str | None, max_num_tokens: int) -> None:
        self._tokenizer = cached_get_tokenizer(model, revision=revision)
        self._max_num_tokens = max_num_tokens
        self._max_num_characters = max_num_tokens * self._tokenizer.max_chars_per_token
        self._control_tokens = self._tokenizer.get_added_vocab()
        self.role_ids = self._encode(f"{START}assistant\n")
        self._instruction_ids = self._encode(f"{START}user\n"), self._encode(f"{END}\n")

    def ids(self, text: str, what: str) -> list[int]:
        """Token ids of a text.

        Args:
            what: names the text in errors.

        Raises:
            InvalidRequest: it is empty, not Unicode, or too long.
        """
        if not text.strip():
            raise InvalidRequest(f"{what} is empty")
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequest(f"{what}: invalid Unicode: {exc.reason}") from exc
        if len(text) > self._max_num_characters:
            raise InvalidRequest(
                f"{what} has {len(text)} characters: the model has room for {self._max_num_tokens} tokens, which are "
                f"never more than {self._max_num_characters} characters"
            )
        ids = [token for part in cut(text, self._control_tokens) for token in self._encode(part)]
        if forged := set(self._control_tokens.values()).intersection(ids):
            raise InvalidRequest(f"{what} has {self._tokenizer.decode(forged)!r}, a control token")
        if len(ids) > self._max_num_tokens:
            raise InvalidRequest(f"{what} has {len(ids)} tokens: the model has room for {self._max_num_tokens}")
        return ids

    def instruction_ids(self, instructions: str) -> list[int]:
        """Token ids of instructions with their markup; none for no instructions.

        Raises:
            InvalidRequest: see ``ids``.
        """
        if not instructions.strip():
            return []
        before, after = self._instruction_ids
        return [*before, *self.ids(instructions, "instructions"), *after]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
