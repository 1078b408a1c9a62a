"""The result of a run, in its folder. Nothing slow is imported: the list of studies reads results, too."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS, DIVERGED, TIME = "results.json", "diverged.json", "time.json"
# In place of all others, for a run that is taken over from a record.
RECORDED = "recorded.json"


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        top1: Final top-1 accuracy on the test images in percent; None if it diverged.
        loss: Mean loss on the test images; None if it diverged.
        diverged_step: The step in which it diverged; None if it did not, or if it is not known.
        diverged_what: What was not finite.
        seconds: Wall time; None if unknown.
        cpu_seconds: Processor time.
        processor: The processor that it was trained on; None if unknown, or if there were several.
    """

    top1: float | None = None
    loss: float | None = None
    diverged_step: int | None = None
    diverged_what: str | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None
    processor: str | None = None

    @property
    def words(self) -> str:
        """The accuracy or the step of divergence, for a table."""
        if self.top1 is not None:
            return f"{self.top1:.2f}"
        return "diverged" if self.diverged_step is None else f"diverged in step {self.diverged_step}"


def read_outcome(folder: Path) -> Outcome | None:
    """Return the outcome of the run in a folder; None if it is not finished."""
    try:
        return find_outcome(folder)
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"the results in {folder} have other fields than this version of inlinevit writes ({error}): use the "
            "version that wrote them, or remove the folder to train this run again"
        ) from error


def find_outcome(folder: Path) -> Outcome | None:
    """As read_outcome; fields that are missing or unknown end it with a LookupError or TypeError."""
    if (folder / RECORDED).exists():
        return Outcome(**read_json(folder / RECORDED)["outcome"])
    times = read_json(folder / TIME) if (folder / TIME).exists() else {}
    if (folder / RESULTS).exists():
        metrics = read_json(folder / RESULTS)["metrics"]
        return Outcome(metrics["top1"], metrics["loss"], **times)
    if not (folder / DIVERGED).exists():
        return None
    reports = sorted(folder.glob("diverged-step-*/report.json"))
    if not reports:
        raise ValueError(f"{folder / DIVERGED} exists without the report of its step: remove it to train the run again")
    report = read_json(reports[0])
    return Outcome(diverged_step=report["step"], diverged_what=report["what"], **times)


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a run."""
    try:
        return json.loads(file.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is damaged: remove the folder {file.parent} to train this run again") from error
