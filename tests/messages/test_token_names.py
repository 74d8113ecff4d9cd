"""Names of tokens: what is equal, and what travels."""

from vllm_omni.messages.token_names import Part, TokenNames, decode_names, encode_names

NAMES = TokenNames([1, 2, 3, 4], [Part(1, 2, "image:a"), Part(3, 1, "audio:b")], "salt")


def test_they_come_back_as_they_were() -> None:
    assert decode_names(encode_names(NAMES)) == NAMES


def test_the_first_tokens_have_the_parts_that_start_among_them() -> None:
    assert NAMES.first(2) == TokenNames([1, 2], [Part(1, 2, "image:a")], "salt")
    assert NAMES.first(0) == TokenNames([], [], "salt")


def test_a_digest_depends_on_all_that_is_in_front_and_on_nothing_behind() -> None:
    digest = NAMES.digest(3)
    assert TokenNames([1, 2, 3, 9], NAMES.parts, "salt").digest(3) == digest
    assert TokenNames(NAMES.token_ids, NAMES.parts[:1], "salt").digest(3) == digest
    for other in (
        TokenNames([1, 2, 9, 4], NAMES.parts, "salt"),
        TokenNames(NAMES.token_ids, [Part(1, 2, "image:c")], "salt"),
        TokenNames(NAMES.token_ids, NAMES.parts, "other"),
    ):
        assert other.digest(3) != digest
