"""The page in a real browser: clicks, keys, a phone, broken pictures, and no request that leaves the machine."""

import contextlib
import functools
import http.server
import io
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from PIL import Image
from rich.console import Console

from inlinevit.explore.command import listen
from inlinevit.explore.explorer import Explorer
from inlinevit.explore.server import create_app
from inlinevit.explore.site import write_site
from tests.explore.test_server import huge_png, png_bytes

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
    # One browser for all tests of the file, in one worker.
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def address(explorer: Explorer) -> Iterator[str]:
    """The explorer, served by a thread."""
    listening = listen("127.0.0.1", 0)
    config = uvicorn.Config(create_app(explorer), log_level="warning", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture(scope="module")
def site(explorer: Explorer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The static explorer, served by Python's own web server from a subfolder."""
    folder = tmp_path_factory.mktemp("www")
    write_site(explorer, folder / "some" / "where", [0, 1], Console(quiet=True))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/some/where/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """A page that has shown its first picture. At the end: no errors, and no request to anywhere else."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page = context.new_page()
    problems: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    context.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    page.wait_for_selector("body[data-ready]", timeout=60_000)
    yield page
    origin = address[: address.index("/", 8) + 1]
    assert [url for url in requests if not url.startswith((origin, "blob:"))] == []
    # The browser itself reports answers such as 400 as errors.
    assert [problem for problem in problems if "the server responded with a status of 4" not in problem] == []
    context.close()


def wait(page: Any, act: Any) -> None:
    """Do something, and wait until its rows are drawn."""
    before = page.evaluate("document.body.dataset.ready")
    act()
    page.wait_for_function("before => document.body.dataset.ready !== before", arg=before)


def query(page: Any) -> str:
    return page.inner_text("#query-text")


def titles(page: Any) -> list[str]:
    return page.locator(".map-title").all_inner_texts()


def click_patch(page: Any, selector: str, row: int, column: int, size: int = 6) -> None:
    box = page.locator(selector).first.bounding_box()
    x, y = ((place + 0.5) / size * box["width"] for place in (column, row))
    wait(page, lambda: page.locator(selector).first.click(position={"x": x, "y": y}))


def drop(page: Any, name: str, content: bytes) -> None:
    """Choose a file in the page, and wait for its result or a message."""
    title = page.evaluate("document.body.dataset.ready")
    page.set_input_files("#file", {"name": name, "mimeType": "image/png", "buffer": content})
    page.wait_for_function(
        "before => document.body.dataset.ready !== before || !document.getElementById('message').hidden", arg=title
    )


def test_clicks(browser, address):
    with opened(browser, address) as page:
        assert titles(page) == ["softmax", "linear", "InLine"]
        assert "random" in page.inner_text("#notice")
        click_patch(page, "#picture-canvas", 1, 4)
        assert query(page) == "Query: row 2 of 6, column 5 of 6"
        click_patch(page, ".map-canvas", 3, 0)
        assert query(page) == "Query: row 4 of 6, column 1 of 6"
        box = page.locator(".map-canvas").nth(2).bounding_box()
        page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 0.25 * box["height"])
        for text in page.locator(".map-probe").all_inner_texts():
            assert text.startswith("row 2, column 5: ")
        near = page.locator(".map-probe").nth(2)
        page.mouse.move(box["x"] + 1, box["y"] + 3.5 / 6 * box["height"])
        assert "attention" in near.inner_text()
        assert "local" in near.inner_text()
        page.uncheck("#local")
        assert "local" not in near.inner_text()
        wait(page, lambda: page.select_option("#view", "kinds-1"))
        assert titles(page) == ["softmax", "linear", "InLine"]
        assert page.locator(".badge:visible").count() == 1
        page.select_option("#head", "1")
        assert "head 2 of 2" in page.locator(".map-subtitle").first.inner_text()
        page.wait_for_selector("#locality svg rect.current")
        assert page.locator("#locality svg rect.current").get_attribute("data-layer") == "0"
        wait(page, lambda: page.click("#layer-up"))
        page.wait_for_selector('#locality svg rect.current[data-layer="1"]')
        page.click("#sides >> text=3×3")
        page.wait_for_selector("#predictions >> text=3×3 hidden")
        assert page.locator("#predictions tbody tr").count() == 3
        wait(page, lambda: page.click("#samples button >> nth=1"))
        assert page.get_attribute("#samples button >> nth=1", "aria-pressed") == "true"


def test_maps_show_the_weights(browser, address, explorer):
    """The numbers of the page are those of the explorer, and signs are colours: orange above blue."""
    with opened(browser, address) as page:
        wait(page, lambda: page.select_option("#view", "kinds-2"))
        click_patch(page, "#picture-canvas", 2, 2)
        page.mouse.move(0, 0)
        colors = page.evaluate(
            """() => [...document.querySelectorAll('.map-legend')].map((canvas) => {
                 const {data} = canvas.getContext('2d').getImageData(0, 2, canvas.width, 1);
                 return [[...data.slice(0, 3)], [...data.slice(-4, -1)]];
               })"""
        )
        for negative, positive in colors:
            assert negative[2] > negative[0]
            assert positive[0] > positive[2]
        assert all(text.startswith("query itself: ") for text in page.locator(".map-probe").all_inner_texts())
        assert page.locator(".map-facts").first.inner_text().count("confused queries") == 1


def test_keys(browser, address):
    with opened(browser, address) as page:
        page.focus("#picture")
        before = query(page)
        assert before == "Query: row 4 of 6, column 4 of 6"
        wait(page, lambda: page.keyboard.press("ArrowLeft"))
        wait(page, lambda: page.keyboard.press("ArrowUp"))
        assert query(page) == "Query: row 3 of 6, column 3 of 6"
        page.keyboard.press("Shift+ArrowRight")
        assert page.locator(".map-probe").first.inner_text().startswith("row 3, column 4: ")
        wait(page, lambda: page.keyboard.press("]"))
        assert page.inner_text("#layer-text") == "2 of 2"
        wait(page, lambda: page.keyboard.press("["))
        assert page.inner_text("#layer-text") == "1 of 2"
        page.keyboard.press("h")
        assert page.input_value("#head") == "0"
        page.keyboard.press("Shift+H")
        assert page.input_value("#head") == "-1"
        for key, name in (("l", "local"), ("u", "uniform"), ("s", "same")):
            checked = page.is_checked(f"#{name}")
            page.keyboard.press(key)
            assert page.is_checked(f"#{name}") != checked
        wait(page, lambda: page.keyboard.press("m"))
        assert page.input_value("#view") == "kinds-0"
        wait(page, lambda: page.keyboard.press("n"))
        assert page.get_attribute("#samples button >> nth=1", "aria-pressed") == "true"
        page.keyboard.press("?")
        assert page.is_visible("#help")
        page.keyboard.press("Escape")
        assert not page.is_visible("#help")
        # Everything can be reached, and shows that it has the focus.
        wait(page, lambda: page.select_option("#view", "models"))
        page.evaluate("document.activeElement.blur()")
        seen = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            seen.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
        assert {"help-button", "picture", "file", "view", "layer", "head", "local", "uniform", "same"} <= seen
        page.focus("#picture")
        page.keyboard.press("ArrowDown")
        assert page.evaluate("getComputedStyle(document.getElementById('picture')).outlineStyle") == "solid"
        assert "Query row" in page.inner_text("#status")
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll('button, select, input, canvas[role], [role=application]')].filter(
                 (one) => !(one.ariaLabel || one.textContent.trim() || one.labels?.length)).map((one) => one.id)"""
        )
        assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(browser, address, scheme):
    options = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "color_scheme": scheme}
    with opened(browser, address, **options) as page:
        page.wait_for_selector("#locality svg")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390
        box = page.locator("#picture-canvas").bounding_box()
        wait(page, lambda: page.touchscreen.tap(box["x"] + 5, box["y"] + 5))
        assert query(page) == "Query: row 1 of 6, column 1 of 6"
        maps = [page.locator(".map-canvas").nth(index).bounding_box() for index in range(3)]
        assert all(100 < one["width"] < 200 for one in maps)
        assert maps[0]["y"] == maps[1]["y"]
        smallest = page.evaluate(
            """() => Math.min(...[...document.querySelectorAll('body *')].filter((one) => one.innerText?.trim())
                 .map((one) => parseFloat(getComputedStyle(one).fontSize)))"""
        )
        assert smallest >= 11
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness = sum(int(part) for part in background[4:-1].split(","))
        assert (lightness < 200) == (scheme == "dark")


