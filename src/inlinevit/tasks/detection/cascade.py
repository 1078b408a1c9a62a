"""Cascade R-CNN: stages of torchvision's heads, each of which begins with the boxes that the one before has refined."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import clip_boxes_to_image

# What is matched, how finely boxes are coded and how much a loss counts, by stage.
IOU_THRESHOLDS = (0.5, 0.6, 0.7)
BOX_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
LOSS_WEIGHTS = (1.0, 0.5, 0.25)

Target = dict[str, Tensor]
Size = tuple[int, int]


class CascadeRoIHeads(nn.Module):
    """Heads in stages. With a single one of weight 1, it does what that stage alone would.

    Args:
        stages: Heads for boxes and masks; the last one's thresholds decide what is detected.
        loss_weights: How much the losses of each stage count.
    """

    def __init__(self, stages: Sequence[RoIHeads], loss_weights: Sequence[float] = LOSS_WEIGHTS) -> None:
        super().__init__()
        assert len(stages) == len(loss_weights)
        self.stages: Any = nn.ModuleList(stages)
        self.loss_weights = tuple(loss_weights)

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[Size],
        targets: list[Target] | None = None,
    ) -> tuple[list[Target], dict[str, Tensor]]:
        """As torchvision's heads: detections in evaluation, losses in training.

        Returns:
            boxes (n, 4), labels (n,), scores (n,) and masks (n, 1, 28, 28) of each image, and losses by name.
        """
        if self.training:
            assert targets is not None
            return [], self.losses(features, proposals, image_shapes, targets)
        return self.detect(features, proposals, image_shapes), {}

    def losses(
        self, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: list[Size], targets: list[Target]
    ) -> dict[str, Tensor]:
        """The losses of all stages, each on the boxes that the one before has refined."""
        losses: dict[str, Tensor] = {}
        for number, (stage, weight) in enumerate(zip(self.stages, self.loss_weights, strict=True)):
            proposals, matched, labels, box_targets = stage.select_training_samples(proposals, targets)
            logits, deltas = classify(stage, features, proposals, image_shapes)
            loss_class, loss_box = fastrcnn_loss(logits, deltas, labels, box_targets)
            # Masks are learned on the proposals that show an object.
            positive = [one > 0 for one in labels]
            boxes, objects = (
                [one[chosen] for one, chosen in zip(some, positive, strict=True)] for some in (proposals, matched)
            )
            masks, classes = ([target[name] for target in targets] for name in ("masks", "labels"))
            masks_found = mask_logits(stage, features, boxes, image_shapes)
            losses[f"loss_classifier_{number}"] = weight * loss_class
            losses[f"loss_box_reg_{number}"] = weight * loss_box
            losses[f"loss_mask_{number}"] = weight * maskrcnn_loss(masks_found, boxes, masks, classes, objects)
            proposals = refine(stage, logits, deltas, proposals, image_shapes, labels)
        return losses

    def detect(self, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: list[Size]) -> list[Target]:
        """Detections: the last stage's boxes, with scores and masks that are the means over all stages."""
        probabilities = []
        refined = proposals
        for stage in self.stages:
            proposals = refined
            logits, deltas = classify(stage, features, proposals, image_shapes)
            probabilities.append(logits.softmax(dim=-1))
            refined = refine(stage, logits, deltas, proposals, image_shapes)
        # The logarithms of probabilities are logits of theirs.
        mean_logits = torch.stack(probabilities).mean(dim=0).log()
        boxes, scores, labels = stage.postprocess_detections(mean_logits, deltas, proposals, image_shapes)
        masks_by_stage = [
            maskrcnn_inference(mask_logits(stage, features, boxes, image_shapes), labels) for stage in self.stages
        ]
        masks = [torch.stack(several).mean(dim=0) for several in zip(*masks_by_stage, strict=True)]
        names = ("boxes", "labels", "scores", "masks")
        return [dict(zip(names, one, strict=True)) for one in zip(boxes, labels, scores, masks, strict=True)]


def classify(
    stage: RoIHeads, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: list[Size]
) -> tuple[Tensor, Tensor]:
    """Logits (proposals, classes) and box codes (proposals, 4 · classes) of the proposals of all images."""
    return stage.box_predictor(stage.box_head(stage.box_roi_pool(features, proposals, image_shapes)))


def mask_logits(stage: RoIHeads, features: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[Size]) -> Tensor:
    """Masks (boxes, classes, 28, 28) of the boxes of all images."""
    return stage.mask_predictor(stage.mask_head(stage.mask_roi_pool(features, boxes, image_shapes)))


def refine(
    stage: RoIHeads,
    logits: Tensor,
    deltas: Tensor,
    proposals: list[Tensor],
    image_shapes: list[Size],
    labels: list[Tensor] | None = None,
) -> list[Tensor]:
    """The boxes that a stage makes of its proposals, within the image and without gradients.

    Of the boxes by class, that of the object's label is taken; without labels, that of the most probable class.
    """
    chosen = logits.detach()[:, 1:].argmax(dim=1) + 1
    if labels is not None:
        known = torch.cat(labels)
        chosen = torch.where(known > 0, known, chosen)
    decoded = stage.box_coder.decode(deltas.detach(), proposals).view(*logits.shape, 4)
    boxes = decoded[torch.arange(len(decoded), device=decoded.device), chosen]
    by_image = boxes.split([len(one) for one in proposals])
    return [clip_boxes_to_image(one, shape) for one, shape in zip(by_image, image_shapes, strict=True)]
