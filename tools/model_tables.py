"""Measure the models that `inlinevit models` lists, and write its stored tables: python tools/model_tables.py."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inlinevit.models import catalog
from inlinevit.tasks.detection import cost as detection
from inlinevit.tasks.segmentation import cost as segmentation


def main() -> None:
    """Write all tables. Accuracies and the names of models are taken from the present ones."""
    write(catalog.FILE, catalog.CATALOG, lambda name: asdict(catalog.measure_facts(name)))
    write(detection.FILE, detection.DETECTOR_CATALOG, detection.measure_facts)
    write(segmentation.FILE, segmentation.SEGMENTER_CATALOG, segmentation.measure_facts)


def write(file: Path, names: Iterable[str], measure: Callable[[str], Any]) -> None:
    """Write a table with one line for each model.

    Args:
        file: The table.
        names: The models.
        measure: From the name of a model to its facts.
    """
    file.write_text(table_text({name: measure(name) for name in names}), encoding="utf-8")
    print(f"wrote {file}")


def table_text(facts: dict[str, dict[str, Any]]) -> str:
    """Return a table as JSON with one line for each model."""
    rows = [f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in facts.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    main()
