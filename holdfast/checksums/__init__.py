"""The algebra of checksums: encoding and residuals, in plain torch."""

from holdfast.checksums.rows import encode_rows, row_residual, self_consistent

__all__ = ["encode_rows", "row_residual", "self_consistent"]
