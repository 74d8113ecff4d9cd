"""A browser with the page's scripts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests import machine
from vllm_omni.entrypoints.page.files import HEADERS, INDEX, page_files

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route


@pytest.fixture(scope="package")
def page() -> Iterator["Page"]:
    """With the page's files, and no server: nothing is asked of it."""
    machine.require("chromium")
    from playwright.sync_api import sync_playwright

    def answer(route: "Route") -> None:
        file = page_files().get(route.request.url.rpartition("/")[2], page_files()[INDEX])
        is_script = route.request.url.endswith(".js")
        body = file.content if is_script else b"<!doctype html>"
        route.fulfill(body=body, headers={**HEADERS, "Content-Type": file.media_type})

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        page.route("**/*", answer)
        page.goto("http://page.example/omni")
        yield page
        browser.close()
