"""Settings of a ``Trainer`` that a Guard cannot follow."""

from typing import Any

from holdfast.errors import ConfigError

# How accelerate distributes a run in which each rank has its own pass and its own gradients.
_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
_IN_BACKWARD = ("lomo", "layerwise")


def check_trainer(trainer: Any) -> None:
    """Check that the steps of a trainer can be verified and repeated.

    Raises:
        ConfigError: They cannot: says which setting, why, and what to do.
    """
    args, distributed = trainer.args, str(trainer.accelerator.distributed_type).split(".")[-1]
    if any(hasattr(callback, "guard") for callback in trainer.callback_handler.callbacks):
        raise ConfigError("this trainer has a Guard already: attach once")
    if args.n_gpu > 1:
        raise ConfigError(
            f"a Trainer that sees {args.n_gpu} devices in one process uses nn.DataParallel, which "
            "copies the model in every pass: start one process for each device with torchrun"
        )
    if distributed not in _PLAIN:
        raise ConfigError(
            f"accelerate distributes this run by {distributed}, which owns the backward pass and "
            "the gradients, so that no step can be judged or repeated: use DDP or FSDP2"
        )
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=True begins the run again with smaller batches when memory runs "
            "out, so that steps and snapshots would be of different batches: set "
            "per_device_train_batch_size"
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(word in optimizer for word in _IN_BACKWARD):
        raise ConfigError(
            f"optim={optimizer!r} is applied within the backward pass, before the pass could be "
            "verified: use an optimizer that is applied after it, such as adamw_torch"
        )
    if args.ignore_data_skip:
        raise ConfigError(
            "ignore_data_skip=True begins an epoch's data anew after a restart: leave it out"
        )
