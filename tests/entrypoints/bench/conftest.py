from collections.abc import Iterator

import pytest

from tests.entrypoints.bench.media_server import MediaServer, serve_media


@pytest.fixture
def media_server() -> Iterator[MediaServer]:
    with serve_media() as server:
        yield server


@pytest.fixture
def other_server() -> Iterator[MediaServer]:
    with serve_media() as server:
        yield server
