"""Names of fault sites (``holdfast.sites``), for schedules and reports, which need no torch."""

STAGES = ("checksum", "operand", "output")
# Values of one tile of fused attention, in its forward pass and in its backward pass.
TILE_STAGES = (
    *("scores", "probabilities", "accumulator", "state"),
    *("grad_probabilities", "grad_query", "grad_key", "grad_value", "grad_scores"),
    # P (forward only) and dS as though they had been computed so: their sums follow them.
    *("exponentials", "grad_softmax"),
)
ROLES = ("forward", "grad_a", "grad_b")
ATTENTION_ROLE = "grad_qkv"
FORWARD_TILES = ("scores", "probabilities", "accumulator", "state", "exponentials")
BACKWARD_TILES = (
    *("scores", "probabilities", "grad_probabilities", "grad_query", "grad_key", "grad_value"),
    *("grad_scores", "grad_softmax"),
)
