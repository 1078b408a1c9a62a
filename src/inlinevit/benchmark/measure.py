"""Measure candidates side by side: first check that outputs agree, then time all of them in alternation."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any, cast

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

from ..engine.config import MOST_STEPS, MOST_WORKERS
from ..utils.console import new_console
from ..utils.validation import Range, check_value, require
from .machine import GEMM_FLOPS, describe_machine, free_memory, gemm, gemm_rate, pinned_threads
from .memory import peak_memory
from .results import Measurement, Results
from .runtimes import MODES, Call, package_versions, prepare_eager, require_modes
from .timing import interleave, quartiles
from .workload import Candidate, Comparison, LeftOut, disable_dropout, nominal_flops

# Largest difference between outputs that should agree, relative to the largest value.
TOLERANCE = 1e-4
# Calls of fewer seconds are preceded by an untimed call.
REHEARSE_BELOW = 0.1
# A call that needs more than this fraction of the free memory is left out.
MEMORY_FRACTION = 0.7
# A path that does more than this many times the work of the reference path is left out: it would slow down each round.
MAX_WORK = 3


@dataclass(frozen=True)
class Conditions:
    """The conditions of all measurements.

    Attributes:
        threads: Threads of torch.
        rounds: Timed calls of each candidate, at most.
        patience: Seconds after which no further round begins.
        longest_call: Candidates that would take more seconds per call are left out.
        device: "cpu" or "cuda".
        backward: Measure forward and backward, in training mode without dropout, instead of forward alone.
    """

    threads: int = field(default_factory=torch.get_num_threads)
    rounds: int = 50
    patience: float = 30.0
    longest_call: float = 30.0
    device: str = "cpu"
    backward: bool = False

    def __post_init__(self) -> None:
        check_value("threads", self.threads, int, Range(1, MOST_WORKERS))
        # Quartiles need two.
        check_value("rounds", self.rounds, int, Range(2, MOST_STEPS))
        require(self.device in ("cpu", "cuda"), f"device is {self.device}: it should be cpu or cuda")
        require(self.device == "cpu" or torch.cuda.is_available(), "there is no GPU for device cuda: use device cpu")


@dataclass
class Variant:
    """A candidate in a mode, ready to be called.

    Attributes:
        mode: One of MODES.
        module: The module with the parameters.
        step: A call, which returns its outputs; if it includes the backward pass, the parameters have gradients.
        eager_step: The same in mode eager.
        flops: See Measurement.
        work: Floating-point operations on the path that it takes.
        cosine: See Measurement; check_agreement() sets it.
    """

    candidate: Candidate
    mode: str
    module: nn.Module
    step: Callable[[], list[Tensor]]
    eager_step: Callable[[], list[Tensor]]
    flops: float
    work: float
    cosine: float | None = None

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.candidate.name} ({self.mode})"

    @property
    def output_group(self) -> str:
        """Variants of one group must agree."""
        return self.candidate.output_group or self.candidate.name

    @property
    def precision(self) -> str:
        """float32 or int8."""
        return MODES[self.mode].precision

    def outputs(self, step: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the outputs of a step and, if it computes gradients, all of them in one tensor."""
        try:
            outputs = step()
        except RuntimeError as error:
            if self.mode != "compiled":
                raise
            cause = str(error).strip().partition("\n")[0]
            raise ValueError(f"{self.candidate.name} cannot be compiled ({cause}): leave that mode out") from error
        gradients = [one.grad.flatten() for one in self.module.parameters() if one.grad is not None]
        return [*outputs, torch.cat(gradients)] if gradients else outputs


