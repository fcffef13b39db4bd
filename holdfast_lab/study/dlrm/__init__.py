"""DLRM: checks for 8-bit recommendation models, the paper's and ours."""

from holdfast_lab.study.dlrm import (
    embedding_detection,
    embedding_overhead,
    gemm_detection,
    gemm_overhead,
)

STUDIES = (
    gemm_overhead.STUDY,
    gemm_detection.STUDY,
    embedding_overhead.STUDY,
    embedding_detection.STUDY,
)
