"""Detectors as candidates: what makes them comparable, and what is counted."""

from copy import deepcopy

import pytest
import torch

from inlinevit.benchmark import machine
from inlinevit.benchmark.detectors import OBJECTS, count_flops, detector_comparisons
from inlinevit.benchmark.measure import Conditions, measure
from inlinevit.benchmark.workload import nominal_flops
from inlinevit.tasks.detection.cost import BOXES, MASKS, detector_cost, stages_of

CPU = torch.device("cpu")
SMALL = "depths=[1,1,1,1],embed_dims=[8,8,8,8],num_heads=[1,1,1,1],mlp_ratios=[1,1,1,1]"
INLINE, SOFTMAX = f"inline_pvt_tiny:{SMALL}", f"pvt_tiny:{SMALL},sr_ratios=[1,1,1,1]"


@pytest.fixture(autouse=True)
def small_heads(monkeypatch):
    """Fast matrix products and small heads."""
    from inlinevit.benchmark import detectors

    def config(**options):
        return DetectorConfig(**options, channels=4, box_channels=4, box_batch_size_per_image=32)

    DetectorConfig = detectors.DetectorConfig
    monkeypatch.setattr(detectors, "DetectorConfig", config)
    monkeypatch.setattr(machine, "GEMM_SIDE", 8)


def seen_regions(detector):
    """Return a list that is filled with the number of regions of each head."""
    seen = []
    for stage in stages_of(detector):
        for head in (stage.box_head, stage.mask_head):
            head.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    return seen


@pytest.mark.parametrize(("kind", "backbone"), [("mask_rcnn", INLINE), ("cascade_mask_rcnn", SOFTMAX)])
def test_all_heads_see_as_many_regions_as_are_counted(kind, backbone):
    (comparison,) = detector_comparisons([backbone], [kind], 64, 96)
    module, image = comparison.candidates[0].make(CPU)
    seen = seen_regions(module.detector)
    with torch.no_grad():
        outputs = module.eval()(image)
    stages = len(stages_of(module.detector))
    assert sorted(seen) == [MASKS] * stages + [BOXES] * stages
    assert [len(part) for part in outputs] == [MASKS] * 4


def test_training_has_losses_and_masks_of_all_objects():
    (comparison,) = detector_comparisons([INLINE], ["mask_rcnn"], 64, 96)
    module, image = comparison.candidates[0].make(CPU)
    seen = seen_regions(module.detector)
    losses = module.train()(image)
    assert all(loss.shape == () and loss.isfinite() for loss in losses)
    assert seen[0] == 32
    # A quarter of the regions may show objects.
    assert seen[1] == OBJECTS


def test_the_same_weights_and_images_each_time():
    (comparison,) = detector_comparisons([INLINE], ["mask_rcnn"], 64, 96)
    state = torch.random.get_rng_state()
    (module, image), (again, same) = (comparison.candidates[0].make(CPU) for _ in range(2))
    assert torch.equal(image, same)
    assert all(torch.equal(one, other) for one, other in zip(module.parameters(), again.parameters(), strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_images_with_too_few_regions_are_refused():
    (comparison,) = detector_comparisons([INLINE], ["mask_rcnn"], 32, 32)
    module, image = comparison.candidates[0].make(CPU)
    with pytest.raises(ValueError, match="use larger images"), torch.no_grad():
        module.eval()(image)


def test_operations_are_those_of_the_whole_detector():
    (comparison,) = detector_comparisons([INLINE], ["mask_rcnn"], 64, 96)
    module, image = comparison.candidates[0].make(CPU)
    detector = deepcopy(module.detector).to("meta")
    assert count_flops(module.eval(), image) == 2e9 * detector_cost(detector, (64, 96))[1]
    assert nominal_flops(module, image, count_flops) == count_flops(module, image)
    assert count_flops(module.train(), image) == 2e9 * detector_cost(detector, (64, 96), boxes=32, masks=OBJECTS)[1]


@pytest.mark.integration
@pytest.mark.parametrize("backward", [False, True])
def test_detectors_are_measured_side_by_side(backward):
    comparisons = detector_comparisons([INLINE, SOFTMAX], ["mask_rcnn"], 64, 96)
    results = measure(
        "detection", comparisons, ["eager"], Conditions(threads=1, rounds=2, patience=0.1, backward=backward)
    )
    assert [one.name for one in results.measurements] == [INLINE, SOFTMAX]
    for one in results.measurements:
        assert (one.size, one.width, one.batch) == (64, 96, 1)
        assert one.memory > 0
    inline, softmax = results.measurements
    assert inline.flops < softmax.flops
