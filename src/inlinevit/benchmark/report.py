"""Benchmark results in a terminal, as a report and in Markdown; all of them are made from the record in JSON."""

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ..report import Block, Picture, Report, Section, Table, Text, markdown_table, rich_table, save_figure, wide_console
from .machine import GEMM_SIDE
from .options import BENCHES
from .plots import make_figure
from .results import Results
from .tables import ALL_MEASUREMENTS, full_table, summary_tables


def make_blocks(results: Results) -> list[Block]:
    """Return the content of a report."""
    figure, caption = make_figure(results)
    return [
        Text(conditions_sentence(results)),
        *summary_tables(results),
        Picture(figure, caption, caption),
        full_table(results),
        *(Text(f"{note}.") for note in results.notes),
    ]


def conditions_sentence(results: Results) -> str:
    """Return how the results were measured."""
    settings, machine = results.settings, results.machine
    what = "Forward and backward" if settings["backward"] else "Forward"
    what = "Training steps" if results.what == "step" else what
    threads = f"{settings['threads']} thread{'s' if settings['threads'] > 1 else ''}"
    where = f"{machine['gpu']}" if "gpu" in machine else f"{threads} of {machine['processor']}"
    precisions = " and ".join(dict.fromkeys(one.precision for one in results.measurements))
    rounds = sorted({one.rounds for one in results.measurements})
    span = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    return (
        f"{what}, {precisions}, {where} ({machine['cores']} cores, {machine['memory'] / 2**30:.0f} GiB, load "
        f"{machine['load']:g} before), {span} interleaved rounds. A {GEMM_SIDE}³ matrix product in the same rounds "
        f"reached {machine['gemm_rate'] / 1e9:.0f} GFLOP/s."
    )


def modes_sentence(results: Results) -> str:
    """Return which modes are compared, and which models do not have all of them."""
    modes = list(dict.fromkeys(one.mode for one in results.measurements))
    if len(modes) == 1:
        return f"All are measured in mode {modes[0]}."
    names = list(dict.fromkeys(one.name for one in results.measurements))
    parts = [f"The modes {', '.join(modes[:-1])} and {modes[-1]} are compared"]
    for mode in modes:
        measured = {one.name for one in results.measurements if one.mode == mode}
        without = [name for name in names if name not in measured]
        if without:
            parts.append(f"{mode} not for {', '.join(without)}")
    return f"{'; '.join(parts)}."


def print_results(results: Results, console: Console) -> None:
    """Print all tables and notes."""
    console = wide_console(console)
    console.print(f"{conditions_sentence(results)} {modes_sentence(results)}", highlight=False)
    for table in (full_table(results), *summary_tables(results)):
        console.print(rich_table(table))
    for note in results.notes:
        console.print(f"{note}.", highlight=False)


def write_report(results: Results, folder: Path, name: str) -> Path:
    """Write NAME.json, NAME.html, NAME.png and NAME.svg, and return the path of the page."""
    if results.what in BENCHES:
        title, measured = f"inlinevit bench {results.what}", BENCHES[results.what].help
    elif results.what == "step":
        title, measured = "Training steps", f"processor time of the recipe {results.settings['recipe']}"
    else:
        title, measured = "Models before and after", f"the models and those of {results.settings['revision']}"
    report = Report(title, f"Measured: {measured}. {modes_sentence(results)}")
    report.add(Section("benchmark", name, make_blocks(results), asdict(results)))
    page = report.write(folder, name)
    # A new figure, because matplotlib moves some elements each time it saves one.
    save_figure(make_figure(results)[0], folder, name)
    return page


def make_markdown(results: Results, picture: str) -> str:
    """Return tables and figure for a document; `picture` is the path of the figure, relative to the document."""
    parts = []
    for block in make_blocks(results):
        if isinstance(block, Picture):
            parts.append(f"![{block.alt}]({picture})")
        elif isinstance(block, Table) and block.caption == ALL_MEASUREMENTS:
            parts.append(f"<details><summary>{block.caption}</summary>\n\n{markdown_table(block)}\n\n</details>")
        elif isinstance(block, Table):
            parts.append(f"{block.caption}:\n\n{markdown_table(block)}")
        elif isinstance(block, Text):
            parts.append(block.text)
    return "\n\n".join(parts) + "\n"
