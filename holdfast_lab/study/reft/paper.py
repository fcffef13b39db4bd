"""The figures and formulas of the REFT paper, as data, by study."""

from dataclasses import replace

from holdfast_lab.study.published import Published, Range, at_least, at_most, rounded

# reft.survival: section 5 and figure 8.
GPUS, DP_PATHS = 3072, 6
ROUNDED_BYTES = 64
HARDWARE, SOFTWARE = 1e-4, 1e-5  # λ of a GPU, in days to the power of the shape
SHAPES = (1.0, 1.3, 1.5, 2.0)
THRESHOLD = 0.9
READ_SHAPE = 1.3  # shape for which the paper prints days
_READ_OFF = (
    "equations 2 and 3 with the settings as printed; both printed days are the first samples below "
    "0.9 of curves sampled about every half day (next table)"
)
SNAPSHOT_DAYS = Published(16.22, "figure 8", rounded("16.22"), _READ_OFF)
CHECKPOINT_DAYS = Published(0.5, "figure 8", rounded("0.5"), _READ_OFF)
# The spacing at which both days are read off was found by trying.
READ_OFF = tuple(
    replace(one, source="figure 8, read off", kind="input")
    for one in (SNAPSHOT_DAYS, CHECKPOINT_DAYS)
)

# reft.intervals: appendix A prints formulas and no number.
LEAST_BY_EQUATION_4 = Published(
    1.0,
    "appendix A, (5)",
    Range(1.0, 1.0 + 2**-50, "the optimum of equation 4, up to the last bits of doubles"),
    printed="1, the optimum",
)
# Equation 4 is of first order: it forgets failures while saving and restarting, and that a step may
# fail more than once, which is no longer rare where a save takes a percent of the time between
# failures.
LEAST_IN_TRUTH = Published(1.0, "appendix A, (5), exactly", printed="1, the optimum")
# 1 − (1−λ)^n − nλ(1−λ)^{n−1} as printed subtracts nearly equal numbers: in doubles nothing of it is
# left where λ is below 1e-8.
LOSS_PROBABILITY = Published(1.0, "appendix A, (7)", printed="equation 7")
MEGATRON_CHECKPOINT_S = 53.0  # section 1: time of writing 13 TB to the storage

# reft.micro: figure 9 has bars without numbers; the text says which is faster.
SHARED_MEMORY_OVER_IO = Published(
    None,
    "figure 9",
    Range(low=1.0, source="I/O is the slower one; the figure has no numbers"),
    "a small file may fit the storage's own cache",
    printed="I/O lags behind",
)

# reft.memory: the discussion of section 6.2.
MEMORY = Published(3.0, "section 6.2, memory", at_most("3"))

# reft.weak-scaling: section 6.2, of OPT-350M on 24 paths.
WEAK_SCALING = Published(18.74, "section 6.2, weak scaling", at_least("18.74"))
# Of those packages on a cloud storage; measured here are a local disk and ``torch.save``.
OVER_TORCHSNAPSHOT = Published(14.11, "section 6.2, TorchSnapshot")
OVER_CHECKFREQ = Published(106.02, "section 6.2, CheckFreq")
STAGE_SECONDS = Published(None, "figure 11", printed="curves without numbers")
RESTART = Published(
    3.21,
    "section 6.2, restart",
    rounded("3.21"),
    "the paper's 58 s include its network and its disk; here both nodes share one machine, and "
    "what is read was just written, so that the disk's cache has it",
)


def copied_by_a_node(nodes: int, state_bytes: int) -> Published:
    """Return the published share of the state that a node copies (section 4.1).

    It is a shard of 1/n, and with RAIM5 as many bytes again, of which a parity is made. Stripes are
    rounded up to ``ROUNDED_BYTES``.
    """
    value = 2 / nodes if nodes > 1 else 1.0
    more = 2 * nodes * ROUNDED_BYTES / state_bytes  # of the shard and of what the parity reads
    exact = Range(value - more, value + more, "2/n, and stripes in whole pieces of 64 bytes")
    return Published(value, "section 4.1", exact)


def linear(nodes: int) -> Published:
    """Return the claim of section 4.1, that nodes save in parallel without a common bottleneck."""
    return Published(float(nodes), "figure 10", printed=f"linear: {nodes}")
