"""Even choice of the executions that are checked if only a share of them is."""


def due(count: int, frequency: float) -> bool:
    """Return whether execution ``count`` (0 is the first) is one of those to check.

    Execution c is due iff ⌈(c+1)·f⌉ > ⌈c·f⌉, in exact arithmetic on the value that the float
    ``frequency`` stands for.

    Guarantees: of the first n executions exactly ⌈n·f⌉ are due, including the first one if f > 0,
    and of any n successive ones ⌊n·f⌋ or ⌈n·f⌉. Ranks with equal counts decide alike, as the answer
    depends on the arguments alone.

    Not covered: faults that recur with the period of the checks. At f = 1/k every k-th execution
    is checked, so that the others of a cycle of k never are.

    Args:
        count: Number of earlier executions of the same protected section.
        frequency: Share to check, from 0 (never) to 1 (always).

    Raises:
        ValueError: The frequency is not from 0 to 1, or the count is negative.
    """
    if not 0.0 <= frequency <= 1.0:
        raise ValueError(f"frequency = {frequency!r} must be between 0 (never) and 1 (always)")
    if count < 0:
        raise ValueError(f"count = {count} must be at least 0: it numbers the executions")
    share, whole = frequency.as_integer_ratio()
    return -(-(count + 1) * share // whole) > -(-count * share // whole)
