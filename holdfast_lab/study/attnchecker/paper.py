"""The tables of the ATTNChecker paper, as data, by study."""

from dataclasses import replace

from holdfast.inject.statistics import Rate
from holdfast.planner.vulnerability import published
from holdfast_lab.study.published import (
    Published,
    Range,
    at_least,
    at_most,
    counted,
    exactly,
    rounded,
)

# attnchecker.coverage, attnchecker.detection: section 5.2, about 5,000 faults in each matrix.
FAULTS = 5000
_ALL = counted(Rate(FAULTS, FAULTS), f"all of about {FAULTS:,} in each matrix")
ALL_DETECTED = Published(100.0, "section 5.2", _ALL)
ALL_CORRECTED = Published(100.0, "section 5.2, corrected", _ALL)
REBUILT = Published(100.0, "section 5.2, by checksums", _ALL)
# A recomputation for which a clean copy stands cannot leave a fault that was detected.
CORRECTED_BY_COPY = Published(100.0, "section 5.2, corrected", _ALL, kind="certain")

# attnchecker.frequencies: section 5.4 and figure 10, for BERT.
FREQUENCY_RATES = tuple(range(13, 21))  # errors per 1e25 flops of each of the three types
FREQUENCY_TARGET = 1e-11  # failures for each execution of attention
ADAPTIVE_OVERHEAD = Published(
    None,
    "section 5.4",
    at_most("3.6"),
    "holdfast checks every product by itself here, on a CPU, and carries no checksums",
)
# At the printed target no check is needed, and at ours the paper's own overhead went in.
ADAPTIVE_BY_INPUT = replace(ADAPTIVE_OVERHEAD, source="figure 10, planned", kind="input")
CHECKS_SET_IN = Published(
    None,
    "figure 10",
    Range(13.0, 20.0, "the error rates of the figure, at some of which checks are on"),
    "the settings as printed do not give figure 10: an attention of 1e10 flops fails "
    "5e-14 times an execution at 20 errors of each type per 1e25 flops, far below the target of "
    "1e-11, so nothing need be checked at any of its rates",
)

# attnchecker.scale: section 5.6 and figure 12, which print no number.
NEARLY_CONSTANT = Published(None, "figure 12", printed="nearly constant")

# attnchecker.gemm-share: table 2.
_COUNTED = "the paper does not say what it counted; the softmax alone is our reading of its figures"
GEMM_SHARE = {
    model: Published(float(share), "table 2", rounded(share), _COUNTED)
    for model, share in {
        "bert": "99.7",
        "gpt2": "99.5",
        "gpt-neo": "99.3",
        "roberta": "99.7",
    }.items()
}

# attnchecker.propagation: table 1. ∞* is INF of both signs, Θ NaN, M a mixture.
PROPAGATION = {
    "inf": {
        "Q": {"AS": "1R-∞*", "AP": "1R-Θ", "CL": "1R-Θ", "O": "1R-Θ"},
        "K": {"AS": "1C-∞*", "AP": "2D-Θ", "CL": "2D-Θ", "O": "2D-Θ"},
        "V": {"CL": "1C-M", "O": "2D-M"},
        "AS": {"AP": "1R-Θ", "CL": "1R-Θ", "O": "1R-Θ"},
        "CL": {"O": "1R-∞"},
    },
    "nan": {
        "Q": {"AS": "1R-Θ", "AP": "1R-Θ", "CL": "1R-Θ", "O": "1R-Θ"},
        "K": {"AS": "1C-Θ", "AP": "2D-Θ", "CL": "2D-Θ", "O": "2D-Θ"},
        "V": {"CL": "1C-Θ", "O": "2D-Θ"},
        "AS": {"AP": "1R-Θ", "CL": "1R-Θ", "O": "1R-Θ"},
        "CL": {"O": "1R-Θ"},
    },
    "near_inf": {
        "Q": {"AS": "1R-M", "AP": "1R-Θ", "CL": "1R-Θ", "O": "1R-Θ"},
        "K": {"AS": "1C-M", "AP": "2D-Θ", "CL": "2D-Θ", "O": "2D-Θ"},
        "V": {"CL": "1C-M", "O": "2D-M"},
        "AS": {"AP": "1R-M", "CL": "1R-M", "O": "1R-M"},
        "CL": {"O": "1R-M"},
    },
}
_LAST_KEYS = (
    "an error in K or V at the last positions of a causal or padded sequence is seen by few rows, "
    "or by none"
)


SAME_TYPE = "types as well, %"
_TYPES = (
    "an INF times weights of both signs gives both; whether it meets a zero depends on the mask, "
    "and whether near-INF overflows on the weights: these are random and smaller than trained "
    "ones, so that huge scores stay finite, and their softmax picks one key where NaN was found"
)


