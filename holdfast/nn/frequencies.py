"""Setting how often the ``Attention`` modules of a model are checked."""

from collections.abc import Mapping

from torch import nn

from holdfast.abft.attention.sections import SECTIONS
from holdfast.abft.frequency import due
from holdfast.errors import ConfigError
from holdfast.nn.attention import Attention


def set_frequencies(model: nn.Module, frequencies: Mapping[str, float]) -> int:
    """Check the sections of every ``Attention`` of a model as often as planned, from its next call.

    Args:
        model: any module; wrappers (DDP) are fine.
        frequencies: share of calls to check, 0 to 1, of S_AS, S_CL and S_O each: those of
            ``planner.plan_frequencies(…)``, or of ``holdfast plan attention --json``.

    Returns:
        The number of attentions set.

    Guarantees: which calls are checked follows from their number in the module and the share
    alone, so ranks that call alike check alike, without communication; no result changes by it.
    Not covered: other products, which ``protect`` checks every time; a rank that runs a model more
    often than others (an evaluation of its own) checks other calls than they do, which does no
    harm.

    Raises:
        ConfigError: a section is missing, unknown, or its share out of range, or the model has no
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
