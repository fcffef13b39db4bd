"""Choice of the executions to check when only a share of them is checked, evenly spread."""


def due(count: int, frequency: float) -> bool:
    """Return whether execution ``count`` (0 is the first) is one of those to check.

    Execution c is due iff ⌈(c+1)·f⌉ > ⌈c·f⌉, in exact arithmetic on the value that the float
    ``frequency`` stands for.

    Guarantees: of the first n executions exactly ⌈n·f⌉ are due, so the first one is if any is; of
    any n successive ones ⌊n·f⌋ or ⌈n·f⌉. The answer depends on the arguments alone: ranks that
    count alike decide alike.

    Not covered: faults whose period is that of the checks. At f = 1/k every k-th execution is
    checked, always the same one of the k.

    Args:
        count: Number of earlier executions of the same protected section.
        frequency: share to check, from 0 (never) to 1 (always).

    Raises:
        ValueError: the frequency is not in [0, 1], or the count is negative.
    """
    if not 0.0 <= frequency <= 1.0:
        raise ValueError(f"frequency = {frequency!r} must be between 0 (never) and 1 (always)")
    if count < 0:
        raise ValueError(f"count = {count} must be at least 0: it numbers the executions")
    share, whole = frequency.as_integer_ratio()
    return -(-(count + 1) * share // whole) > -(-count * share // whole)
