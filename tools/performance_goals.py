"""The goals for speed, and what the records in docs/performance/ say of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from inlinevit.benchmark.options import INLINE_DEIT, INLINE_SWIN, SOFTMAX_DEIT, SOFTMAX_SWIN
from inlinevit.benchmark.results import Measurement, Results
from inlinevit.report import Table

MISSING = "–"
SIZES = (224, 384, 640, 1024)
TOKENS = (196, 4096, 16384)

# Whether a measurement is one of those whose fastest counts.
Choice = Callable[[Measurement], bool]


@dataclass(frozen=True)
class Case:
    """A ratio of times, each of the fastest mode.

    Attributes:
        name: What tells it from the other cases of its goal.
        slow: Whose time is divided.
        fast: By whose time it is divided.
        bar: What the ratio should reach.
        goal: What is wanted.
    """

    name: str
    slow: Choice
    fast: Choice
    bar: float
    goal: float

    def ratio(self, results: Results) -> float | None:
        """Return the ratio; None if one of both was not measured."""
        slow, fast = (
            min((one.seconds.median for one in results.measurements if choice(one)), default=None)
            for choice in (self.slow, self.fast)
        )
        return None if slow is None or fast is None else slow / fast


@dataclass(frozen=True)
class Goal:
    """Goals of one record.

    Attributes:
        title: What is compared with what.
        record: Name of the record.
        cases: The ratios.
        at_most: Whether ratios should be below the bars instead of above.
    """

    title: str
    record: str
    cases: Sequence[Case]
    at_most: bool = False


def choice(name: str, size: int | None = None, precision: str = "float32", mode: str | None = None) -> Choice:
    """Choose measurements of a model, of one size or all, in a precision, in one mode or all."""
    return lambda one: (
        one.name == name
        and (size is None or one.size == size)
        and one.precision == precision
        and (mode is None or one.mode == mode)
    )


def speed_ups(
    inline: str,
    softmax: str,
    sizes: Sequence[int],
    bars: Sequence[float],
    goals: Sequence[float],
    precision: str = "float32",
    mode: str | None = None,
) -> list[Case]:
    """Return the speed-up of a model over another at several sizes."""
    return [
        Case(f"{size}²", choice(softmax, size, precision, mode), choice(inline, size, precision, mode), bar, goal)
        for size, bar, goal in zip(sizes, bars, goals, strict=True)
    ]


DEIT = (INLINE_DEIT, SOFTMAX_DEIT, SIZES)
GOALS = [
    Goal(
        "DeiT-T over the best softmax, float32, one image",
        "resolution",
        speed_ups(*DEIT, (1.2, 1.65, 2.7, 4.7), (1.45, 2.0, 3.2, 5.6)),
    ),
    Goal(
        "the same, eight images",
        "resolution-batch8",
        speed_ups(*DEIT, (1.2, 1.7, 2.7, 4.7), (1.5, 2.1, 3.2, 6)),
    ),
    Goal(
        "DeiT-T over the best softmax, int8, one image",
        "resolution-int8",
        speed_ups(*DEIT, (1.2, 1.8, 2.8, 5), (1.5, 2.5, 4, 8), precision="int8"),
    ),
    Goal(
        "InLine-DeiT-T in int8 over itself in float32, one image",
        "resolution-int8",
        [
            Case(f"{size}²", choice(INLINE_DEIT, size), choice(INLINE_DEIT, size, "int8"), bar, 2.2)
            for size, bar in zip(SIZES, (1.6, 1.8, 1.8, 1.8), strict=True)
        ],
    ),
    Goal(
        "DeiT-T over softmax, plain `model(x)` of both, one image",
        "resolution",
        speed_ups(*DEIT, (1.0, 1.3, 2.0, 3.8), (1.2, 1.5, 2.5, 4.5), mode="eager"),
    ),
    Goal(
        "Swin-T with window 56 over the best softmax with window 7",
        "window",
        [Case("224²", choice(f"{SOFTMAX_SWIN}:window_size=7"), choice(f"{INLINE_SWIN}:window_size=56"), 1.1, 1.3)],
    ),
    Goal(
        "PVT-S over the best softmax, one image",
        "pvt",
        speed_ups("inline_pvt_small", "pvt_small", (224, 512), (1.1, 1.25), (1.25, 1.5)),
    ),
    Goal(
        "time of an InLine layer over that of its four projections",
        "layer",
        [
            Case(f"{tokens:,} tokens", choice("InLine", tokens), choice("projections", tokens), bar, goal)
            for tokens, bar, goal in zip(TOKENS, (1.6, 1.25, 1.3), (1.4, 1.15, 1.15), strict=True)
        ],
        at_most=True,
    ),
    *(
        Goal(
            f"exported DeiT-T over exported softmax in {name}, {precision}",
            "export",
            speed_ups(
                INLINE_DEIT,
                f"{INLINE_DEIT}:attention=softmax",
                (640, 1024),
                (2, 2),
                (2.5, 4),
                precision=precision,
                mode=f"exported-{runtime}{'-int8' if precision == 'int8' else ''}",
            ),
        )
        for runtime, name in (("onnxruntime", "ONNX Runtime"), ("openvino", "OpenVINO"))
        for precision in ("float32", "int8")
    ),
    Goal(
        "training step of InLine-DeiT-T over that without native kernels, eight images",
        "training",
        [Case("224²", choice(f"{INLINE_DEIT}, before"), choice(INLINE_DEIT), 1.15, 1.4)],
    ),
]

# What the README shows of them: the words before the sizes, by title.
README_TITLES = {
    "DeiT-T over the best softmax, float32, one image": "DeiT-T at",
    "DeiT-T over the best softmax, int8, one image": "DeiT-T in int8 at",
    "PVT-S over the best softmax, one image": "PVT-S at",
    "Swin-T with window 56 over the best softmax with window 7": "Swin-T, softmax with its usual window of 7, at",
}


def readme_table(records: Mapping[str, Results]) -> Table:
    """Return the speed-ups that the README shows; records as for goals_table()."""
    rows = []
    for title, shown in README_TITLES.items():
        (goal,) = [one for one in GOALS if one.title == title]
        results = records.get(goal.record)
        ratios = [None if results is None else case.ratio(results) for case in goal.cases]
        rows.append((f"{shown} {' / '.join(case.name for case in goal.cases)}", joined(ratios)))
    return Table(("InLine over the fastest softmax of any runtime", "speed-up"), rows, "Speed-ups")


def goals_table(records: Mapping[str, Results]) -> Table:
    """Return each goal with what was measured.

    Args:
        records: Results by the name of the record; goals whose record is missing have a dash.
    """
    rows = []
    for goal in GOALS:
        results = records.get(goal.record)
        ratios = [None if results is None else case.ratio(results) for case in goal.cases]
        rows.append(
            (
                goal.title,
                " / ".join(case.name for case in goal.cases),
                f"{'≤ ' if goal.at_most else ''}{joined([case.bar for case in goal.cases])}",
                joined([case.goal for case in goal.cases]),
                joined(ratios),
                verdict(goal, ratios),
                goal.record,
            )
        )
    headings = ("speed-up", "at", "bar", "goal", "measured", "bar reached", "record")
    return Table(headings, rows, "Goals and what was measured")


def joined(ratios: Sequence[float | None]) -> str:
    """Format ratios as 1.20 / 1.65 / –."""
    return " / ".join(MISSING if ratio is None else f"{ratio:.2f}" for ratio in ratios)


def verdict(goal: Goal, ratios: Sequence[float | None]) -> str:
    """Return whether all bars are reached and, if not, where and by how much they are missed."""
    if all(ratio is None for ratio in ratios):
        return "not recorded"
    missed = []
    for case, ratio in zip(goal.cases, ratios, strict=True):
        if ratio is None:
            missed.append(f"not recorded at {case.name}")
            continue
        short = ratio / case.bar - 1 if goal.at_most else 1 - ratio / case.bar
        if short > 0:
            missed.append(f"{case.name} by {100 * short:.0f} %")
    return "yes" if not missed else f"missed: {', '.join(missed)}"
