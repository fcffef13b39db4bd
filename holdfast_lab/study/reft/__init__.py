"""Studies of the REFT paper: in-memory snapshots with parity, their survival and their interval."""

from holdfast_lab.study.reft import intervals, memory, micro, restart, scaling, survival

STUDIES = (
    *(survival.STUDY, intervals.STUDY, micro.STUDY, memory.STUDY),
    restart.STUDY,
    *(scaling.WEAK, scaling.STRONG),
)
