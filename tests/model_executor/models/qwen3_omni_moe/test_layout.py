"""Which tokens of the thinker's prompt the talker reads, and where it counts them."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.token_names import Part, TokenNames
from vllm_omni.model_executor.models.qwen3_omni_moe.layout import make_layout, talker_names, talker_positions

START, SYSTEM, USER, ASSISTANT, NEWLINE = 1, 2, 3, 4, 5
AUDIO, IMAGE, VIDEO, AUDIO_START, AUDIO_END, VISION_START, VISION_END = range(10, 17)
CONFIG = SimpleNamespace(
    im_start_token_id=START,
    user_token_id=USER,
    assistant_token_id=ASSISTANT,
    thinker_config=SimpleNamespace(
        audio_token_id=AUDIO,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_end_token_id=AUDIO_END,
        audio_start_token_id=AUDIO_START,
        vision_start_token_id=VISION_START,
    ),
)
PICTURE = [VISION_START, IMAGE, IMAGE, VISION_END]
FILM = [VISION_START, AUDIO_START, VIDEO, AUDIO, AUDIO_END, VISION_END]


def turn(role: int, *content: int) -> list[int]:
    return [START, role, NEWLINE, *content]


def test_the_users_turns_are_read_and_the_last_one_of_the_assistant():
    ids = turn(SYSTEM, 20) + turn(USER, 21, 22) + turn(ASSISTANT, 23) + turn(USER, 24) + turn(ASSISTANT)
    layout = make_layout(ids, CONFIG)
    assert [ids[start:end] for start, end in layout.turns] == [turn(USER, 21, 22), turn(USER, 24)]
    assert layout.reply_start == len(ids)
    assert layout.num_prompt_tokens == 5 + 4 + 9


def test_a_given_reply_begins_behind_the_header():
    ids = turn(USER, 21) + turn(ASSISTANT, 30, 31)
    assert make_layout(ids, CONFIG).reply_start == len(ids) - 2


def test_media_are_those_of_the_user():
    ids = turn(SYSTEM, IMAGE) + turn(USER, 20, *PICTURE, 21, AUDIO) + turn(ASSISTANT)
    assert [ids[start:end] for start, end in make_layout(ids, CONFIG).media] == [[IMAGE, IMAGE], [AUDIO]]


@pytest.mark.parametrize(
    ("content", "is_flat"), [([*FILM], True), ([*PICTURE, *FILM], True), ([*FILM, *PICTURE], False)]
)
def test_a_video_with_its_audio_is_counted_as_text_unless_a_picture_follows(content, is_flat):
    ids = turn(USER, *content) + turn(ASSISTANT)
    flat = [ids[start:end] for start, end in make_layout(ids, CONFIG).flat]
    assert flat == ([[AUDIO_START, VIDEO, AUDIO, AUDIO_END]] if is_flat else [])


def test_positions_move_with_the_turns_that_are_left_out():
    ids = turn(SYSTEM, 20, 21) + turn(USER, *PICTURE) + turn(ASSISTANT)
    positions = np.broadcast_to(np.arange(len(ids)), (3, len(ids))).copy()
    picture = ids.index(IMAGE)
    positions[:, picture : picture + 2] = [[9, 9], [9, 9], [9, 10]]
    positions[:, picture + 2 :] = np.arange(11, 11 + len(ids) - picture - 2)
    expected = [[0, 1, 2, 3, 4, 4, 6], [0, 1, 2, 3, 4, 4, 6], [0, 1, 2, 3, 4, 5, 6]]
    ours = talker_positions(positions, make_layout(ids, CONFIG))
    assert ours[:, :7].tolist() == expected
    assert ours[:, 7:].tolist() == [list(range(7, 16))] * 3


def test_a_prompt_without_a_turn_of_the_assistant_is_rejected():
    with pytest.raises(InvalidRequest, match="no turn of the assistant"):
        make_layout(turn(USER, 20), CONFIG)


# -- names of rows -----------------------------------------------------------------------------------------------------


def names_of(ids, *parts, salt=""):
    return talker_names(TokenNames(ids, list(parts), salt), make_layout(ids, CONFIG))


def test_names_are_those_of_the_users_turns_and_the_header():
    ids = turn(SYSTEM, 20) + turn(USER, 21, 22) + turn(ASSISTANT, 23) + turn(USER, 24) + turn(ASSISTANT)
    assert names_of(ids, salt="s") == TokenNames(turn(USER, 21, 22) + turn(USER, 24) + turn(ASSISTANT), [], "s")
    assert make_layout(ids, CONFIG).num_prompt_tokens == len(names_of(ids).token_ids) + 6


def test_a_later_turn_begins_with_the_names_of_the_turn_before():
    first = turn(SYSTEM, 20) + turn(USER, *PICTURE, 21)
    picture = Part(first.index(IMAGE), 2, "image:a")
    early = names_of(first + turn(ASSISTANT), picture)
    late = names_of(first + turn(ASSISTANT, 30, 31) + turn(USER, 22) + turn(ASSISTANT), picture)
    num_same = len(turn(USER, *PICTURE, 21))
    assert early.first(num_same) == late.first(num_same)
    assert early.parts == late.parts and len(early.parts) == 1


@pytest.mark.parametrize("given", [{"system": 1}, {"reply": 1}, {"picture": "image:b"}])
def test_media_are_named_by_all_that_the_thinker_has_read(given):
    """Text rows are embeddings, and are not."""

    def make(system=20, reply=30, picture="image:a"):
        before = turn(SYSTEM, system) + turn(USER, 21) + turn(ASSISTANT, reply) + turn(USER)
        ids = before + PICTURE + turn(ASSISTANT)
        return names_of(ids, Part(len(before) + 1, 2, picture))

    one, other = make(), make(**given)
    assert one.token_ids == other.token_ids
    assert [(part.offset, part.length) for part in one.parts] == [(part.offset, part.length) for part in other.parts]
    assert one.parts != other.parts


def test_a_video_that_is_counted_otherwise_has_another_name():
    """Its positions depend on what follows."""
    film = Part(4, 4, "video:a")
    alone = names_of(turn(USER, *FILM) + turn(ASSISTANT), film)
    followed = names_of(turn(USER, *FILM, *PICTURE) + turn(ASSISTANT), film, Part(10, 2, "image:a"))
    num_same = len(turn(USER, *FILM))
    assert alone.token_ids[:num_same] == followed.token_ids[:num_same]
    assert alone.first(num_same) != followed.first(num_same)
