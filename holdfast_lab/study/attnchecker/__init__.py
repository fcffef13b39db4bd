"""ATTNChecker: attention in protected sections, checked as often as errors make it worth."""

from holdfast_lab.study.attnchecker import (
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
    loss.STUDY,
    overhead.STUDY,
    encoding.STUDY,
    frequencies.STUDY,
    recovery.STUDY,
    scale.STUDY,
)
