"""The sizes of the parity groups that the nodes of a run form."""

from holdfast.errors import ConfigError

GROUP_NODES = 8


def group_sizes(
    nodes: int, most: int = GROUP_NODES, parities: int = 1
) -> tuple[tuple[int, int], ...]:
    """Return the sizes of the groups that interchangeable nodes form, and how many have each.

    They differ by at most 1, for example one of 5 and one of 4 for 9 nodes. A group has at most
    ``most`` nodes, or a few more where a smaller one would have no node besides its parities.

    Raises:
        ConfigError: a number is below 1.
    """
    if min(nodes, most) < 1:
        raise ConfigError(f"{nodes} nodes in groups of {most}: both must be at least 1")
    least = min(parities, most - 1) + 1
    count = max(1, min(-(-nodes // most), nodes // least))
    size, larger = divmod(nodes, count)
    found = (size + 1, larger), (size, count - larger)
    return tuple(pair for pair in found if pair[1])


def group_count(nodes: int, most: int = GROUP_NODES, parities: int = 1) -> int:
    """Return the number of groups (``group_sizes``)."""
    return sum(count for _, count in group_sizes(nodes, most, parities))


def described(nodes: int, most: int) -> str:
    """Return the groups in words, for example ``1 group of 5, 1 group of 4``."""
    rows = group_sizes(nodes, most)
    return ", ".join(f"{count} group{'s' * (count > 1)} of {size}" for size, count in rows)
