"""The tables of a record, in a terminal and in Markdown."""

from collections.abc import Sequence
from statistics import mean

from ...report import Table, markdown_table
from .design import Cell, Study
from .record import CellRecord, Record
from .statistics import CONFIDENCE, Verdict, judge, mean_interval
from .studies import DATA, GENERATED, STUDIES

MISSING = "–"
HEADINGS = ("attention", "seeds", "top-1 %", "learning rate", "parameters")


def cells_tables(study: Study, record: Record) -> list[Table]:
    """Return one table per group of cells of a study, with one row per cell."""
    groups: dict[str, list[Cell]] = {}
    for cell in study.cells:
        groups.setdefault(cell.group, []).append(cell)
    return [
        cells_table(cells, record, f"{study.title}: {group}" if group else study.title)
        for group, cells in groups.items()
    ]


def cells_table(cells: Sequence[Cell], record: Record, caption: str) -> Table:
    """Return a table of cells, with times of one processor, which its heading names: that of most of their runs."""
    # Times of different processors do not belong into one table.
    processor = next(iter(record.processors([cell.key for cell in cells])), None)
    heading = "CPU minutes per run" + (f", {processor}" if processor else "")
    return Table((*HEADINGS, heading), [cell_row(cell, record, processor) for cell in cells], caption)


def cell_row(cell: Cell, record: Record, processor: str | None) -> tuple[str, ...]:
    """Return the row of a cell with times on a processor; a dash is what is not measured yet."""
    found, planned = record.cells.get(cell.key, CellRecord({})), record.settings["seeds"].get(cell.key, 0)
    count, minutes = len(found.runs), found.cpu_minutes(processor)
    return (
        cell.label,
        str(count) if count >= planned else f"{count} of {planned}",
        accuracy_words(found),
        f"{found.lr:g}" if found.lr is not None else MISSING,
        f"{found.parameters:,}" if found.parameters else MISSING,
        MISSING if minutes is None else f"{minutes:.1f}",
    )


def accuracy_words(cell: CellRecord) -> str:
    """Return mean, confidence interval and values, or how often and when runs diverged."""
    values = ", ".join(f"{value:.2f}" for value in cell.top1)
    if cell.diverged:
        steps = f"step{'s' if len(cell.diverged) > 1 else ''} {', '.join(f'{step:,}' for step in cell.diverged)}"
        others = f"; the others: {values}" if values else ""
        return f"diverged in {len(cell.diverged)} of {len(cell.runs)} seeds ({steps}){others}"
    if not cell.top1:
        return MISSING
    error = mean_interval(cell.top1)
    spread = f" ± {error:.2f} ({values})" if error is not None else ""
    return f"{mean(cell.top1):.2f}{spread}"


def claims_table(study: Study, record: Record) -> Table:
    """Return what is expected, and whether it holds here."""
    rows = [(claim.text, *verdict_words(judge(claim, record.cells))) for claim in study.claims]
    return Table((study.expectation, "difference", f"{CONFIDENCE:.0%} interval", "here"), rows, "Claims")


def verdict_words(verdict: Verdict) -> tuple[str, str, str]:
    """Return difference, interval and verdict."""
    word, difference, noise, reason, is_paired = verdict
    shown = MISSING if difference is None else f"{difference:+.2f}"
    spread = MISSING if noise is None else f"± {noise:.2f}{', paired' if is_paired else ''}"
    return shown, spread, f"{word}; {reason}" if reason else word


def changes_table(record: Record, former: Record) -> Table:
    """Return the claims that both records are about, with the verdicts of both.

    Args:
        record: The new one.
        former: That of shorter runs.
    """
    rows = []
    for study in STUDIES.values():
        for claim in study.claims:
            cells = (claim.better, claim.worse)
            if not all(cell.key in former.cells and cell.key in record.cells for cell in cells):
                continue
            now, before = judge(claim, record.cells), judge(claim, former.cells)
            is_same = all(record.cells[cell.key].options == former.cells[cell.key].options for cell in cells)
            note = "" if is_same else ", another model"
            rows.append((claim.text, *short_words(before), *short_words(now), change_of(before, now) + note))
    headings = ("the paper expects", "1.3 epochs", "verdict", "5 epochs", "verdict", "changed")
    return Table(headings, rows, "What changed with the length")


def former_table(former: Record) -> Table:
    """Return the accuracies of the shorter runs."""
    labels = {cell.key: cell.label for study in STUDIES.values() for cell in study.cells}
    rows = [
        (
            labels[key],
            str(len(found.runs)),
            accuracy_words(found),
            f"{found.parameters:,}" if found.parameters else MISSING,
        )
        for key, found in former.cells.items()
        if key in labels
    ]
    return Table(("attention", "seeds", "top-1 %", "parameters"), rows, "Runs of 1.3 epochs")


def short_words(verdict: Verdict) -> tuple[str, str]:
    """Return the difference with its interval, and the verdict."""
    shown, spread, word = verdict_words(verdict)
    return (f"{shown} {spread.removesuffix(', paired')}" if spread != MISSING else shown), word


def change_of(before: Verdict, now: Verdict) -> str:
    """Return whether a verdict has changed."""
    if "unknown" in (before.word, now.word):
        return MISSING
    return "no" if before.word == now.word else "yes"


def study_markdown(name: str, record: Record) -> str:
    """Return a study in Markdown: question, tables, claims, and its command."""
    study = STUDIES[name]
    data = GENERATED if all(cell.is_generated for cell in study.cells) else DATA
    parts = [study.question]
    for table in cells_tables(study, record):
        group = (table.caption or "").removeprefix(study.title).removeprefix(": ")
        parts += [*([f"**{group}**"] if group else []), markdown_table(table)]
    if study.claims:
        parts.append(markdown_table(claims_table(study, record)))
    parts.append(f"```sh\ninlinevit reproduce {name} --data {data}\n```")
    return "\n\n".join(parts) + "\n"


def summary_markdown(record: Record) -> str:
    """Return runs, time and machine in Markdown."""
    settings, machine, versions = record.settings, record.facts["machine"], record.facts["versions"]
    finished = [run for cell in record.cells.values() for run in cell.runs.values()]
    if not finished:
        return "No run of this length is recorded yet: a dash stands for what will be measured.\n"
    planned, diverged = sum(settings["seeds"].values()), sum(run.diverged_step is not None for run in finished)
    processors = record.processors() or [machine["system"]]
    mixed = " Each table has processor times of one of these processors alone, which is named in its heading."
    return (
        f"{len(finished)} runs of {planned} are finished, and {diverged} of them diverged. Together with the choice of "
        f"learning rates, they took {record.core_hours:.1f} core-hours of processor time, {settings['jobs']} in "
        f"parallel with {machine['threads']} thread each, on {machine['cores']} cores of "
        f"{' or '.join(processors)}, with torch {versions['torch']}, timm {versions['timm']} and "
        f"Python {versions['python']}.{mixed if len(processors) > 1 else ''}\n"
    )
