"""The algebra of checksums: encoding, residuals, location and repair, in plain torch."""

from holdfast.abft.checksums.extreme import Bound, Correction, Status, correct_vectors, near_inf
from holdfast.abft.checksums.patterns import MatrixCorrection, Side, correct_matrix
from holdfast.abft.checksums.positions import Bits, Encoding, encoding
from holdfast.abft.checksums.rows import encode_rows, row_residual, self_consistent
from holdfast.abft.checksums.weights import ones, signs

__all__ = [
    "Bits",
    "Bound",
    "Correction",
    "Encoding",
    "MatrixCorrection",
    "Side",
    "Status",
    "correct_matrix",
    "correct_vectors",
    "encode_rows",
    "encoding",
    "near_inf",
    "ones",
    "row_residual",
    "self_consistent",
    "signs",
]
