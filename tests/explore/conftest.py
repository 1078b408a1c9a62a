"""Small models, without weights to download, and the web application of them."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from starlette.testclient import TestClient

from inlinevit.explore.explorer import Explorer
from inlinevit.explore.server import create_app
from inlinevit.explore.subjects import Subject, open_subjects

SMALL = "embed_dim=32,depth=2,num_heads=2"
OWN_PAGE = {"x-inlinevit": "1"}


def small_subjects(*models: str, img_size: int = 96) -> list[Subject]:
    """Models with random weights that are large enough for rows to differ."""
    with pytest.warns(UserWarning, match="random"):
        subjects = open_subjects(models, img_size=img_size)
    for subject in subjects:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            for name, parameter in subject.predictor.model.named_parameters():
                if "qkv.weight" in name:
                    parameter.copy_(0.3 * torch.randn_like(parameter))
    return subjects


@pytest.fixture(scope="session")
def subjects() -> list[Subject]:
    names = ("softmax", "linear", "inline")
    return small_subjects(*(f"inline_deit_tiny:attention={name},{SMALL}" for name in names))


@pytest.fixture(scope="session")
def explorer(subjects: list[Subject]) -> Explorer:
    return Explorer(subjects)


@pytest.fixture
def client(subjects: list[Subject]) -> Iterator[TestClient]:
    # Each test has an explorer of its own, without the image of another test.
    app = create_app(Explorer([dataclasses.replace(subject) for subject in subjects]))
    with TestClient(app, base_url="http://127.0.0.1:8123") as client:
        yield client