def test_pictures_that_cannot_be_used(browser, address):
    with opened(browser, address) as page:
        before = query(page)
        for name, content, sentence in (
            ("broken.png", png_bytes()[:60], "broken.png cannot be used ("),
            (
                "notes.txt",
                b"just text",
                "notes.txt cannot be used (it is not an image): choose a JPEG, PNG, WebP or TIFF",
            ),
            ("huge.png", huge_png(), "huge.png has 200 megapixels, more than the limit of 50: make it smaller"),
        ):
            drop(page, name, content)
            assert page.inner_text("#message-text").startswith(sentence)
            page.click("#message-close")
            assert not page.is_visible("#message")
        # Dropped onto the page, and refused before it is sent.
        page.evaluate(
            """() => {
                 const dataTransfer = new DataTransfer();
                 dataTransfer.items.add(new File([new Uint8Array(2 ** 25 + 1)], 'large.png'));
                 window.dispatchEvent(new DragEvent('drop', {dataTransfer, cancelable: true}));
               }"""
        )
        page.wait_for_selector("#message:visible")
        assert page.inner_text("#message-text") == "large.png is larger than 32 MB: choose a smaller picture."
        # The page goes on with the picture that it had.
        click_patch(page, "#picture-canvas", 0, 0)
        assert query(page) != before
        buffer = io.BytesIO()
        Image.effect_noise((300, 200), 80).save(buffer, "JPEG")
        drop(page, "noise.jpg", buffer.getvalue())
        assert not page.is_visible("#message")
        assert page.locator('#samples button[aria-pressed="true"]').count() == 0


