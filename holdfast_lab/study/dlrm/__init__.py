"""Studies of the DLRM-ABFT paper: checks of int8 matrix products and of embedding bags."""

from holdfast_lab.study.dlrm import (
    algorithm_2,
    embedding_detection,
    embedding_overhead,
    gemm_detection,
    gemm_overhead,
    modulus,
)

STUDIES = (
    gemm_overhead.STUDY,
    gemm_detection.STUDY,
    modulus.STUDY,
    embedding_overhead.STUDY,
    embedding_detection.STUDY,
    algorithm_2.STUDY,
)
