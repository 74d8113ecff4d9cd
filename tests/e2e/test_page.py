"""The page ``/omni`` in a browser, on real servers: Debian's Chromium without a window."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import machine
from tests.server import Server, serve, wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.long

KEY = "page-key"
FLAGS = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
WIDE, NARROW = {"width": 1400, "height": 860}, {"width": 360, "height": 740}
RATE = 24000
NUM_TOKENS, NUM_CODES = 24, 100
NUM_SAMPLES = 480 * NUM_CODES


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    machine.require("chromium")
    directory = tmp_path_factory.mktemp("page")
    with ExitStack() as servers:
        yield lambda name, model, *flags: servers.enter_context(serve(model, directory / f"{name}.log", *flags))


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], tiny_checkpoint: Path) -> Server:
    """Qwen2.5-Omni with two vocoders, which asks for a key."""
    flags = ["--dtype=float32", "--enforce-eager", "--max-model-len=4096", "--skip-mm-profiling"]
    return start("qwen", tiny_checkpoint, *flags, "--stage=token2wav.replicas=2", f"--api-key={KEY}")


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    machine.require("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield browser
        browser.close()


class Window:
    """A window with the page.

    Attributes:
        errors: what the browser's console had of errors and warnings, and exceptions that nothing caught.
        hosts: that were asked for something.
    """

    def __init__(self, context: "BrowserContext", server: Server, key: str | None) -> None:
        self.server = server
        self.page: Page = context.new_page()
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda one: one.type in ("error", "warning") and self.errors.append(one.text))
        self.page.on("pageerror", lambda one: self.errors.append(str(one)))
        self.open_requests: set[str] = set()
        self.page.on("request", lambda one: self.open_requests.add(one.url))
        for end in ("requestfinished", "requestfailed"):
            self.page.on(end, lambda one: self.open_requests.discard(one.url))
        self.failed: list[str] = []
        self.page.on("requestfailed", lambda one: self.failed.append(f"{one.url}: {one.failure}"))
        self.page.on("request", lambda one: self.hosts.add(re.sub(r"^(https?://[^/]*|[a-z]+:).*", r"\1", one.url)))
        if key is not None:
            self.page.add_init_script(f"sessionStorage.setItem('omni.key', '{key}')")
        self.page.goto(server.url + "/omni")
        if key is not None:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        try:
            self.page.wait_for_selector("body[data-ready]")
        except Exception as exc:
            exc.add_note(f"status {self.page.inner_text('#status')!r}, {self.errors=}")
            exc.add_note(f"{self.failed=}, {self.open_requests=}")
            raise
        self.page.wait_for_selector("#status[data-kind=idle], #status[data-kind=busy]")

    def stats(self) -> Any:
        return self.page.evaluate("omni.stats")

    def set(self, group: str, name: str, value: object) -> None:
        self.open("settings")
        field = self.page.locator(f'[data-group="{group}"] label', has_text=re.compile(f"^{name}$")).locator("input")
        field.fill(str(value))
        field.press("Tab")

    def open(self, panel: str) -> None:
        tab = self.page.locator(f"#tab-{panel}")
        if tab.is_visible():
            tab.click()

    def ask(self, text: str) -> None:
        self.open("chat")
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def wait_for_answer(self, number: int = 1) -> str:
        """The text of the last answer, once there are so many."""
        done = self.page.locator(".message.assistant[aria-busy=false]")
        done.nth(number - 1).wait_for(timeout=90_000)
        return done.nth(number - 1).inner_text()

    def scrolls_sideways(self) -> bool:
        found: bool = self.page.evaluate("document.documentElement.scrollWidth > innerWidth")
        return found


@pytest.fixture
def open_window(browser: "Browser") -> Iterator[Callable[..., Window]]:
    """Opens windows; what they asked for came from their server alone, and they had no errors but those expected."""
    with ExitStack() as stack:
        windows: list[Window] = []

        def open_window(server: Server, key: str | None = KEY, **options: Any) -> Window:
            options = {"viewport": WIDE, "permissions": ["microphone", "camera"], **options}
            context = browser.new_context(**options)
            stack.callback(context.close)
            context.set_default_timeout(30_000)
            windows.append(Window(context, server, key))
            return windows[-1]

        yield open_window
        for window in windows:
            assert window.errors == []
            assert window.hosts <= {window.server.url, "data:", "blob:"}


@pytest.fixture
def window(open_window: Callable[..., Window], server: Server) -> Window:
    """With short answers: the tiny checkpoint never ends by itself."""
    window = open_window(server)
    window.set("stage thinker", "Max tokens", NUM_TOKENS)
    window.set("stage talker", "Max tokens", NUM_CODES)
    return window


# -- answers -----------------------------------------------------------------------------------------------------------


def test_text_appears_while_the_answer_streams(window: Window) -> None:
    window.ask("Tell me a story.")
    text = window.page.locator(".message.assistant[aria-busy=true] .text")
    text.filter(has_text=re.compile(".")).wait_for()
    assert window.page.locator("#stop").is_visible()
    answer = window.wait_for_answer()
    assert window.stats()["textPieces"] > NUM_TOKENS // 2
    assert f"{NUM_TOKENS} tokens" in answer


def test_speech_is_played_to_its_last_sample_while_it_streams(window: Window) -> None:
    window.ask("Tell me a story.")
    wait_for("sound before the end", lambda: window.stats()["audio"]["pieces"] > 0)
    answer = window.wait_for_answer()
    assert window.stats()["audio"]["pieces"] > 1
    wait_for("the end of the sound", lambda: window.stats()["audio"]["isOver"])
    audio = window.stats()["audio"]
    assert (audio["played"], audio["buffered"], audio["rate"]) == (NUM_SAMPLES, 0, RATE)
    # The audio thread's own clock ran for the sound and the silence between late pieces.
    assert audio["time"] >= (NUM_SAMPLES + audio["silent"]) / RATE
    assert "first audio" in answer
    assert window.page.locator(".message.assistant audio").count() == 1  # to play it again


def test_a_text_is_spoken(window: Window) -> None:
    window.page.check("input[value=speech]")
    window.ask("One two three.")
    window.wait_for_answer()
    wait_for("the end of the sound", lambda: window.stats()["audio"]["isOver"])
    assert window.stats()["audio"]["played"] == NUM_SAMPLES


def test_a_recording_and_a_picture_of_the_camera_are_sent(window: Window) -> None:
    window.page.click("#microphone")
    window.page.wait_for_timeout(600)  # a sound must have a length
    window.page.click("#microphone")
    window.page.locator(".chip").wait_for()
    window.page.click("#camera-button")
    wait_for("the camera", lambda: window.page.evaluate("document.getElementById('camera').videoWidth") > 0)
    window.page.click("text=Take the picture")
    window.page.locator(".chip").nth(1).wait_for()
    window.ask("What is this?")
    assert f"{NUM_TOKENS} tokens" in window.wait_for_answer()
    assert window.page.locator(".message.user img, .message.user audio").count() == 2


def test_a_file_of_a_kind_that_the_model_does_not_read_is_rejected(window: Window) -> None:
    window.page.set_input_files("#files", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"notes"})
    assert "image, audio, video" in window.page.locator("#log .error").inner_text()
    assert window.page.locator(".chip").count() == 0


def test_escape_stops_the_answer_in_every_stage(window: Window) -> None:
    window.set("stage talker", "Max tokens", 3000)
    window.ask("Tell me a story.")
    wait_for("sound", lambda: window.stats()["audio"]["pieces"] > 0)
    window.page.keyboard.press("Escape")
    assert "stopped" in window.wait_for_answer()
    wait_for("the end of the request", lambda: state_of(window.server)["num_open_calls"] == 0)
    wait_for("silence", lambda: window.stats()["audio"]["isOver"])


def test_an_error_of_the_server_is_shown(window: Window) -> None:
    window.set("stage thinker", "Temperature", -1)
    window.ask("Hello.")
    assert "temperature" in window.wait_for_answer()
    assert "400" in window.errors.pop()  # the browser's own line for the answer


def state_of(server: Server) -> Any:
    import httpx

    return httpx.get(server.url + "/omni/state", headers={"Authorization": f"Bearer {KEY}"}).json()


# -- pipeline, timeline ------------------------------------------------------------------------------------------------


def test_the_graph_shows_the_stages_their_replicas_and_their_load(window: Window) -> None:
    window.set("stage talker", "Max tokens", 3000)  # the page asks for the load once a second
    window.open("pipeline")
    names = window.page.locator("#drawing .node .name").all_text_contents()
    assert names == ["thinker", "talker", "token2wav"]
    assert window.page.locator("#drawing .replica").count() == 4  # names and values of two
    engines = window.page.locator("#engines th").all_inner_texts()
    assert engines == ["thinker", "talker", "token2wav/0", "token2wav/1"]
    window.ask("Tell me a story.")
    window.page.locator("#drawing .node[data-busy=true]").first.wait_for()
    talker = window.page.locator("#engines tr", has_text="talker").first
    wait_for("the talker's throughput", lambda: re.search(r"[1-9][\d.]* tok/s", talker.inner_text()) is not None)
    window.page.keyboard.press("Escape")
    window.wait_for_answer()
    assert "MiB" in talker.inner_text() or "GiB" in talker.inner_text()


def test_the_timeline_shows_the_spans_of_the_request(window: Window) -> None:
    window.ask("Tell me a story.")
    window.wait_for_answer()
    window.page.locator(".message.assistant").get_by_text("Timeline").click()
    window.page.wait_for_selector("#trace rect.span.stage")
    tracks = window.page.locator("#trace text.track title").all_text_contents()
    assert {"request", "thinker", "talker", "played here"} <= set(tracks)
    assert window.page.locator("#trace rect.edge").count() >= 2
    assert window.page.locator("#trace rect.played").count() > 1
    marks = " ".join(window.page.locator("#marks li").all_inner_texts())
    assert "first text after" in marks and "first audio after" in marks and "in playback" in marks
    window.page.locator("#trace rect.stage[aria-label^=talker]").first.focus()
    assert "output tokens" in window.page.inner_text("#span")


# -- the window --------------------------------------------------------------------------------------------------------


def test_the_page_asks_for_the_key_and_asks_again_for_a_wrong_one(
    open_window: Callable[..., Window], server: Server
) -> None:
    window = open_window(server, key=None)
    window.page.wait_for_selector("#key-dialog[open]")
    assert window.errors == []
    window.page.fill("#key", "wrong")
    window.page.press("#key", "Enter")
    window.page.wait_for_selector("#key-wrong:visible")
    assert "401" in window.errors.pop()  # the browser's own line for the answer
    window.page.fill("#key", KEY)
    window.page.press("#key", "Enter")
    window.wait_until_ready()
    assert window.page.inner_text("#model") == "tiny"


def test_a_script_that_does_not_come_is_reported(open_window: Callable[..., Window], server: Server) -> None:
    window = open_window(server, key=None)
    window.page.route("**/layout.js", lambda route: route.abort())
    window.page.reload()
    window.page.locator("#status[data-kind=down]", has_text="reload the page").wait_for()
    window.errors.clear()


def test_a_narrow_window_never_scrolls_sideways(open_window: Callable[..., Window], server: Server) -> None:
    window = open_window(server, viewport=NARROW)
    window.set("stage thinker", "Max tokens", NUM_TOKENS)
    window.set("stage talker", "Max tokens", 25)
    window.ask("Tell me a story. " + "w" * 200)
    window.wait_for_answer()
    for panel in ("chat", "pipeline", "timeline", "settings"):
        window.open(panel)
        window.page.wait_for_selector(f"#panel-{panel}:visible")
        window.page.wait_for_timeout(300)  # drawings follow the size of their panel
        assert not window.scrolls_sideways(), panel


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_colours_of_the_system(
    open_window: Callable[..., Window], server: Server, scheme: str
) -> None:
    window = open_window(server, color_scheme=scheme)
    colour = window.page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", colour)[:3])) / 3
    assert (brightness < 80) == (scheme == "dark"), colour


def test_everything_can_be_reached_by_the_keyboard(window: Window) -> None:
    window.open("pipeline")
    window.page.focus("#text")
    focused: list[str] = []
    for _ in range(60):
        window.page.keyboard.press("Tab")
        focused.append(window.page.evaluate("document.activeElement.id || document.activeElement.className.baseVal"))
    assert {"attach", "microphone", "camera-button", "voice", "send", "clear", "tab-pipeline", "log", "node"} <= set(
        focused
    )
    window.page.focus("#tab-pipeline")
    window.page.keyboard.press("ArrowRight")
    assert window.page.locator("#panel-timeline").is_visible()
    window.page.focus("#text")
    window.page.keyboard.type("one")
    window.page.keyboard.press("Shift+Enter")
    window.page.keyboard.type("two")
    assert window.page.input_value("#text") == "one\ntwo"


# -- other models ------------------------------------------------------------------------------------------------------


NOTE_ADDED = """() => {
  window.added = new Set();
  new MutationObserver((changes) => {
    for (const one of document.querySelectorAll(".message.assistant .sketch, .message.assistant progress"))
      window.added.add(`${one.tagName}.${one.className}`);
  }).observe(document.body, {childList: true, subtree: true});
}"""
"""What is there for a moment only: the observer is called after each change."""


def test_an_image_is_shown_after_its_previews(
    open_window: Callable[..., Window], start: Callable[..., Server], tiny_pipeline: Callable[[str], Path]
) -> None:
    window = open_window(start("image", tiny_pipeline("qwen-image"), f"--api-key={KEY}"))
    window.set("image", "Num inference steps", 40)
    window.set("image", "Size", "64x64")
    window.page.evaluate(NOTE_ADDED)
    window.ask("A cat.")
    window.wait_for_answer()
    assert window.page.evaluate("[...window.added].sort()") == ["IMG.sketch", "PROGRESS."]
    picture = window.page.locator(".message.assistant img")
    assert picture.count() == 1
    assert picture.evaluate("(one) => [one.naturalWidth, one.naturalHeight]") == [64, 64]


def test_a_video_is_made_as_a_job(
    open_window: Callable[..., Window], start: Callable[..., Server], tiny_pipeline: Callable[[str], Path]
) -> None:
    window = open_window(start("video", tiny_pipeline("wan2.2-t2v"), f"--api-key={KEY}"))
    window.set("video", "Num inference steps", 4)
    window.set("video", "Size", "64x64")
    window.set("video", "Num frames", 9)
    window.ask("A tram.")
    window.wait_for_answer()
    video = window.page.locator(".message.assistant video")
    wait_for("the film's head", lambda: video.evaluate("(one) => one.videoWidth") == 64)
