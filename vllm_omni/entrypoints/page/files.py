"""The files of the page, as the server sends them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

DIRECTORY = Path(__file__).parent / "static"
INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, and no code or style in the document itself. What the page makes has blob: or data: addresses.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the files change with the package
}


class PageFile(NamedTuple):
    content: bytes
    media_type: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """Read every file of the page, by name."""
    return {
        path.name: PageFile(path.read_bytes(), MEDIA_TYPES[path.suffix])
        for path in sorted(DIRECTORY.iterdir())
        if path.suffix in MEDIA_TYPES
    }
