"""The files of the page: complete, without code in the document, and with nothing from elsewhere."""

import re
from html.parser import HTMLParser

import pytest

from vllm_omni.entrypoints.page.files import DIRECTORY, HEADERS, INDEX, page_files

SCRIPTS = [name for name in page_files() if name.endswith(".js")]


def text_of(name: str) -> str:
    return page_files()[name].content.decode()


class Document(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text_of(INDEX))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_every_file_of_the_directory_is_sent() -> None:
    assert set(page_files()) == {path.name for path in DIRECTORY.iterdir()}


def test_the_policy_allows_this_server_alone_and_no_code_in_the_document() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy and "http" not in policy


def test_the_document_has_neither_scripts_nor_styles_nor_listeners() -> None:
    tags = Document().tags
    assert [attributes.keys() for tag, attributes in tags if tag == "script"] == [{"type", "src"}]
    assert "style" not in {tag for tag, _ in tags}
    names = {name for _, attributes in tags for name in attributes}
    assert not {name for name in names if name.startswith("on") or name == "style"}


def test_what_the_document_names_is_there() -> None:
    links = [
        value for _, attributes in Document().tags for name, value in attributes.items() if name in ("src", "href")
    ]
    assert links
    for link in links:
        assert link is not None and link.startswith("omni/static/"), "relative: the server may be below a path"
        assert link.removeprefix("omni/static/") in page_files()


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_loads_is_there(name: str) -> None:
    text = text_of(name)
    imported = re.findall(r'from "\./([^"]+)"', text) + re.findall(r'"omni/static/([^"]+)"', text)
    assert set(imported) <= page_files().keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_elements_that_a_script_uses_are_in_the_document(name: str) -> None:
    ids = {attributes["id"] for _, attributes in Document().tags if "id" in attributes}
    used = re.findall(r'(?:byId|getElementById)\("([^"]+)"\)', text_of(name))
    assert set(used) <= ids


def test_no_file_names_another_host() -> None:
    for name in page_files():
        assert set(re.findall(r"https?://[^\s\"'<]+", text_of(name))) <= {"http://www.w3.org/2000/svg"}, name


def test_each_control_of_the_document_has_a_name() -> None:
    labels = {"aria-label", "aria-labelledby"}
    for tag, attributes in Document().tags:
        if tag in ("input", "textarea", "dialog", "section"):
            assert labels & attributes.keys() or attributes.get("aria-hidden") == "true", attributes
