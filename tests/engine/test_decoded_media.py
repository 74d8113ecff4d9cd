"""Files of prompts that are sent again are not decoded again."""

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO

from tests.reference.media import make_image
from vllm_omni.engine import media_connector
from vllm_omni.engine.decoded_media import DecodedMedia, key_of
from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.engine.media_connector import BudgetedConnector


class Decoder:
    """Counts what it decodes; ends a decode when the test says so."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> Any:
        self.num_calls += 1
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return object()


async def test_a_file_is_decoded_once_for_all_prompts_that_wait_for_it() -> None:
    media, decode = DecodedMedia(100), Decoder()
    waiting = [asyncio.ensure_future(media.get(b"file", 10, decode)) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # the prompt that started it
    decode.may_end.set()
    first, *others = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError) and len({id(one) for one in others}) == 1
    assert await media.get(b"file", 10, decode) is others[0] and decode.num_calls == 1
    assert media.statistics() == (1, 10, 5, 1)


async def test_a_file_that_cannot_be_decoded_is_tried_again() -> None:
    media, decode = DecodedMedia(100), Decoder()
    decode.may_end.set()
    decode.error = ValueError("no image")
    for _ in range(2):
        with pytest.raises(ValueError, match="no image"):
            await media.get(b"file", 10, decode)
    decode.error = None
    assert await media.get(b"file", 10, decode) and decode.num_calls == 3


async def test_the_files_that_were_not_used_for_longest_make_room() -> None:
    media, decode = DecodedMedia(30), Decoder()
    decode.may_end.set()
    for name in (b"1", b"2", b"3", b"1", b"4", b"1"):
        await media.get(name, 10, decode)
    assert decode.num_calls == 4 and media.statistics()[:2] == (3, 30)
    await media.get(b"2", 10, decode)
    assert decode.num_calls == 5
    await media.get(b"large", 31, decode)
    assert media.statistics()[:2] == (3, 30), "it is not kept, and evicts nothing"


def test_a_file_is_named_by_its_bytes_and_its_decoder() -> None:
    image, video = ImageMediaIO(), VideoMediaIO(ImageMediaIO(), num_frames=4)
    keys = {key_of(b"1", one) for one in (image, ImageMediaIO(image_mode="L"), AudioMediaIO(), video)}
    keys |= {key_of(b"2", image), key_of(b"1", VideoMediaIO(ImageMediaIO(), num_frames=5))}
    assert len(keys) == 6
    assert key_of(b"1", VideoMediaIO(ImageMediaIO(), num_frames=4)) == key_of(b"1", video)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodedMedia]:
    media = DecodedMedia(1 << 20)
    monkeypatch.setattr(media_connector, "decoded_media", lambda: media)
    yield media


async def test_an_image_that_is_sent_again_is_the_same_object_and_still_holds_its_budget(kept: DecodedMedia) -> None:
    file = io.BytesIO()
    make_image(40, 30).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    budget, images = MediaBudget(1 << 30, 4), []
    for _ in range(2):
        with budget.hold() as holding:
            images.append(await BudgetedConnector().load_from_url_async(url, ImageMediaIO()))
            assert holding.num_bytes == 16 * 40 * 30 * 4
    assert images[0] is images[1] and kept.statistics() == (1, 40 * 30 * 4 + len(file.getvalue()), 1, 1)
