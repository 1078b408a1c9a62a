"""Classify images with ONNX Runtime, without torch: python classify_onnx.py model.onnx photo.jpg ..."""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1])
metadata = json.loads(session.get_modelmeta().custom_metadata_map["inlinevit"])
spec = metadata["preprocessing"]
mean, std = (np.array(spec[name], np.float32).reshape(-1, 1, 1) for name in ("mean", "std"))


def to_input(path):
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB" if len(mean) == 3 else "L")
    size, shorter = spec["size"], int(spec["size"] / spec["crop_pct"])
    width, height = (int(shorter * side / min(image.size)) for side in image.size)
    image = image.resize((width, height), Image.Resampling[spec["interpolation"].upper()])
    left, top = round((width - size) / 2), round((height - size) / 2)
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), np.float32).reshape(size, size, -1)
    return (pixels.transpose(2, 0, 1) / 255 - mean) / std


for path in sys.argv[2:]:
    (logits,) = session.run(None, {"images": to_input(path)[None]})[0]
    probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    print(path, metadata["classes"][logits.argmax()], f"{probabilities.max():.4f}")
