"""``dlrm.gemm-overhead``: the overhead of checks of int8 matrix products (figure 5).

For each of the 28 shapes, FBGEMM's own pipeline, which requantises block by block, is compared with
the same product checked. All run on one thread and in turn, each with a packed weight of its own.
"""

from collections.abc import Callable, Iterator
from statistics import median

import torch

from holdfast import native
from holdfast.abft.int8_gemm.weights import Int8Weights
from holdfast_lab.study.dlrm.gemm_shapes import SHAPES, TINY, UNIFORM
from holdfast_lab.study.published import Published, Range
from holdfast_lab.study.registry import Figure, Progress, Row, Settings, Study, watched
from holdfast_lab.study.timing import seconds

VARIANTS = {"mod127": "mod127, %", "digits": "digits, %", "unchecked": "our pass, no check, %"}
BARE, ALL = "unprotected, µs", "all shapes"
BELOW = {limit: f"shapes below {limit} %" for limit in (5, 10, 20)}
MEDIAN, WORST = "median, %", "worst, %"
GOALS = {MEDIAN: 3.0, WORST: 10.0}
SCALES = (0.02, 3, 5.0, 100)
SAMPLE_S = 0.002
# Section VI-A: how many of the 28 shapes have less overhead.
PAPER = {
    BELOW[limit]: Published(
        count, "figure 5", Range(low=count, source=f"at least {count} of 28 shapes")
    )
    for limit, count in {5: 7, 10: 17, 20: 28}.items()
}

Run = Callable[[], object]


def activations(m: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """Draw uniform operands, of seven bits where FBGEMM's own products would saturate."""
    a = UNIFORM.draw_a(m, k, generator)
    return a >> 1 if native.core is not None and native.core.int8_saturates() else a


def variants(shape: tuple[int, int, int], generator: torch.Generator) -> dict[str, Run]:
    """Return each way to compute a product; ``baseline`` is FBGEMM's own."""
    m, n, k = shape
    a = activations(m, k, generator)
    out = torch.empty((m, n), dtype=torch.uint8)
    state = generator.get_state()

    def packed(encoding: str) -> Int8Weights:
        return UNIFORM.pack(n, k, encoding, generator.set_state(state))

    def run(weights: Int8Weights, verify: bool) -> Run:
        scales, multiply = weights.scales(*SCALES), weights.gemm.multiply
        return lambda: multiply(a, out, scales, verify)

    plain = packed("digits")
    baseline = run(plain, False)
    if plain.native and native.core is not None:
        scales = plain.scales(*SCALES)
        unprotected = plain.gemm.multiply_unprotected  # type: ignore[attr-defined]

        def baseline() -> object:
            return unprotected(a, out, scales)

    return {
        "baseline": baseline,
        "unchecked": run(packed("digits"), False),
        "digits": run(packed("digits"), True),
        "mod127": run(packed("mod127"), True),
    }


def ratios(runs: dict[str, Run], pairs: int) -> tuple[float, dict[str, float]]:
    """Return the seconds of the baseline, and the median ratio of each variant to it."""
    for run in runs.values():
        run()
    once = min(_seconds(runs["baseline"], 1) for _ in range(5))
    times = max(1, int(SAMPLE_S / once))
    samples = [{name: _seconds(run, times) for name, run in runs.items()} for _ in range(pairs)]
    found = {name: median(s[name] / s["baseline"] for s in samples) for name in VARIANTS}
    return median(s["baseline"] for s in samples), found


def _seconds(run: Run, times: int) -> float:
    run()
    return seconds(lambda: [run() for _ in range(times)]) / times


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    shapes = settings.choose(TINY, SHAPES, SHAPES)
    pairs = settings.choose(3, 15, 60)
    overheads: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for shape in watched(shapes, progress):
        generator = settings.generator("gemm-overhead", shape)
        bare_s, found = ratios(variants(shape, generator), pairs)
        measured = {BARE: 1e6 * bare_s}
        for name, label in VARIANTS.items():
            overheads[name].append(100 * (found[name] - 1))
            measured[label] = overheads[name][-1]
        yield Row("overhead by shape, one thread", {"m, n, k": str(shape)}, measured)
    for name, found_of in overheads.items():
        yield _summary(name, found_of)


def _summary(name: str, overheads: list[float]) -> Row:
    below = {text: sum(x < limit for x in overheads) for limit, text in BELOW.items()}
    return Row(
        ALL,
        {"variant": name, "shapes": len(overheads)},
        {MEDIAN: median(overheads), WORST: max(overheads), **below},
        PAPER if name == "mod127" else {},
    )


def _verdict(rows: list[Row]) -> str:
    """Check that the digit checksums meet the overhead goals over all shapes."""
    for row in rows:
        if row.table == ALL and row.case["variant"] == "digits":
            for name, goal in GOALS.items():
                if row.measured[name] > goal:
                    return f"digits: {name} is {row.measured[name]:.1f}, more than {goal:g}"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    axes = figure.subplots()
    shapes = [row for row in rows if "m, n, k" in row.case]
    for name in ("mod127", "digits"):
        axes.plot([row.measured[VARIANTS[name]] for row in shapes], "o", label=name)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(shapes)), [str(row.case["m, n, k"]) for row in shapes], rotation=90)
    axes.set(xlabel="m, n, k", ylabel="overhead over FBGEMM's own pipeline, %")
    axes.legend()


STUDY = Study(
    name="dlrm.gemm-overhead",
    paper="DLRM, section VI-A, figure 5",
    reproduces="what the check costs an int8 product of each of 28 shapes, over FBGEMM unprotected",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)
