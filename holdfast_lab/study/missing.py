"""Tables and figures of the papers that no study measures, with the reason."""

from holdfast_lab.study.published import Verdict

_GPU = Verdict.NOT_HERE

# Every other table and figure is the source of a published value, or a drawing (``DRAWINGS``).
MISSING: dict[str, dict[str, tuple[Verdict, str]]] = {
    "V-ABFT": {
        "section 6.8": (_GPU, "overhead in FTAN-GEMM on a 910B: < 2 % of 11.98 %"),
    },
    "ATTNChecker": {},
    "SDC study": {},
    "DLRM": {},
    "REFT": {
        "figure 3": (_GPU, "utilisation of CPU and GPU in pretraining"),
        "figure 9, device to host": (_GPU, "more than 3 times CheckFreq's speed"),
        "section 6.2, 58 s": (_GPU, "of a restart, over the network of six nodes"),
    },
}

# Drawings, programs and tables of settings, which have no result.
DRAWINGS = {
    "V-ABFT": (),
    "ATTNChecker": ("figure 1", "figure 2", "figure 3", "figure 4", "figure 5"),
    "SDC study": ("figure 1", "figure 2", "figure 8", "figure 9", "figure 11", "table 4"),
    "DLRM": ("figure 1", "figure 2", "figure 3", "figure 4", "table I"),
    "REFT": ("figure 1", "figure 2", "figure 4", "figure 5", "figure 6", "figure 7", "table 1"),
}
