"""Studies of the ATTNChecker paper, which checks sections of attention at adaptive frequencies."""

from holdfast_lab.study.attnchecker import (
    checksum_repair,
    coverage,
    detection,
    encoding,
    frequencies,
    gemm_share,
    loss,
    overhead,
    propagation,
    recovery,
    scale,
    vulnerability,
)

STUDIES = (
    propagation.STUDY,
    gemm_share.STUDY,
    vulnerability.STUDY,
    coverage.STUDY,
    detection.STUDY,
    checksum_repair.STUDY,
    loss.STUDY,
    overhead.STUDY,
    encoding.STUDY,
    frequencies.STUDY,
    recovery.STUDY,
    scale.STUDY,
)