def test_a_picture_of_another_window(browser, address):
    with opened(browser, address) as page, opened(browser, address) as other:
        wait(other, lambda: other.click("#samples button >> nth=1"))
        page.focus("#picture")
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector("#message:visible")
        assert "Another picture was opened since" in page.inner_text("#message-text")
        wait(page, lambda: page.click("#samples button >> nth=0"))
        assert not page.is_visible("#message")


def test_the_static_site(browser, site):
    with opened(browser, site) as page:
        assert not page.is_visible("#opener")
        assert page.locator("#samples button").count() == 2
        click_patch(page, "#picture-canvas", 1, 1)
        assert query(page) == "Query: row 2 of 6, column 2 of 6"
        wait(page, lambda: page.keyboard.press("ArrowRight"))
        assert query(page) == "Query: row 2 of 6, column 3 of 6"
        wait(page, lambda: page.select_option("#view", "kinds-2"))
        assert titles(page) == ["softmax", "linear", "InLine"]
        page.click("#sides >> text=5×5")
        page.wait_for_selector("#predictions >> text=5×5 hidden")
        page.wait_for_selector("#locality svg")
        wait(page, lambda: page.click("#samples button >> nth=1"))


def test_names_of_files_are_text(browser, address, tmp_path: Path):
    with opened(browser, address) as page:
        drop(page, "<img src=x onerror=alert(1)>.png", b"text")
        assert page.inner_text("#message-text").startswith("<img src=x onerror=alert(1)>.png cannot be used")
        assert page.locator("#message img").count() == 0
