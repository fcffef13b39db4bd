"""The list of the zoo's loops, and the table of them that ``docs/loops.md`` shows."""

from collections.abc import Iterable

from holdfast.errors import ConfigError
from holdfast_lab.zoo.loop import Loop
from holdfast_lab.zoo.loops_frameworks import AccelerateLoop, FabricLoop
from holdfast_lab.zoo.loops_language import ChangingShapes, HuggingFace, NanoGpt, Rope
from holdfast_lab.zoo.loops_models import Checkpointed, CheckpointedReentrant, Compiled, Lora, Moe
from holdfast_lab.zoo.loops_optimizers import Dlrm, Lbfgs, MuonAdamW, Scaled
from holdfast_lab.zoo.loops_vision import Augmented, Diffusion, Gan, Mnist, Torchvision

LOOPS: dict[str, type[Loop]] = {
    loop.name: loop
    for loop in (
        *(NanoGpt, Torchvision, HuggingFace, FabricLoop, AccelerateLoop, Gan, Dlrm, Lbfgs),
        *(MuonAdamW, Scaled, ChangingShapes, Rope, Moe, Diffusion, Lora, Checkpointed),
        *(CheckpointedReentrant, Compiled, Augmented, Mnist),
    )
}


def chosen(names: Iterable[str]) -> list[type[Loop]]:
    """Return the loops of these names, or all of them if there is no name.

    Raises:
        ConfigError: There is no loop of a name.
    """
    names = list(names) or list(LOOPS)
    if unknown := [name for name in names if name not in LOOPS]:
        raise ConfigError(f"no loop is named {', '.join(unknown)}; there are {', '.join(LOOPS)}")
    return [LOOPS[name] for name in names]


def table() -> str:
    """Return the table of all loops in Markdown."""
    head = "| your loop | form | what is repeated | what to remember |\n| --- | --- | --- | --- |\n"
    rows = [
        f"| `{loop.name}`: {loop.like} | {loop.form} | {loop.repeated} | {loop.remember} |"
        for loop in LOOPS.values()
    ]
    return head + "\n".join(rows) + "\n"
