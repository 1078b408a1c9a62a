"""Detectors: torchvision's Mask R-CNN, and its cascade, on the backbones of timm's registry."""

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign

from ..backbone import backbone_no_weight_decay, build_on_backbone, mean_and_std, set_backbone_grad_checkpointing
from ..pixels import MeanStd
from .cascade import BOX_WEIGHTS, IOU_THRESHOLDS, CascadeRoIHeads
from .config import DetectorConfig
from .pyramid import PyramidBackbone

ASPECT_RATIOS = (0.5, 1.0, 2.0)
# Sides of the pooled regions for boxes and for masks.
BOX_REGION, MASK_REGION = 7, 14
MASK_LAYERS = 4
POSITIVE_SHARE = 0.25
# Where the weights of a whole detector differ from those of a backbone.
BODY = "backbone.body."
# Layers of the heads whose width is the number of categories.
BY_CLASS = ("cls_score", "box_predictor.bbox_pred", "mask_fcn_logits")


class DetectorTransform(GeneralizedRCNNTransform):
    """torchvision's way from images to a batch and back, which can leave masks at the size of the heads, 28 × 28."""

    paste_masks = True

    def postprocess(
        self, result: list[dict[str, Tensor]], image_shapes: list[tuple[int, int]], original: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        """Detections in the coordinates of the images as they were given."""
        small = [] if self.paste_masks else [one.pop("masks") for one in result]
        result = super().postprocess(result, image_shapes, original)
        for one, masks in zip(result, small, strict=False):
            one["masks"] = masks
        return result


class ClassAgnosticPredictor(FastRCNNPredictor):
    """Scores by class (with background), and one box for all of them."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes)
        self.num_classes = num_classes
        self.bbox_pred = nn.Linear(in_channels, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Regions (n, channels) to logits (n, classes) and the same box code for each class, (n, 4 · classes)."""
        logits, deltas = super().forward(x)
        return logits, deltas.repeat(1, self.num_classes)


def full_precision(head: nn.Module) -> nn.Module:
    """Have a head of torchvision return float32 even under autocast: half precision is too coarse for boxes."""
    head.register_forward_hook(_to_float32)
    return head


def _to_float32(module: nn.Module, args: Any, output: Any) -> Any:
    return tree_map(Tensor.float, output)


class PyramidRCNN(MaskRCNN):
    """Mask R-CNN on a feature pyramid, with heads of one stage or in a cascade.

    Args:
        backbone: The pyramid.
        config: The heads, and which detections are returned.
        num_classes: Categories, without background.
        mean_std: What images are normalised by; None = what the backbone was made for.
    """

    def __init__(
        self, backbone: PyramidBackbone, config: DetectorConfig, num_classes: int, mean_std: MeanStd | None = None
    ) -> None:
        anchors = [config.anchor_size * 2**level for level in range(5)]
        heads = make_heads(config, num_classes)
        super().__init__(
            backbone,
            rpn_anchor_generator=AnchorGenerator(tuple((side,) for side in anchors), (ASPECT_RATIOS,) * len(anchors)),
            rpn_head=full_precision(RPNHead(config.channels, len(ASPECT_RATIOS))),
            box_head=heads.box_head,
            box_predictor=heads.box_predictor,
            mask_head=heads.mask_head,
            mask_predictor=heads.mask_predictor,
        )
        self.roi_heads = (
            heads
            if config.arch == "mask_rcnn"
            else CascadeRoIHeads([heads, *(make_heads(config, num_classes, stage) for stage in (1, 2))])
        )
        mean, std = map(list, mean_std or mean_and_std(config))
        # Training images are resized by the augmentation.
        self.transform = DetectorTransform(config.min_size, config.max_size, mean, std, _skip_resize=True)

    def forward(
        self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None, *, paste_masks: bool = True
    ) -> Any:
        """As torchvision's; without `paste_masks`, masks are (objects, 1, 28, 28), for paste_masks_in_image."""
        self.transform.paste_masks = paste_masks
        return super().forward(images, targets)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the backbone's activations twice instead of keeping them."""
        set_backbone_grad_checkpointing(self.backbone.body, enable)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that should not decay."""
        return {f"{BODY}{name}" for name in backbone_no_weight_decay(self.backbone.body)}

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the backbone; what comes after it depends on how many objects there are."""
        self.backbone.compile(*args, **kwargs)


def make_heads(config: DetectorConfig, num_classes: int, stage: int = 0) -> RoIHeads:
    """Return the heads of one stage of a cascade; the first stage is that of Mask R-CNN."""
    predictor = ClassAgnosticPredictor if config.class_agnostic_boxes else FastRCNNPredictor
    threshold, levels = IOU_THRESHOLDS[stage], ["0", "1", "2", "3"]
    return RoIHeads(
        box_roi_pool=MultiScaleRoIAlign(levels, BOX_REGION, sampling_ratio=2),
        box_head=TwoMLPHead(config.channels * BOX_REGION**2, config.box_channels),
        box_predictor=full_precision(predictor(config.box_channels, num_classes + 1)),
        fg_iou_thresh=threshold,
        bg_iou_thresh=threshold,
        batch_size_per_image=config.box_batch_size_per_image,
        positive_fraction=POSITIVE_SHARE,
        bbox_reg_weights=BOX_WEIGHTS[stage],
        score_thresh=config.box_score_thresh,
        nms_thresh=config.box_nms_thresh,
        detections_per_img=config.box_detections_per_img,
        mask_roi_pool=MultiScaleRoIAlign(levels, MASK_REGION, sampling_ratio=2),
        mask_head=MaskRCNNHeads(config.channels, (config.channels,) * MASK_LAYERS, 1),
        mask_predictor=full_precision(MaskRCNNPredictor(config.channels, config.channels, num_classes + 1)),
    )


def mask_rcnn(backbone: str, num_classes: int, **options: Any) -> PyramidRCNN:
    """Mask R-CNN on a backbone of ours or of timm's.

    Args:
        backbone: What timm calls it; it gives features at strides 4, 8, 16 and 32.
        num_classes: Categories, without background; labels are from 1 on.
        **options: Further fields of DetectorConfig.
    """
    return build_detector(DetectorConfig(arch="mask_rcnn", backbone=backbone, **options), num_classes)


def cascade_mask_rcnn(backbone: str, num_classes: int, **options: Any) -> PyramidRCNN:
    """Cascade Mask R-CNN, with three stages; arguments as for mask_rcnn."""
    return build_detector(DetectorConfig(arch="cascade_mask_rcnn", backbone=backbone, **options), num_classes)


def build_detector(config: DetectorConfig, num_classes: int, mean_std: MeanStd | None = None) -> PyramidRCNN:
    """Build a detector; see PyramidRCNN for arguments, and build_on_backbone() for errors."""

    def assemble(body: nn.Module) -> PyramidRCNN:
        backbone = PyramidBackbone(body, config.channels, frozen_stages=config.frozen_stages)
        return PyramidRCNN(backbone, config, num_classes, mean_std)

    return build_on_backbone(config, assemble, prefix=BODY, by_class=BY_CLASS)