def measure(
    what: str,
    comparisons: Sequence[Comparison],
    modes: Sequence[str],
    conditions: Conditions,
    *,
    notes: Sequence[str] = (),
    **settings: Any,
) -> Results:
    """Measure all candidates of all comparisons in all modes that apply.

    Args:
        what: Name of the benchmark.
        comparisons: What to measure.
        modes: Some of MODES.
        conditions: How to measure.
        notes: What was left out before.
        **settings: Further settings to record with the results.

    Raises:
        ValueError: Outputs differ that should agree, or a mode cannot be used here.
    """
    device = torch.device(conditions.device)
    candidates = [candidate for comparison in comparisons for candidate in comparison.candidates]
    used = list(dict.fromkeys(mode for candidate in candidates for mode in candidate.modes or modes))
    require_modes(used, device=conditions.device, backward=conditions.backward)
    notes = list(notes)
    measurements: list[Measurement] = []
    console = new_console(stderr=True)
    # Refreshed between measurements only, so that it takes no time from them.
    bar = Progress(console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
    with pinned_threads(conditions.threads), bar:
        machine = {**describe_machine(device), "packages": package_versions(used)}
        limits = Limits(conditions.longest_call, device, gemm_rate(device))
        task = bar.add_task("", total=len(comparisons))
        for comparison in comparisons:
            torch.compiler.reset()
            variants: list[Variant] = []
            for candidate in comparison.candidates:
                bar.update(task, description=f"{comparison.title}: {candidate.name}", refresh=True)
                made, left_out = make_variants(candidate, modes, conditions, limits)
                variants += made
                notes += [f"{comparison.title}: {note}" for note in left_out]
            bar.update(task, description=f"{comparison.title}: comparing outputs", refresh=True)
            started = time.perf_counter()
            check_agreement(variants)
            # Calls that take long need no further one before they are timed.
            warmup = 1 if time.perf_counter() - started < conditions.patience else 0
            bar.update(task, description=f"{comparison.title}: timing", refresh=True)
            found = time_variants(comparison, variants, conditions, warmup)
            for variant, one in zip(variants, found, strict=True):
                if one.memory is not None:
                    limits.learn(variant.candidate, variant.work, one.memory)
            measurements += found
            bar.advance(task)
    if not measurements:
        reasons = "; ".join(notes) or f"none of the candidates can be run in the modes {', '.join(modes)}"
        raise ValueError(f"nothing could be measured: {reasons}")
    machine["gemm_rate"] = median(one.gemm_rate for one in measurements)
    return Results(what, {**settings, "modes": list(modes), **vars(conditions)}, machine, measurements, notes)


class Limits:
    """Estimates whether a candidate takes too much time or memory.

    Args:
        longest_call: Seconds per call.
        device: Where candidates run.
        rate: Floating-point operations per second of the machine; a candidate is expected to reach half of it.
    """

    def __init__(self, longest_call: float, device: torch.device, rate: float) -> None:
        self.longest_call = longest_call
        self.device = device
        self.rate = rate / 2
        self.bytes_per_flop: dict[str, float] = {}

    def learn(self, candidate: Candidate, work: float, memory: int) -> None:
        """Note the bytes that a candidate took; a larger input is expected to take more in proportion to its work."""
        before = self.bytes_per_flop.get(candidate.name, 0)
        self.bytes_per_flop[candidate.name] = max(before, memory / max(work, 1))

    def exceeded(self, candidate: Candidate, flops: float, work: float) -> str:
        """Return why a candidate cannot be measured, or "" if it can; flops and work as in Variant."""
        if work > MAX_WORK * flops:
            return f"it does {work / flops:.1f} times the work"
        seconds, memory = work / self.rate, work * self.bytes_per_flop.get(candidate.name, 0)
        if seconds > self.longest_call:
            return f"a call would take about {seconds:.1f} s, and {self.longest_call:g} s are allowed"
        free = MEMORY_FRACTION * free_memory(self.device)
        if memory > free:
            return f"a call would need about {memory / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free for it"
        return ""


def make_variants(
    candidate: Candidate, modes: Sequence[str], conditions: Conditions, limits: Limits
) -> tuple[list[Variant], list[str]]:
    """Make a candidate in all modes that apply, and say what is left out: it exceeds the limits, or cannot be run."""
    module, x = candidate.make(torch.device(conditions.device))
    disable_dropout(module).train(conditions.backward)
    passes = 3 if conditions.backward else 1
    try:
        flops, work = passes * nominal_flops(module, x, candidate.count), passes * candidate.count(module, x)
    except ValueError as error:
        if not candidate.is_optional:
            raise
        return [], [f"{candidate.name} is left out: {error}"]
    if reason := limits.exceeded(candidate, flops, work):
        return [], [f"{candidate.name} is left out: {reason}"]

    def step(call: Call) -> Callable[[], list[Tensor]]:
        return make_step(call, module, conditions.backward)

    eager_step = step(prepare_eager(module, x, conditions.threads))
    variants, notes = [], []
    for mode in candidate.modes or modes:
        try:
            call = MODES[mode].prepare(module, x, conditions.threads)
        except LeftOut as reason:
            notes.append(f"{candidate.name} ({mode}) is left out: {reason}")
            continue
        if call is not None:
            variants.append(Variant(candidate, mode, module, step(call), eager_step, flops, work))
    return variants, notes


def make_step(call: Call, module: nn.Module, backward: bool) -> Callable[[], list[Tensor]]:
    """Return what is timed: a forward call, or one with the backward pass of the sum of squares of its outputs."""

    def step() -> list[Tensor]:
        if backward:
            module.zero_grad()
        with torch.set_grad_enabled(backward):
            out = call()
        parts = [out] if isinstance(out, Tensor) else list(out)
        if backward:
            cast(Tensor, sum(part.square().sum() for part in parts)).backward()
        return [part.detach() for part in parts]

    return step


def check_agreement(variants: Sequence[Variant]) -> None:
    """Raise a ValueError if variants of one output group have different outputs or gradients."""
    # What the outputs of each group should be, and whose they are.
    expected: dict[str, tuple[str, list[Tensor]]] = {}
    # Those in int8 last, as they are compared with float32.
    for variant in sorted(variants, key=lambda variant: variant.precision == "int8"):
        is_int8 = variant.precision == "int8"
        outputs = variant.outputs(variant.step)
        if variant.output_group not in expected:
            title = f"{variant.candidate.name} (eager)" if is_int8 else variant.title
            reference = variant.outputs(variant.eager_step) if is_int8 else outputs
            expected[variant.output_group] = title, reference
        title, reference = expected[variant.output_group]
        if is_int8:
            variant.cosine, least = cosine(reference, outputs), MODES[variant.mode].min_cosine
            # NaN does not agree with anything.
            if not variant.cosine >= least:
                raise ValueError(
                    f"outputs of {title} and {variant.title} should agree, but have a cosine of {variant.cosine:.2g}, "
                    f"which is less than {least:g}: nothing is reported"
                )
            continue
        for a, b in zip(reference, outputs, strict=True):
            difference = relative_difference(a, b)
            if not difference <= TOLERANCE:
                raise ValueError(
                    f"outputs of {title} and {variant.title} should agree, but differ by {difference:.2g} of the "
                    f"largest value, which is more than {TOLERANCE:g}: nothing is reported"
                )


def cosine(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the smallest cosine of corresponding outputs."""
    pairs = zip(expected, found, strict=True)
    return min(F.cosine_similarity(a.flatten(), b.flatten(), dim=0).item() for a, b in pairs)


def relative_difference(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    largest = expected.abs().max().item()
    return (expected - found).abs().max().item() / largest if expected.shape == found.shape and largest > 0 else inf


def time_variants(
    comparison: Comparison, variants: Sequence[Variant], conditions: Conditions, warmup: int
) -> list[Measurement]:
    """Measure the memory of each variant that torch runs, then the times of all in alternation."""
    device = torch.device(conditions.device)
    memory = [None if MODES[variant.mode].packages else peak_memory(variant.step, device) for variant in variants]
    steps: dict[str, Callable[[], object]] = {str(place): variant.step for place, variant in enumerate(variants)}
    times = interleave(
        {**steps, "gemm": gemm(device)},
        rounds=conditions.rounds,
        warmup=warmup,
        patience=conditions.patience,
        rehearse_below=REHEARSE_BELOW,
        device=device,
    )
    rate = GEMM_FLOPS / quartiles(times["gemm"]).median
    return [
        Measurement(
            comparison=comparison.title,
            name=variant.candidate.name,
            mode=variant.mode,
            size=variant.candidate.size,
            batch=comparison.batch,
            seconds=quartiles(times[str(place)]),
            rounds=len(times[str(place)]),
            flops=variant.flops,
            memory=memory[place],
            gemm_rate=rate,
            width=variant.candidate.width,
            runtime=MODES[variant.mode].runtime,
            precision=variant.precision,
            cosine=variant.cosine,
        )
        for place, variant in enumerate(variants)
    ]
