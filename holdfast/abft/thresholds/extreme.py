"""Magnitude of an element from which its row is suspect regardless of its checksum."""

# A product whose row has a larger Euclidean norm is "near INF" (ATTNChecker, section 4.2). Healthy
# training stays far below; an exponent flip in front of a matmul lands far above. It is a reason to
# look (the step is repeated), never by itself a fault.
EXTREME = 1e10
