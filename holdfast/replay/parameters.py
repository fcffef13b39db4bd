"""The parameters that a model's optimizer holds, also where FSDP2 has replaced them for a pass."""

from torch import nn


def reshard(model: nn.Module) -> None:
    """Let FSDP2 put its shards back in the place of the parameters that it gathered for a pass.

    A backward pass ends with this. After a forward pass alone, such as an evaluation, the outermost
    module keeps the gathered parameters, whose gradients are not those that the optimizer applies.
    They are gathered again in the next pass, with the same bits.
    """
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()  # type: ignore[operator]


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that hold the model's gradients between passes; call it in none."""
    reshard(model)
    return list(model.parameters())


def is_fsdp(module: nn.Module) -> bool:
    """Return true for a module to which ``fully_shard`` was applied."""
    return hasattr(module, "set_requires_gradient_sync")
