"""The published values of the study of silent data corruption, by study."""

from holdfast_lab.emulation.profile import SUBMODULES, NodeProfile, published
from holdfast_lab.study.registry import Published

# sdc.submodules: tables 1, 2 and 6 to 9. A frequency agrees within a fifth, as four layers are
# averaged and printed to three digits. A severity is that of the worst of a few dozen calls; the
# paper's is that of the worst call in 4,500 steps.
FREQUENCY_SLACK = 0.2
SEVERITY_LOW, SEVERITY_HIGH = 0.1, 1.5
_FEW = "few values were struck"
_FEWER_CALLS = "the worst of fewer calls than the paper's"
_SILENT = "a defect of ours: the node is silent in lock-step"


def frequency(value: float, source: str) -> Published:
    """Make a published share of values."""
    if not value:
        return Published(0.0, 0.0, 0.0, source, _SILENT)
    low, high = value * (1 - FREQUENCY_SLACK), value * (1 + FREQUENCY_SLACK)
    return Published(value, low, high, source, _FEW)


def severity(value: float, source: str) -> Published:
    """Return the published severity of the worst call."""
    if not value:
        return Published(0.0, 0.0, 0.0, source, _SILENT)
    return Published(value, SEVERITY_LOW * value, SEVERITY_HIGH * value, source, _FEWER_CALLS)


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
    low=2.0,
    source="figure 4",
    otherwise="a defect of ours: figure 4 shows a high peak, without a scale",
    printed="large initial spikes",
)
NO_MISMATCH = Published(0.0, 0.0, 0.0, "section 3.1", "a defect of ours: two healthy passes differ")

# sdc.gradients: figure 5.
_WCNTS = (
    "the paper prints no frequency for this setting, and finds it to be higher than in lock-step "
    "(section 9)"
)
WCNTS_FACTOR = 10.0


def wcnts(profile: NodeProfile) -> Published:
    """Return the published worst-case noise-to-signal ratio, met within a factor of ten."""
    low, high = profile.wcnts / WCNTS_FACTOR, profile.wcnts * WCNTS_FACTOR
    return Published(profile.wcnts, low, high, "figure 5", _WCNTS)


WORST_NODE = Published(
    0.051, high=0.51, source="section 5.2", otherwise="errors as large as table 2 prints them"
)

# sdc.drift: figure 6, which has curves and no number.
SAME_LOSS = Published(
    None,
    high=1.0,
    source="figure 6",
    otherwise="a small model is moved by few values",
    printed="nearly identical",
)
DRIFTS = Published(
    None,
    low=1e-12,
    source="figure 6",
    otherwise="nothing was struck in so few steps",
    printed="drifts away",
)
CLEAN_BEFORE_ONSET = Published(
    0.0, 0.0, 0.0, "section 6.2", "a defect of ours: it is healthy before its onset", "none"
)
SIMILAR_RATES = Published(
    None,
    high=10.0,
    source="figure 6",
    otherwise="in so few steps a drift still has the size of the errors that began it; it grows "
    "fastest where it is small",
    printed="similar on most nodes",
)

# sdc.finetune: table 5, CosmosQA, of which figure 7 shows the losses.
TASK = "cosmosqa"
_OTHER_TASK = "another task and a small model, whose boundary fewer questions are near to"


def disagreement(profile: NodeProfile) -> Published:
    """Return the published disagreement in percent; a node that agreed has to agree here."""
    value = profile.disagreement[TASK]
    if profile.silent(TASK):
        return Published(0.0, 0.0, 0.0, "table 5", "a defect of ours: the node is silent here")
    return Published(value, 1e-9, 100.0, "table 5", _OTHER_TASK)


_SPIKED = (
    "the loss spike near the end that ruined it is not emulated: the errors that table 2 prints of "
    "node 6 are not larger than the values"
)


def accuracy_change(profile: NodeProfile) -> Published:
    """Return the published change of accuracy in points; a ruined model must be ruined here too."""
    healthy = published()["finetuning"]["healthy_accuracy"][TASK]
    value = profile.accuracy[TASK] - healthy
    if profile.accuracy[TASK] == 0:
        return Published(value, high=value / 2, source="table 5", otherwise=_SPIKED)
    return Published(value, -5.0, 5.0, "table 5", _OTHER_TASK)


SEED_DISAGREEMENT = Published(
    published()["finetuning"]["another_seed_disagreement"][TASK],
    low=1e-9,
    source="table 5",
    otherwise=_OTHER_TASK,
)
BELOW_SEED = Published(
    None,
    high=1.0,
    source="section 6.2",
    otherwise="few questions are near the boundary, and few of them make the difference",
    printed="not larger than another seed's",
)

# sdc.abft: appendix D, which has a figure without numbers. We read "little" as a tenth.
Values = dict[str, Published]
_FLAGGED = "the bound is loose for some of this node's errors, not for all of them"
_OTHER_ERRORS = "at fp32 the paper's node 14 erred otherwise than in lock-step (appendix D.2)"


def abft_flags(node: int) -> Published:
    """Return the published share of faults, in percent, that equation 6's bound flags."""
    source = "appendix D.2"
    if node == 14:
        return Published(
            None, low=10.0, source=source, otherwise=_OTHER_ERRORS, printed="frequently"
        )
    return Published(
        None, high=10.0, source=source, otherwise=_FLAGGED, printed="little to no errors"
    )


NO_FALSE_FLAG = Published(
    0.0, 0.0, 0.0, "appendix D.4", "a defect of ours: the bound has no false flags at fp32"
)

# sdc.mitigation: section 7 proposes recomputation and measures nothing.
RECOMPUTED = Published(
    1.0, 1.0, 1.0, "section 7", "a defect of ours", "recomputation to reliably detect"
)
