"""Setting how often the ``Attention`` modules of a model are checked."""

from collections.abc import Mapping

from torch import nn

from holdfast.abft.attention.op import SECTIONS
from holdfast.abft.frequency import due
from holdfast.errors import ConfigError
from holdfast.nn.attention import Attention


def set_frequencies(model: nn.Module, frequencies: Mapping[str, float]) -> int:
    """Check the sections of every ``Attention`` of a model as often as planned, from its next call.

    Args:
        model: Any module, also one within a wrapper such as DDP.
        frequencies: Share of calls to check, 0 to 1, for each of S_AS, S_CL and S_O, as from
            ``planner.plan_frequencies(…)`` or ``holdfast plan attention --json``.

    Returns:
        The number of ``Attention`` modules whose frequencies were set.

    Guarantees: the calls that are checked depend only on their number in the module and on the
    share, so that ranks that make the same calls check the same ones, without communication. No
    result changes. Not covered: other products, which ``protect`` checks every time. A rank that
    runs a model more often than others (for an evaluation of its own) checks other calls than they
    do, which does no harm.

    Raises:
        ConfigError: A section is missing, unknown, or its share out of range, or the model has no
            ``Attention``; nothing was set.
    """
    if set(frequencies) != set(SECTIONS):
        raise ConfigError(
            f"frequencies of {sorted(frequencies)}: give one for each of {', '.join(SECTIONS)}"
        )
    shares = tuple(frequencies[name] for name in SECTIONS)
    for name, share in zip(SECTIONS, shares, strict=True):
        try:
            due(0, share)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
    found = [module for module in model.modules() if isinstance(module, Attention)]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no holdfast.nn.Attention, so that the plan would change "
            "nothing: build it with one (Attention.from_torch copies a torch attention's weights)"
        )
    for module in found:
        module.frequencies = shares
    return len(found)
