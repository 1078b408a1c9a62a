"""The web application: what it answers, what it refuses, and whom."""

import base64
import io
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from inlinevit.explore.server import HEADERS, is_allowed_host, web_files
from tests.explore.conftest import OWN_PAGE


def png_bytes(width: int = 40, height: int = 30, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height), 128).save(buffer, "PNG")
    return buffer.getvalue()


def huge_png(width: int = 20_000, height: int = 10_000) -> bytes:
    """A PNG file of 200 megapixels that is small: one bit per pixel, all zero."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)

    header = width.to_bytes(4) + height.to_bytes(4) + bytes([1, 0, 0, 0, 0])
    pixels = zlib.compress(bytes((width // 8 + 1) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def upload(client, content: bytes, name: str = "cat.png", **headers: str):
    return client.post("/api/picture", content=content, headers={**OWN_PAGE, "x-file-name": name, **headers})


def test_the_page_and_its_files(client):
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    for name in web_files():
        answer = client.get(f"/web/{name}")
        assert answer.status_code == 200
        for header, value in HEADERS.items():
            assert answer.headers[header] == value
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert {"app.js", "data.js", "index.html", "style.css"} <= set(web_files())


@pytest.mark.parametrize(
    "path", ["/web/../server.py", "/web/%2e%2e%2fserver.py", "/web/__init__.py", "/web/no.js", "/x"]
)
def test_no_other_file_is_served(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-security-policy"] == HEADERS["content-security-policy"]


def test_the_state(client):
    state = client.get("/state.json").json()
    assert [model["label"] for model in state["models"]] == ["softmax", "linear", "InLine"]
    assert "random" in state["notice"]
    assert "--pretrained" in state["notice"]
    assert [sample["title"] for sample in state["samples"]] == ["shapes", "landscape", "repeated tiles"]


def test_a_sample_and_a_click(client, subjects):
    picture = client.post("/api/sample/0", headers=OWN_PAGE).json()
    assert [model["layers"][0]["attention"] for model in picture["models"]] == ["softmax", "linear", "inline"]
    assert picture["models"][2]["layers"][0] == {
        "name": "stages.0.blocks.0.attn", "attention": "inline", "size": [6, 6], "heads": 2, "local": True,
    }  # fmt: skip
    shown = Image.open(io.BytesIO(client.get(f"/{picture['models'][0]['picture']}").content))
    assert shown.size == (96, 96)
    address = f"/api/rows?image={picture['image']}&model=2&layer=1&row=2&column=3"
    answer = client.get(address).json()
    assert [(column["kind"], column["own"]) for column in answer["columns"]] == [
        ("softmax", False), ("linear", False), ("inline", True),
    ]  # fmt: skip
    for column in answer["columns"]:
        weights = np.frombuffer(base64.b64decode(column["weights"]), "<f4").reshape(2, 36)
        np.testing.assert_allclose(weights.sum(axis=1) + np.sum(column["prefix"], axis=1), 1, rtol=1e-4)
    assert len(answer["columns"][2]["local"]["places"]) == 9
    (own,) = client.get(f"{address}&own=1").json()["columns"]
    assert own == answer["columns"][2]
    locality = client.get(f"/api/locality?image={picture['image']}&model=0").json()
    assert len(locality["layers"]) == 2
    hidden = client.get(f"/api/hidden?image={picture['image']}&model=1&side=3").json()
    assert len(hidden["near"]) == len(hidden["random"]) == 5
    assert client.get("/api/sample/1.png").headers["content-type"] == "image/png"


def test_a_click_is_fast(explorer):
    picture = explorer.open_sample(0)
    explorer.rows(picture["image"], 2, 0, (1, 1))
    assert min(explorer.rows(picture["image"], 2, 1, (2, 3))["milliseconds"] for _ in range(5)) < 100


@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_uploads(client, mode):
    answer = upload(client, png_bytes(mode=mode), "a%20cat.png")
    assert answer.status_code == 200
    assert answer.json()["title"] == "a cat.png"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"just text\n", "cat.png cannot be used (it is not an image): choose a JPEG, PNG, WebP or TIFF picture"),
        (b"", "cat.png cannot be used (it is not an image)"),
        (png_bytes()[:60], "cat.png cannot be used ("),
        (png_bytes(1, 300), "cat.png cannot be used (it has 1 × 300 pixels, which show nothing"),
        (
            huge_png(),
            "cat.png has 200 megapixels, more than the limit of 50: make it smaller, or start with --max-pixels "
            "200000000 if you trust it",
        ),
    ],
    ids=["text", "empty", "broken", "thin", "200 megapixels"],
)
def test_pictures_that_cannot_be_used(client, content, sentence):
    before = client.post("/api/sample/0", headers=OWN_PAGE).json()
    answer = upload(client, content)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(sentence)
    # The image before it can still be explored.
    assert client.get(f"/api/rows?image={before['image']}&model=0&layer=0&row=0&column=0").status_code == 200


def test_names_are_one_line(client):
    error = upload(client, b"text", "a%0Ab%1b[31m" + "c" * 300).json()["error"]
    assert error.startswith("a?b?[31mccc")
    assert len(error) < 200


def test_large_uploads_are_refused(client, monkeypatch):
    monkeypatch.setattr("inlinevit.explore.server.MOST_UPLOAD_BYTES", 1000)
    answer = upload(client, bytes(1001))
    assert answer.status_code == 413
    assert "choose a smaller picture" in answer.json()["error"]

    def endless():
        yield from (bytes(500) for _ in range(10))

    answer = client.post("/api/picture", content=endless(), headers=OWN_PAGE)
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("/api/rows?image=1&model=9&layer=0&row=0&column=0", "there is no model 9"),
        ("/api/rows?image=1&model=0&layer=7&row=0&column=0", "there is no layer 7"),
        ("/api/rows?image=1&model=0&layer=0&row=6&column=0", "there is no query at (6, 0): the map has 6 × 6 tokens"),
        ("/api/rows?image=1&model=0&layer=0&row=-1&column=0", "row is '-1': it should be a whole number"),
        ("/api/rows?image=1", "model is '': it should be a whole number"),
        ("/api/hidden?image=1&model=0&side=4", "side is 4: choose one of [3, 5]"),
        (f"/api/locality?image=1&model={'1' * 40}", "model is '1111"),
    ],
)
def test_questions_that_make_no_sense(client, address, sentence):
    client.post("/api/sample/0", headers=OWN_PAGE)
    answer = client.get(address)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(sentence)


def test_a_sample_that_is_not_there(client):
    assert client.post("/api/sample/99", headers=OWN_PAGE).status_code == 400
    assert client.get("/api/sample/99.png").status_code == 400


def test_only_the_last_image_is_kept(client):
    first = client.post("/api/sample/0", headers=OWN_PAGE).json()["image"]
    client.post("/api/sample/1", headers=OWN_PAGE)
    answer = client.get(f"/api/rows?image={first}&model=0&layer=0&row=0&column=0")
    assert answer.status_code == 409
    assert "another picture was opened since" in answer.json()["error"]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8123"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "10.0.0.7:8123"},
        {"host": "[::1"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_requests_of_other_pages_are_refused(client, headers):
    for answer in (
        client.post("/api/sample/0", headers={**OWN_PAGE, **headers}),
        client.get("/state.json", headers=headers),
    ):
        assert answer.status_code == 403
        assert answer.headers["content-security-policy"] == HEADERS["content-security-policy"]


def test_posts_need_the_header_of_the_page(client):
    assert client.post("/api/sample/0").status_code == 403
    assert client.post("/api/picture", content=png_bytes()).status_code == 403
    own = {**OWN_PAGE, "origin": "http://127.0.0.1:8123", "sec-fetch-site": "same-origin"}
    assert client.post("/api/sample/0", headers=own).status_code == 200


def test_a_link_to_the_page_works(client):
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("header", "listening", "allowed"),
    [
        ("localhost:1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("[::1]:80", "::1", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("192.168.0.4:99", "0.0.0.0", True),
        ("192.168.0.4:99", "127.0.0.1", False),
        ("evil.example", "0.0.0.0", False),
        ("my-machine:80", "my-machine", True),
        ("other-machine:80", "my-machine", False),
    ],
)
def test_hosts(header, listening, allowed):
    assert is_allowed_host(header, listening) == allowed


def test_models_that_are_not_finite(client, subjects):
    from inlinevit.explore.explorer import top_classes

    assert top_classes(torch.tensor([1.0, torch.nan]), ["a", "b"]) == []
