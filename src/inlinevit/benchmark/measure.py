"""Measure candidates against each other: those that should answer alike are compared first, then all take turns."""

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import Progress
from timm.layers import DropPath
from torch import Tensor, nn

from ..engine.config import MOST_STEPS, MOST_WORKERS
from ..layers import InLineAttention
from ..models._backbone import Backbone
from ..models.catalog import count_macs
from ..models.catalog import measure as count_for_catalog
from ..models.inference import optimize_for_inference
from ..utils.validation import Range, check_value, require
from .machine import GEMM_FLOPS, describe_machine, free_memory, gemm, gemm_rate, pinned_threads
from .memory import peak_memory
from .timing import Quartiles, interleave, quartiles

# Largest difference between answers that should be alike, relative to the largest value.
TOLERANCE = 1e-4
# The path whose operations are counted, whichever is taken.
REFERENCE_PATH = "covariance"
# A call that needs more than this share of the free memory is left out.
MEMORY_SHARE = 0.7
# A path that does more than so many times the work of the reference is left out: it would be in the others' way.
MOST_WORK = 3
# Calls of fewer seconds are rehearsed.
REHEARSE_BELOW = 0.1
SEED = 0

# From a module and its input to the floating-point operations of a forward call.
Count = Callable[[nn.Module, Tensor], float]


@dataclass(frozen=True)
class Conditions:
    """Under which all are measured.

    Attributes:
        threads: Threads of torch; None = as many as it has now.
        rounds: How often each has its turn, at most.
        patience: Seconds after which no further round begins.
        longest_call: Contenders that would take more seconds a call are left out.
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
        check_value("threads", self.threads, int, Range(-inf, MOST_WORKERS))
        check_value("rounds", self.rounds, int, Range(-inf, MOST_STEPS))
        require(self.threads > 0, f"threads is {self.threads}: it should be at least 1")
        require(self.rounds > 1, f"rounds is {self.rounds}: it should be at least 2, to tell how much times vary")
        require(self.device in ("cpu", "cuda"), f"device is {self.device}: it should be cpu or cuda")
        require(self.device == "cpu" or torch.cuda.is_available(), "there is no GPU for device cuda: use device cpu")


@dataclass(frozen=True)
class Candidate:
    """A module to measure.

    Attributes:
        name: What it is called; in all its turns the same.
        size: Side of its images, or their height, or its tokens.
        make: From a device to the module and its input.
        kin: Contenders of one kin have the same weights and must answer alike; "" = its name.
        is_optional: Whether it is left out, with a note, if it refuses its input by a ValueError.
        width: Of its images, where they are no squares.
        count: Counts its floating-point operations; None = count_flops().
    """

    name: str
    size: int
    make: Callable[[torch.device], tuple[nn.Module, Tensor]]
    kin: str = ""
    is_optional: bool = False
    width: int | None = None
    count: Count | None = None


@dataclass(frozen=True)
class Round:
    """Contenders that take turns.

    Attributes:
        title: What they have in common.
        batch: Images of a call.
        candidates: The first is the one that the others are compared with.
    """

    title: str
    batch: int
    candidates: Sequence[Candidate]


@dataclass(frozen=True)
class Measurement:
    """What came out for a candidate in a mode.

    Attributes:
        turn: Title of its turn.
        name: The candidate's.
        mode: One of MODES.
        size: Side of its images, or their height, or its tokens.
        batch: Images of a call.
        seconds: Of a call.
        rounds: How many calls the quartiles are of.
        flops: Floating-point operations of a call, counted on the reference path; backward counts twice forward.
        memory: Most bytes that a call holds at a time beyond weights and images.
        gemm_rate: Floating-point operations a second of a large matrix product in the same turn.
        width: Of its images, where they are no squares.
    """

    turn: str
    name: str
    mode: str
    size: int
    batch: int
    seconds: Quartiles
    rounds: int
    flops: float
    memory: int
    gemm_rate: float
    width: int | None = None

    @property
    def images_per_second(self) -> float:
        """By the median."""
        return self.batch / self.seconds.median

    @property
    def rate(self) -> float:
        """Floating-point operations a second, by the median."""
        return self.flops / self.seconds.median

    @property
    def share_of_peak(self) -> float:
        """The rate as a share of the matrix product's."""
        return self.rate / self.gemm_rate


