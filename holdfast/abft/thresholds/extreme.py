"""Norm from which a row is suspect regardless of its checksum."""

# A row of a product with a larger Euclidean norm is "near INF" (ATTNChecker, section 4.2). In
# healthy training norms stay far below, and a flip in the exponent of an operand gives one far
# above. Such a row alone is no fault, but the step is repeated.
EXTREME = 1e10
