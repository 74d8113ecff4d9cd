"""What error messages say of names and URLs."""

import pytest

from vllm_omni.names import hide_password


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://user:word@host", "redis://host"),
        ("{'redis': 'redis://:w@/rd@host:1/0', 'disk': 'a@b'}", "{'redis': 'redis://host:1/0', 'disk': 'a@b'}"),
        ("unix://:word@/run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("unix:///redis.sock?password=word&db=1", "unix:///redis.sock?password=...&db=1"),
        ("redis://host?db=1&password=word' more", "redis://host?db=1&password=...' more"),
        ("/data//models@2", "/data//models@2"),
    ],
)
def test_passwords_of_urls_are_left_out(text: str, shown: str) -> None:
    assert hide_password(text) == shown
