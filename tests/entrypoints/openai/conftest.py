"""The server that the tests of this directory share, and its client."""

import openai
import pytest

from tests.server import Server
from tests.shared_engines import QWEN_SERVER, SharedEngines


@pytest.fixture
def server(engines: SharedEngines) -> Server:
    return engines.get(QWEN_SERVER)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client


@pytest.fixture
def text(server: Server) -> str:
    """The model's answer to ``tests.server.QUESTION``."""
    return server.text
