"""The tables of a record, in a terminal and in Markdown."""

import json
import shlex
from statistics import mean, stdev

from ...recipes import load_recipe
from ...report import Table, markdown_table, replace_between
from .record import CellRecord, Record, judge
from .studies import DATA, OUTPUT, STUDIES, Cell, Run, Study, plan


def cells_table(name: str, record: Record, study: Study | None = None) -> Table:
    """Return one row per cell of a study, or of a part of it (`study`)."""
    study, seeds = study or STUDIES[name], record.settings["seeds"][name]
    rows = []
    for cell in study.cells:
        found = record.cells[cell.key]
        rows.append(
            (
                cell.label,
                str(len(found.runs)) if len(found.runs) >= seeds else f"{len(found.runs)} of {seeds}",
                accuracy_words(found),
                f"{found.parameters:,}" if found.parameters else "–",
                f"{found.minutes:.1f}" if found.minutes is not None else "–",
            )
        )
    return Table(("attention", "seeds", "top-1 %", "parameters", "minutes per run"), rows, study.title)


def accuracy_words(cell: CellRecord) -> str:
    """Return mean, standard deviation and values, or how often and when runs diverged."""
    values = ", ".join(f"{value:.2f}" for value in cell.top1)
    if cell.diverged:
        steps = f"step{'s' if len(cell.diverged) > 1 else ''} {', '.join(f'{step:,}' for step in cell.diverged)}"
        others = f"; the others: {values}" if values else ""
        return f"diverged in {len(cell.diverged)} of {len(cell.runs)} seeds ({steps}){others}"
    if not cell.top1:
        return "–"
    spread = f" ± {stdev(cell.top1):.2f} ({values})" if len(cell.top1) > 1 else ""
    return f"{mean(cell.top1):.2f}{spread}"


def claims_table(study: Study, record: Record) -> Table:
    """Return what the paper expects, and whether it holds here."""
    rows = []
    for claim in study.claims:
        word, difference, noise, reason = judge(claim, record.cells)
        shown = "–" if difference is None else f"{difference:+.2f}"
        spread = "–" if noise is None else f"{noise:.2f}"
        rows.append((claim.text, shown, spread, f"{word}; {reason}" if reason else word))
    return Table(("the paper expects", "difference", "two standard errors", "here"), rows, "Claims")


def train_command(cell: Cell, seed: int = 0) -> str:
    """Return the `inlinevit train` command of one run."""
    given = load_recipe(cell.recipe, "classification")["model"]["kwargs"]
    words = ["inlinevit", "train", "--config", cell.recipe, "--data.path", DATA]
    for name, value in cell.kwargs.items():
        if given.get(name) != value:
            words += [f"--model.kwargs.{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return shlex.join([*words, "--run.seed", str(seed), "--run.output", f"{OUTPUT}/{Run(cell, seed).name}"])


def study_markdown(name: str, record: Record) -> str:
    """Return a study in Markdown: question, command, tables, and the command of each row."""
    study = STUDIES[name]
    commands = "\n".join(train_command(cell) for cell in study.cells)
    parts = [
        study.question,
        f"```sh\ninlinevit reproduce {name} --data {DATA}\n```",
        markdown_table(cells_table(name, record)),
        *([markdown_table(claims_table(study, record))] if study.claims else []),
        f"<details><summary>Commands of the rows, with seed 0</summary>\n\n```sh\n{commands}\n```\n\n</details>",
    ]
    return "\n\n".join(parts) + "\n"


def summary_markdown(record: Record) -> str:
    """Return runs, time and machine in Markdown."""
    settings, machine, versions = record.settings, record.facts["machine"], record.facts["versions"]
    finished = [run for cell in record.cells.values() for run in cell.runs.values()]
    planned, diverged = len(plan(settings["seeds"])), sum(run.diverged_step is not None for run in finished)
    return (
        f"{len(finished)} runs of {planned} are finished, and {diverged} of them diverged. A run has "
        f"{settings['steps']:,} steps of {settings['batch_size']} images. Together they took {record.core_hours:.1f} "
        f"core-hours of processor time, {settings['jobs']} in parallel with {machine['threads']} thread each, on "
        f"{machine['cores']} cores ({machine['system']}), with torch {versions['torch']}, timm {versions['timm']} and "
        f"Python {versions['python']}.\n"
    )


def rewritten(page: str, record: Record) -> str:
    """Return a page with the tables between <!-- reproduce -->, and <!-- reproduce-NAME --> of each study."""
    page = replace_between(page, "reproduce", summary_markdown(record))
    for name in STUDIES:
        page = replace_between(page, f"reproduce-{name}", study_markdown(name, record))
    return page
