"""The submodules of a transformer in which an unhealthy device can err."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from holdfast.errors import ConfigError
from holdfast_lab.emulation.profile import ATTENTION, FFN

# Names of the two submodules of a decoder layer in common models.
NAMES = {
    **dict.fromkeys(("attn", "self_attn", "attention", "self_attention"), ATTENTION),
    **dict.fromkeys(("mlp", "ffn", "feed_forward"), FFN),
}
_SUBMODULE = re.compile(rf"(?:(.*)\.)?(\d+)\.({'|'.join(NAMES)})")


@dataclass(frozen=True)
class Submodule:
    """An attention or FFN of one decoder layer.

    Attributes:
        layer: Number of the layer, from 0.
        part: ``attn`` or ``ffn``.
        name: Path of the submodule in the model.
        block: Path of its decoder layer.
        first: Path of the module whose matmul reads the input; empty if it has no such module.
        last: Path of the module whose matmul writes the output; empty if it has no such module.
    """

    layer: int
    part: str
    name: str
    block: str
    first: str
    last: str


@dataclass(frozen=True)
class Place:
    """A module whose output or input gradient can be corrupted, and its submodule type."""

    name: str
    layer: int
    part: str


def submodules(model: nn.Module) -> list[Submodule]:
    """Find the attention and the FFN of every decoder layer, by the names in ``NAMES``."""
    found = [match for name, _ in model.named_modules() if (match := _SUBMODULE.fullmatch(name))]
    blocks: dict[str, dict[str, str]] = {}
    for match in found:
        block = match[0].rpartition(".")[0]
        blocks.setdefault(block, {})[NAMES[match[3]]] = match[0]
    whole = [(block, parts) for block, parts in blocks.items() if len(parts) == 2]
    if not whole:
        raise ConfigError(
            "the model has no decoder layers with an attention and an FFN: they are known by the "
            f"names {', '.join(NAMES)} below a numbered layer, as in blocks.0.attn; give the model "
            "itself, not a wrapper"
        )
    return [
        _submodule(model, layer, part, name, block)
        for layer, (block, parts) in enumerate(whole)
        for part, name in parts.items()
    ]


def _submodule(model: nn.Module, layer: int, part: str, name: str, block: str) -> Submodule:
    inner = [path for path, module in _leaves(model, name) if _multiplies(module)]
    return Submodule(layer, part, name, block, *((inner[0], inner[-1]) if inner else ("", "")))


def outputs(found: list[Submodule]) -> list[Place]:
    """Return the modules whose outputs are those of the given submodules."""
    return [Place(sub.name, sub.layer, sub.part) for sub in found]


def everywhere(model: nn.Module, found: list[Submodule]) -> list[Place]:
    """Find every module of the layers that multiplies no matrices.

    These are norms, dropouts and activations, and the layers themselves, whose outputs are
    residual streams. Modules beside the submodules, such as norms, count as part of the next
    submodule, or of the FFN if there is none.
    """
    places = []
    for block in dict.fromkeys(sub.block for sub in found):
        subs = [sub for sub in found if sub.block == block]
        part = FFN
        for path, module in reversed(list(_leaves(model, block))):
            part = next((sub.part for sub in subs if path.startswith(f"{sub.name}.")), part)
            if not _multiplies(module):
                places.append(Place(path, subs[0].layer, part))
        places.append(Place(block, subs[0].layer, FFN))
    return places


def _leaves(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.get_submodule(name).named_modules():
        if path and not any(module.children()):
            yield f"{name}.{path}", module


def _multiplies(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2
