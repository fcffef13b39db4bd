"""ATTNChecker: attention in protected sections, checked as often as errors make it worth."""

from holdfast.study.attnchecker import (
    coverage,
    frequencies,
    gemm_share,
    loss,
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
    loss.STUDY,
    frequencies.STUDY,
    recovery.STUDY,
    scale.STUDY,
)
