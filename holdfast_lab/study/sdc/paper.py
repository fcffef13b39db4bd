"""The published values of the study of silent data corruption; fine-tuning: ``paper_tasks``."""

from dataclasses import replace
from math import nextafter

from holdfast_lab.emulation.profile import SUBMODULES, NodeProfile
from holdfast_lab.study.published import Published, Range, exactly, rounded

# sdc.submodules: tables 1, 2 and 6 to 9 are what the emulator of unhealthy devices is given.
_FEW = "few values were struck, and they come in bursts, so that counts vary more than Wilson's"
_SILENT = exactly(0.0, "the node is silent in lock-step")


def frequency(value: float, source: str) -> Published:
    """Make a published share of values, of three digits."""
    if not value:
        return Published(0.0, source, _SILENT, kind="input")
    return Published(value, source, rounded(f"{value:.2e}"), _FEW, kind="input")


def severity(value: float, source: str) -> Published:
    """Return the published severity of the worst call, in far more calls than are made here."""
    return Published(value, source, kind="input")


def mean_frequencies(profile: NodeProfile) -> dict[str, Published]:
    """Return the values of table 1; nodes that it leaves out have none."""
    printed = profile.mean_frequency
    return {name: frequency(printed.get(name, 0.0), "table 1") for name in SUBMODULES}


def worst_severities(profile: NodeProfile) -> dict[str, Published]:
    """Return the values of table 2."""
    printed = profile.worst_severity
    return {name: severity(printed.get(name, 0.0), "table 2") for name in SUBMODULES}


FIRST_STEPS = Published(
    None,
    "figure 4",
    Range(nextafter(1.0, 2.0), source="the first steps are higher; the figure has no scale"),
    printed="large initial spikes",
    kind="input",
)
MOSTLY_NONE = Published(
    None,
    "figure 3",
    Range(nextafter(50.0, 51.0), 100.0, "no mismatch during the majority of the time"),
    printed="most of them",
    kind="input",
)
NO_MISMATCH = Published(0.0, "section 3.1", exactly(0.0, "healthy nodes agree bit for bit"))


# sdc.gradients: figure 5, whose noise depends on frequencies that the paper does not print.
def wcnts(profile: NodeProfile) -> Published:
    """Return the published worst-case noise-to-signal ratio of a node."""
    return Published(profile.wcnts, "figure 5, by node")


WORST_NODE = Published(0.051, "figure 5, worst node")

# sdc.drift: figure 6, which has curves and no number.
SAME_LOSS = Published(
    None,
    "figure 6, losses",
    Range(high=1.0, source="curves that coincide: closer than another seed's, measured here"),
    "a small model is moved by few values",
    printed="nearly identical",
)
DRIFTS = Published(
    None,
    "figure 6, parameters",
    Range(low=5e-324, source="not 0; the curves have no scale at the first steps"),
    printed="drifts away",
)
CLEAN_BEFORE_ONSET = Published(
    0.0, "section 6.2, node 13", exactly(0.0, "no difference at all"), printed="none", kind="input"
)
SIMILAR_RATES = Published(None, "figure 6, rates", printed="similar on most nodes")

# sdc.abft: appendix D, which has a figure without numbers.
Values = dict[str, Published]


def abft_flags(node: int) -> Published:
    """Return the published share of faults that equation 6's bound flags, in words."""
    printed = "frequently" if node == 14 else "little to no errors"
    return Published(None, "figure 10", printed=printed)


NO_FALSE_FLAG = Published(0.0, "appendix D.4", exactly(0.0, "no false flag at fp32"))

# sdc.bf16: the same appendix, which says with what bf16 and fp32 were checked, but no number.
_SEVERAL = Range(low=5e-324, source="not 0: several false positives on healthy nodes")
_SAME_SCALE = (
    "an erratum: bound and residual both grow with u, so that what bf16 flags fp32 flags as well; "
    "induced norms flag nothing, largest elements flag operands with a mean"
)


def reduced_precision(precision: str, norms: str = "") -> Published | None:
    """Return what appendix D.4 says of clean products; of fp16 it only says that τ is too large."""
    source = ", ".join(filter(None, ("appendix D.4", precision, norms)))
    if precision == "bf16":
        several = "several false positives"
        return Published(None, source, _SEVERAL, _SAME_SCALE, printed=several, best=True)
    return (
        replace(NO_FALSE_FLAG, source=source, otherwise=_SAME_SCALE)
        if precision == "fp32"
        else None
    )


# sdc.mitigation: section 7 proposes recomputation and measures nothing. The shadow of every step is
# a healthy device, so that it cannot miss a difference.
RECOMPUTED = Published(
    1.0, "section 7", exactly(1.0, "reliably"), printed="recomputation to detect", kind="certain"
)
