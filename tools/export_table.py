"""Export models, check them at sizes that the recorded example did not have, and write the table of docs/export.md.

Each model is exported by a process of its own. Results are kept in .cache/export_table, so that an interrupted run
continues: `python tools/export_table.py` exports what is missing and writes the table of all results. It ends with an
error if a model could not be exported.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / ".cache" / "export_table"
PAGE = ROOT / "docs" / "export.md"
START, END = "<!-- export-table -->", "<!-- /export-table -->"
INLINE = (
    *(f"inline_deit_{size}" for size in ("tiny", "small", "base")),
    *(f"inline_pvt_{size}" for size in ("tiny", "small", "medium", "large")),
    *(f"inline_swin_{size}" for size in ("tiny", "small", "base", "base_384")),
    *(f"inline_cswin_{size}" for size in ("tiny", "small", "base", "base_384")),
)
SOFTMAX = (
    *(f"pvt_{size}" for size in ("tiny", "small", "medium", "large")),
    *(f"cswin_{size}" for size in ("tiny", "small", "base")),
)
SEGMENTATION = ("semantic_fpn:inline_pvt_tiny", "upernet:inline_swin_tiny")
MODELS = (*INLINE, *SOFTMAX, *SEGMENTATION)
HEADINGS = ("model", "inputs compared", "largest relative difference")
# Classes of ADE20K.
CLASSES, CROP = 150, 512


def export_one(name: str) -> dict[str, Any]:
    """Export a model with random weights, and return a row of the table."""
    import torch

    from inlinevit.export.command import ExportSettings, write_exported
    from inlinevit.export.source import open_source

    torch.manual_seed(0)
    arch, _, backbone = name.rpartition(":")
    source = open_source(backbone, checkpoint=None, features=False, untrained=True, static=None)
    if arch:
        source = segmentation_source(arch, backbone)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        parity = write_exported(source, file, ExportSettings()).parity
        assert parity is not None
    return {"model": name, "shapes": parity.shapes, "difference": parity.difference}


def segmentation_source(arch: str, backbone: str) -> Any:
    """Return a segmentation model with random weights for export."""
    from inlinevit.export.source import segmentation_source as make_source
    from inlinevit.tasks.segmentation.config import SegmentationConfig, SegmentationDataConfig, SegmenterConfig
    from inlinevit.tasks.segmentation.labels import LabelMap
    from inlinevit.tasks.segmentation.model import build_segmenter
    from inlinevit.tasks.segmentation.predictor import SegmentationPredictor, mean_and_std

    model = SegmenterConfig(arch=arch, backbone=backbone)  # type: ignore[arg-type]
    config = SegmentationConfig(model=model, data=SegmentationDataConfig(path="."))
    plain = {"classes": [{"name": str(index), "values": [index]} for index in range(1, CLASSES + 1)]}
    labels = LabelMap.from_plain(plain, "classes")
    segmenter = build_segmenter(model, CLASSES).eval()
    predictor = SegmentationPredictor(segmenter, arch, config, labels, mean_and_std(model, config.data))
    return make_source(predictor, None)


def make_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---|---|---|"]
    for row in rows:
        shapes = ", ".join("×".join(map(str, shape)) for shape in row["shapes"])
        lines.append(f"| {row['model']} | {shapes} | {row['difference']:.1e} |")
    return "\n".join(lines)


def write_table(table: str) -> None:
    """Replace what is between the markers of the page."""
    before, start, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"{PAGE} should have {START} and {END}")
    PAGE.write_text(f"{before}{START}\n\n{table}\n\n{END}{after}", encoding="utf-8")


def result_file(name: str) -> Path:
    """Return where the result of a model is kept."""
    return RESULTS / f"{name.replace(':', '-')}.json"


def main() -> None:
    """Export what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, help="all by default")
    parser.add_argument("--one", choices=MODELS, help="export this one here, and print its row as JSON")
    parser.add_argument("--no-page", action="store_true", help="keep the results, and do not write the table")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(export_one(options.one)))
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.models:
        if result_file(name).is_file():
            continue
        ended = subprocess.run([sys.executable, __file__, "--one", name], stdout=subprocess.PIPE, text=True)
        if ended.returncode:
            failed.append(name)
            continue
        result_file(name).write_text(ended.stdout.splitlines()[-1] + "\n", encoding="utf-8")
        print(ended.stdout.splitlines()[-1], flush=True)
    if not options.no_page:
        rows = [json.loads(result_file(name).read_text()) for name in MODELS if result_file(name).is_file()]
        missing = [name for name in MODELS if not result_file(name).is_file()]
        write_table(make_table(rows) + (f"\n\nNot recorded yet: {', '.join(missing)}." if missing else ""))
    if failed:
        raise SystemExit(f"not exported: {', '.join(failed)}")


if __name__ == "__main__":
    main()