_ONE_PATTERN = exactly(100.0, "one pattern a cell, without exceptions")


def propagation(kind: str, struck: str, models: str = "") -> dict[str, Published]:
    """Return table 1's pattern of each later matrix, which all trials have to show.

    ``models`` is added to the name of the table.
    """
    why = _LAST_KEYS if struck in ("K", "V") else ""
    found = {
        matrix: Published(100.0, f"table 1, shapes{models}", _ONE_PATTERN, why, printed=text)
        for matrix, text in PROPAGATION[kind][struck].items()
    }
    return found | {
        SAME_TYPE: Published(100.0, f"table 1, types{models}", _ONE_PATTERN, _TYPES, "all")
    }


# attnchecker.vulnerability: table 3 from the planner.
PLANNED = {"bert": "bert-base"}  # names of models in the planner that differ from the family
_OTHER_MODELS = (
    "near-INF: random weights make Q and K small, and torch's CPU LayerNorm makes NaN of rows "
    "whose squares overflow; without these two (second table) the rates come near the paper's. INF "
    "and NaN: transformers now adds GPT-2's mask to the scores, and they survive that"
)


def vulnerability(model: str, matrix: str, kind: str, *, by_formula: bool = False) -> Published:
    """Return the published probability of a non-trainable state, in percent."""
    rate = published(PLANNED.get(model, model))[matrix][kind]
    said = f"{100 * rate:.1f} % of about {FAULTS:,}"
    expected = counted(Rate(round(rate * FAULTS), FAULTS), said)
    names = {"inf": "INF", "nan": "NaN", "near_inf": "near-INF"}
    table = f"table 3, {names[kind]}" + (", Q and K of unit variance" if by_formula else "")
    return Published(100 * rate, table, expected, _OTHER_MODELS)


# attnchecker.loss: figure 6 has curves and no number; section 5.2 says "negligible impact".
NO_TRACE = Published(
    None,
    "figure 6",
    exactly(0.0, "a recomputation has the bits of a run without faults"),
    printed="negligible",
    kind="certain",
)
WITHIN_NOISE = Published(
    None,
    "figure 6",
    Range(high=1.0, source="curves that coincide: closer than those of two seeds, measured here"),
    printed="negligible",
)


def all_repaired(faults: int) -> Published:
    """Return the claim of section 5.2, that every fault is repaired."""
    return Published(float(faults), "section 5.2, corrected", exactly(faults, "all of them"))


# attnchecker.recovery: section 5.5 and figure 11, in percent of a training step.
def _correction(value: str) -> Published:
    return Published(float(value), "figure 11, corrections", at_most(value))


CORRECTIONS = dict.fromkeys("QKV", _correction("0.7")) | {
    "AS": _correction("0.3"),
    "CL": _correction("0.3"),
    "O": _correction("3.9"),
}
RESTORE = Published(
    None, "figure 11, restored", Range(200.0, source="more than 200 %"), printed="> 200"
)
TIMES_CHEAPER = Published(
    49.0, "figure 11, times cheaper", at_least("49"), printed="up to 49", best=True
)


# attnchecker.overhead: section 5.3, figures 7 and 8; averages of six models, and the largest gains.
def _gain(value: str, of: str) -> Published:
    most, said = at_least(value), f"up to {value}"
    return Published(float(value), f"figure 8, {of}", most, printed=said, best=True)


OVERHEADS = {
    "attention, forward and backward": Published(11.0, "figure 7, attention", at_most("11")),
    "training step": Published(7.0, "figure 7, step", at_most("7")),
}
TIMES_OPTIMISED = {
    "attention, forward and backward": _gain("8.6", "attention"),
    "training step": _gain("6.0", "step"),
}

# attnchecker.encoding: figure 9, against cuBLAS 12.5 on an A100.
_OTHER_GEMM = (
    "a CPU's GEMM of two columns is bound by memory as the encoder is, which computes the "
    "thresholds' statistics as well"
)
TIMES_GEMM = Published(
    13.0, "figure 9", at_least("13"), _OTHER_GEMM, printed="13 on a GPU", best=True
)
ENCODER_BANDWIDTH = Published(
    91.4, "figure 9, bandwidth", at_least("91.4"), printed="up to 91.4", best=True
)
GEMM_BANDWIDTH = Published(
    10.0,
    "figure 9, bandwidth of a GEMM",
    Range(high=10.0, source="less than 10 %"),
    _OTHER_GEMM,
    printed="less than 10",
)