@dataclass
class Rival:
    """A candidate in a mode, ready to be called.

    Attributes:
        candidate: The candidate.
        mode: One of MODES.
        step: A call.
        flops: See Measurement.
        work: Floating-point operations by the path that it takes itself.
    """

    candidate: Candidate
    mode: str
    step: Callable[[], object]
    flops: float
    work: float

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.candidate.name} ({self.mode})"


@dataclass
class Results:
    """All that tables and drawings are made of.

    Attributes:
        what: Which benchmark it was.
        settings: What it was told.
        machine: See describe_machine(); with the median rate of the matrix products.
        measurements: In order.
        notes: What was left out, and why.
    """

    what: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    measurements: list[Measurement]
    notes: list[str]


def compiled(module: nn.Module) -> nn.Module:
    """By torch.compile for this very input size."""
    # One call's compilation must not count against another's limit; older versions of torch have no word for it.
    isolated = (
        {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    )
    return cast(nn.Module, cast(Any, torch.compile)(module, dynamic=False, **isolated))


def optimized(module: nn.Module) -> nn.Module | None:
    """By optimize_for_inference, which is for our models."""
    return optimize_for_inference(module) if isinstance(module, Backbone) else None


# How a module can be run: from a module to what is called, or None where that makes no sense.
MODES: dict[str, Callable[[nn.Module], nn.Module | None]] = {
    "eager": lambda module: module,
    "compiled": compiled,
    "optimized": optimized,
}


def measure(
    what: str, turns: Sequence[Round], modes: Sequence[str], conditions: Conditions, **settings: Any
) -> Results:
    """Measure all candidates of all turns in all modes that they have.

    Args:
        what: Which benchmark it is.
        turns: What to measure.
        modes: Some of MODES.
        conditions: How.
        **settings: What else should be told with the results.

    Raises:
        ValueError: Answers differ that should not.
    """
    device = torch.device(conditions.device)
    notes: list[str] = []
    measurements: list[Measurement] = []
    console = Console(stderr=True)
    # Drawn between measurements only, so that it takes no time from them.
    bar = Progress(console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
    with pinned_threads(conditions.threads), bar:
        machine = describe_machine(device)
        limits = Limits(conditions, gemm_rate(device))
        task = bar.add_task("", total=len(turns))

        def tell(text: str) -> None:
            bar.update(task, description=text, refresh=True)

        for turn in turns:
            measurements += measure_round(turn, modes, conditions, limits, notes, tell)
            bar.advance(task)
    if not measurements:
        reason = "; ".join(notes) or f"none of the candidates can be run in the modes {', '.join(modes)}"
        raise ValueError(f"nothing could be measured: {reason}")
    machine["gemm_rate"] = median(one.gemm_rate for one in measurements)
    return Results(what, {**settings, "modes": list(modes), **vars(conditions)}, machine, measurements, notes)


def measure_round(
    turn: Round,
    modes: Sequence[str],
    conditions: Conditions,
    limits: "Limits",
    notes: list[str],
    tell: Callable[[str], None],
) -> list[Measurement]:
    """Measure the candidates of a turn; see make_baselines()."""
    torch.compiler.reset()
    rivals = make_baselines(turn, modes, conditions, limits, notes, tell)
    tell(f"{turn.title}: timing")
    measurements = time_rivals(turn, rivals, conditions)
    for rival, one in zip(rivals, measurements, strict=True):
        limits.learn(rival, one.memory)
    return measurements


def make_baselines(
    turn: Round,
    modes: Sequence[str],
    conditions: Conditions,
    limits: "Limits",
    notes: list[str],
    tell: Callable[[str], None],
) -> list[Rival]:
    """Make the candidates of a turn, leave out those that cannot be measured, and see that kin answer alike.

    Args:
        turn: The turn.
        modes: Some of MODES.
        conditions: How to measure.
        limits: What would take too much.
        notes: What is left out is noted here.
        tell: Shows what is going on.
    """
    device = torch.device(conditions.device)
    rivals: list[Rival] = []
    answers: dict[str, tuple[Rival, list[Tensor]]] = {}
    for candidate in turn.candidates:
        tell(f"{turn.title}: {candidate.name}")
        module, x = candidate.make(device)
        without_chance(module).train(conditions.backward)
        passes = 3 if conditions.backward else 1
        count = candidate.count or count_flops
        try:
            flops, work = passes * nominal_flops(module, x, count), passes * count(module, x)
            reason = limits.exceeded(candidate, flops, work)
        except ValueError as error:
            if not candidate.is_optional:
                raise
            reason = str(error)
        if reason:
            notes.append(f"{turn.title}: {candidate.name} is left out: {reason}")
            continue
        for mode in modes:
            tell(f"{turn.title}: {candidate.name}, {mode}")
            if mode == "optimized" and conditions.backward:
                continue
            runner = MODES[mode](module)
            if runner is None:
                continue
            rival = Rival(candidate, mode, make_step(runner, x, conditions.backward), flops, work)
            answer = answer_of(rival, module)
            first, expected = answers.setdefault(candidate.kin or candidate.name, (rival, answer))
            check_agreement(first, expected, rival, answer)
            rivals.append(rival)
    return rivals


def make_step(module: nn.Module, x: Tensor, backward: bool) -> Callable[[], list[Tensor]]:
    """What is timed: a call, or a call and the gradients of the sum of the squares of what it returns."""

    def forward() -> list[Tensor]:
        with torch.no_grad():
            out = module(x)
        return [out] if isinstance(out, Tensor) else list(out)

    def forward_and_backward() -> list[Tensor]:
        module.zero_grad()
        out = module(x)
        parts = [out] if isinstance(out, Tensor) else list(out)
        cast(Tensor, sum(part.square().sum() for part in parts)).backward()
        return [part.detach() for part in parts]

    return forward_and_backward if backward else forward


def answer_of(rival: Rival, module: nn.Module) -> list[Tensor]:
    """What a rival returns, and the gradients of the weights if it makes them."""
    try:
        outputs = cast(list[Tensor], rival.step())
    except RuntimeError as error:
        if rival.mode != "compiled":
            raise
        sentence = str(error).strip().partition("\n")[0]
        raise ValueError(f"{rival.candidate.name} cannot be compiled here ({sentence}): leave that mode out") from error
    gradients = [one.grad.flatten() for one in module.parameters() if one.grad is not None]
    return [*outputs, torch.cat(gradients).clone()] if gradients else outputs


def check_agreement(first: Rival, expected: Sequence[Tensor], second: Rival, answer: Sequence[Tensor]) -> None:
    """Refuse to go on if two rivals of one kin do not answer alike."""
    for a, b in zip(expected, answer, strict=True):
        largest = a.abs().max().item()
        difference = (a - b).abs().max().item() / largest if a.shape == b.shape and largest > 0 else inf
        # Not a number is no agreement either.
        if not difference <= TOLERANCE:
            raise ValueError(
                f"{first.title} and {second.title} should answer alike, but differ by {difference:.2g} of the largest "
                f"value, which is more than {TOLERANCE:g}: nothing is reported"
            )


def time_rivals(turn: Round, rivals: Sequence[Rival], conditions: Conditions) -> list[Measurement]:
    """Memory of each rival, then times in turns."""
    device = torch.device(conditions.device)
    memory = [peak_memory(rival.step, device) for rival in rivals]
    steps: dict[str, Callable[[], object]] = {str(place): rival.step for place, rival in enumerate(rivals)}
    times = interleave(
        {**steps, "gemm": gemm(device)},
        rounds=conditions.rounds,
        warmup=1,
        patience=conditions.patience,
        rehearse_below=REHEARSE_BELOW,
        device=device,
    )
    fastest = GEMM_FLOPS / quartiles(times["gemm"]).median
    return [
        Measurement(
            turn=turn.title,
            name=rival.candidate.name,
            mode=rival.mode,
            size=rival.candidate.size,
            batch=turn.batch,
            seconds=quartiles(times[str(place)]),
            rounds=len(times[str(place)]),
            flops=rival.flops,
            memory=memory[place],
            gemm_rate=fastest,
            width=rival.candidate.width,
        )
        for place, rival in enumerate(rivals)
    ]


class Limits:
    """What would take too much time or memory to be measured.

    Args:
        conditions: How long a call may take.
        rate: Floating-point operations a second that the machine can do; a module is expected to reach half of it.
    """

    def __init__(self, conditions: Conditions, rate: float) -> None:
        self.longest_call = conditions.longest_call
        self.device = torch.device(conditions.device)
        self.rate = rate / 2
        self.bytes_per_flop: dict[str, float] = {}

    def learn(self, rival: Rival, memory: int) -> None:
        """Memory that a rival has taken, in bytes: a larger one is expected to take more in proportion to its work."""
        name = rival.candidate.name
        self.bytes_per_flop[name] = max(memory / max(rival.work, 1), self.bytes_per_flop.get(name, 0))

    def exceeded(self, candidate: Candidate, flops: float, work: float) -> str:
        """Why a candidate cannot be measured; "" if it can. See Rival."""
        if work > MOST_WORK * flops:
            return f"it does {work / flops:.1f} times the work"
        seconds, memory = work / self.rate, work * self.bytes_per_flop.get(candidate.name, 0)
        if seconds > self.longest_call:
            return f"a call would take about {seconds:.1f} s, and {self.longest_call:g} s are allowed"
        free = MEMORY_SHARE * free_memory(self.device)
        if memory > free:
            return f"a call would need about {memory / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free for it"
        return ""


def nominal_flops(module: nn.Module, x: Tensor, count: Count | None = None) -> float:
    """Floating-point operations of a call by REFERENCE_PATH, whichever attention takes; see Candidate.count."""
    module = deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, InLineAttention):
            layer.path = REFERENCE_PATH
    return (count or count_flops)(module, x)


def count_flops(module: nn.Module, x: Tensor) -> float:
    """Floating-point operations of a call; those of models are the catalog's."""
    module = deepcopy(module).to("meta").eval()
    if x.dim() == 4:
        batch, in_chans, height, width = x.shape
        return 2e9 * batch * count_for_catalog(module, (height, width), in_chans)[1]
    return 2 * count_macs(lambda: module(torch.empty_like(x, device="meta")))


def without_chance(module: nn.Module) -> nn.Module:
    """The module itself, without dropout and stochastic depth."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, DropPath):
            part.drop_prob = 0.0
    return module


def draw_weights(module: nn.Module) -> nn.Module:
    """The module itself, with weights from SEED that keep attention from being negligible, so that errors show.

    At the usual start, queries and keys are so small that a model hardly changes if its attention is wrong.
    """
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            if parameter.dim() > 1:
                parameter.copy_(2 * noise / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(0.2 * noise + (0 if name.endswith("bias") else 1))
    return module


def draw_input(*shape: int, device: torch.device) -> Tensor:
    """Normal values from SEED."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to(device)


def best_modes(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The fastest mode of each candidate in each turn, in order."""
    best: dict[tuple[str, str], Measurement] = {}
    for one in measurements:
        key = (one.turn, one.name)
        if key not in best or one.seconds.median < best[key].seconds.median:
            best[key] = one
    return list(best.values())


def from_json(record: dict[str, Any]) -> Measurement:
    """A measurement that asdict() has made plain."""
    one = Measurement(**record)
    return replace(one, seconds=Quartiles(*one.seconds))
