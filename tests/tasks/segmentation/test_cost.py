"""What models that label pixels cost: against published figures, and the catalog measured again."""

import pytest

from inlinevit.tasks.segmentation.cost import SEGMENTER_CATALOG, measure_facts


@pytest.mark.parametrize("name", ["inline_pvt_tiny", "swin_tiny_patch4_window7_224"])
def test_the_catalog_is_measured(name: str) -> None:
    assert measure_facts(name) == SEGMENTER_CATALOG[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", SEGMENTER_CATALOG)
def test_all_of_the_catalog_is_measured(name: str) -> None:
    assert measure_facts(name) == SEGMENTER_CATALOG[name]


def test_each_inline_backbone_stands_above_its_counterpart() -> None:
    names = list(SEGMENTER_CATALOG)
    assert len(names) == 20
    for inline, softmax in zip(names[::2], names[1::2], strict=True):
        assert inline.startswith("inline_")
        assert softmax.startswith(inline.removeprefix("inline_"))
        ours, theirs = SEGMENTER_CATALOG[inline], SEGMENTER_CATALOG[softmax]
        assert ours["gmacs"] < theirs["gmacs"]
        assert ours["upernet_gmacs"] < theirs["upernet_gmacs"]
