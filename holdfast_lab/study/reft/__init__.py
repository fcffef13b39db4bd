"""REFT: snapshots in memory with parity, how long they survive and how often to take them."""

from holdfast_lab.study.reft import intervals, micro, scaling, survival

STUDIES = (survival.STUDY, intervals.STUDY, micro.STUDY, scaling.WEAK, scaling.STRONG)
