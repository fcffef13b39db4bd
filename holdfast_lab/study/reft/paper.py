"""The figures and formulas of the REFT paper, as data, by study."""

from holdfast_lab.study.registry import Published

# reft.survival: section 5 and figure 8.
GPUS, DP_PATHS = 3072, 6
HARDWARE, SOFTWARE = 1e-4, 1e-5  # λ of a GPU, in days to the power of the shape
SHAPES = (1.0, 1.3, 1.5, 2.0)
THRESHOLD = 0.9
READ_SHAPE = 1.3  # shape for which the paper prints days
_READ_OFF = (
    "equations 2 and 3 with the settings as printed; both printed days are the first samples below "
    "0.9 of curves sampled about every half day (next table)"
)
SNAPSHOT_DAYS = Published(16.22, 16.215, 16.225, "figure 8", _READ_OFF, printed="16.22")
CHECKPOINT_DAYS = Published(0.5, 0.45, 0.55, "figure 8", _READ_OFF)

# reft.intervals: appendix A prints formulas and no number.
LEAST_BY_EQUATION_4 = Published(
    1.0,
    1.0,
    1.0 + 1e-12,
    "appendix A, (5)",
    "a defect of ours",
    printed="1, the optimum",
)
LEAST_IN_TRUTH = Published(
    1.0,
    1.0,
    1.001,
    "appendix A, (5)",
    "equation 4 is of first order: it forgets failures while saving and restarting, and that a "
    "step may fail more than once, which is no longer rare where a save takes a percent of "
    "the time between failures",
    printed="1, the optimum",
)
_CANCELS = (
    "1 − (1−λ)^n − nλ(1−λ)^{n−1} as printed subtracts nearly equal numbers: in doubles nothing of "
    "it is left where λ is below 1e-8"
)
LOSS_PROBABILITY = Published(1.0, 0.999, 1.001, "appendix A, (7)", _CANCELS, printed="equation 7")
MEGATRON_CHECKPOINT_S = 53.0  # section 1: time of writing 13 TB to the storage

# reft.micro: figure 9 has bars without numbers; the text says which is faster.
SHARED_MEMORY_OVER_IO = Published(
    None,
    low=1.0,
    source="section 6.2, figure 9",
    otherwise="a small file may fit the storage's own cache",
    printed="I/O lags behind",
)

# reft.weak-scaling: section 6.2.
WEAK_SCALING = Published(
    18.74,
    low=18.74,
    source="section 6.2 (OPT-350M, 1 to 24 paths)",
    otherwise="shards of few MB, whose first bytes cost more than the rest; a machine that does "
    "other work",
)
_OTHER_STORAGE = (
    "the paper's six nodes share a cloud storage of 10 Gbit/s each; this is one local disk, and "
    "the save counts 24 nodes as parallel"
)
OVER_TORCHSNAPSHOT = Published(
    14.11, low=14.11, source="section 6.2 (24 paths, TorchSnapshot)", otherwise=_OTHER_STORAGE
)
OVER_CHECKFREQ = Published(
    106.02, low=106.02, source="section 6.2 (24 paths, CheckFreq)", otherwise=_OTHER_STORAGE
)


def copied_by_a_node(nodes: int) -> Published:
    """Return the published share of the state that a node copies (section 4.1).

    It is a shard of 1/n, and with RAIM5 as many bytes again, of which a parity is made.
    """
    value = 2 / nodes if nodes > 1 else 1.0
    why = "64-byte rounding of small states"
    return Published(value, value * 0.99, value * 1.01, "section 4.1", why)


def linear(nodes: int) -> Published:
    """Return the claim of section 4.1, that nodes save in parallel without a common bottleneck."""
    uneven = (
        "stages are not equal: the first has the embeddings, and a save ends with the slowest; "
        "figure 10 has no numbers"
    )
    text = f"linear: {nodes}"
    return Published(nodes, 0.9 * nodes, 1.1 * nodes, "section 4.1", uneven, printed=text)
