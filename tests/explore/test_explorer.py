"""What is asked while something else is computed."""

import threading
import time

import pytest

from inlinevit.explore import capture as capture_module
from inlinevit.explore import explorer as explorer_module
from inlinevit.explore.explorer import Explorer, StaleImageError

SECONDS = 30


@pytest.mark.parametrize("ending", ["another picture", "the end of the process"])
def test_clicks_and_pictures_do_not_wait_for_hidden_neighbourhoods(subjects, monkeypatch, ending):
    """They take seconds for large maps."""
    begun, raised = threading.Event(), []

    def endless(model, image, side, check):
        begun.set()
        for _ in range(100 * SECONDS):
            check()
            time.sleep(0.01)
        raise AssertionError("it was not ended")

    def ask() -> None:
        try:
            explorer.hidden(1, 0, 3)
        except Exception as error:
            raised.append(error)

    monkeypatch.setattr(explorer_module, "masked_logits", endless)
    explorer = Explorer(subjects)
    explorer.open_sample(0)
    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(SECONDS)
    assert explorer.rows(1, 0, 0, (2, 3))["query"] == [2, 3]
    assert asking.is_alive()
    if ending == "another picture":
        assert explorer.open_sample(1)["image"] == 2
    else:
        explorer.close()
    asking.join(SECONDS)
    assert [type(error) for error in raised] == [StaleImageError]


def test_hiding_is_not_offered_where_it_takes_minutes(subjects, monkeypatch):
    explorer = Explorer(subjects)
    assert explorer.open_sample(0)["models"][0]["sides"] == [3, 5]
    # Two layers with two heads of 36 tokens and a class token.
    monkeypatch.setattr(capture_module, "MOST_MASKED_WEIGHTS", 2 * 2 * 37 * 37)
    assert explorer.open_sample(0)["models"][0]["sides"] == [3, 5]
    monkeypatch.setattr(capture_module, "MOST_MASKED_WEIGHTS", 2 * 2 * 37 * 37 - 1)
    model = explorer.open_sample(0)["models"][0]
    assert model["sides"] == []
    assert model["no_sides"] == "its maps have so many tokens that hiding would take minutes"
