"""What a ``Guard`` refuses at construction, before any weight has moved."""

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import ConfigError
from holdfast.optimizers import Optimizers, Schedulers, each_of, innermost_of
from holdfast.replay.parameters import parameters_of
from holdfast.snapshot.client.snapshots import Snapshots

# Modules of torch's hooks for DDP that apply an optimizer, and of those that carry a state from one
# pass to the next.
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_APPLYING_HOOKS = (f"{_HOOKS}.optimizer_overlap_hooks", f"{_HOOKS}.ddp_zero_hook")
_STATEFUL_HOOKS = (f"{_HOOKS}.powerSGD_hook", f"{_HOOKS}.post_localSGD_hook")


def check_model(model: nn.Module) -> None:
    """Check that a pass of the model can be repeated and its gradients be judged.

    Raises:
        ConfigError: It contains ``nn.DataParallel`` or FSDP1, applies optimizers in its backward
            pass, or reduces gradients in a way that depends on earlier passes.
    """
    for module in model.modules():
        _check_fsdp1(module)
        if isinstance(module, DistributedDataParallel):
            _check_comm_hooks(module)
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise ConfigError(
            "nn.DataParallel copies the model in every pass, so that neither its buffers nor its "
            "products can be followed: wrap the model in DistributedDataParallel instead"
        )
    if any(getattr(p, "_in_backward_optimizers", None) for p in parameters_of(model)):
        raise _applied_too_early()


def _check_fsdp1(module: nn.Module) -> None:
    if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
        raise ConfigError(
            "FullyShardedDataParallel (FSDP1) accumulates and saves in ways that a Guard does not "
            "follow: divide the model with FSDP2, torch.distributed.fsdp.fully_shard"
        )


def _check_comm_hooks(wrapper: DistributedDataParallel) -> None:
    for hook, state in wrapper._comm_hooks:
        if hook.__module__ in _APPLYING_HOOKS:
            raise _applied_too_early()
        if type(state).__module__ in _STATEFUL_HOOKS:
            raise ConfigError(
                f"DDP reduces by a hook with a {type(state).__name__}, which every pass changes, "
                "so that no pass can be repeated: register a hook without such a state, for "
                "example fp16_compress_hook"
            )


def _applied_too_early() -> ConfigError:
    return ConfigError(
        "an optimizer is applied within the backward pass, before the pass could be verified: "
        "apply it after the pass"
    )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | Optimizers) -> None:
    """Check that the Guard can apply an optimizer, and that it holds the model's parameters only.

    Raises:
        ConfigError: Its ``step`` needs a closure, or it holds other parameters.
    """
    for each in {*each_of(optimizer), *innermost_of(optimizer)}:
        if missing := _required(getattr(type(each), "step", None)):
            raise ConfigError(
                f"{type(each).__name__}.step needs {missing}: it computes passes of its own, which "
                "could not be verified; use an optimizer whose step() takes nothing, such as "
                "AdamW, SGD, Muon or Adafactor"
            )
    known = {id(parameter) for parameter in parameters_of(model)}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "the optimizer holds parameters that are not the model's: they would be neither "
            "emptied, clipped, verified nor saved; make them part of the model"
        )


def check_snapshots(snapshots: Snapshots, optimizer: torch.optim.Optimizer | Optimizers) -> None:
    """Check that the snapshots are of the model that is trained.

    Raises:
        ConfigError: They are not.
    """
    saved = set(map(id, snapshots.training.model.parameters()))
    if any(id(p) not in saved for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "the snapshots hold another model than the one that the optimizer trains, so that a "
            "restart would begin with its first weights: give the same model to Snapshots and Guard"
        )


def check_scheduler(scheduler: object) -> None:
    """Check that a learning-rate schedule, if there is one, advances by ``step()`` alone.

    Raises:
        ConfigError: It is a list, or its ``step`` needs a metric.
    """
    if isinstance(scheduler, list | tuple):
        raise ConfigError(
            f"{len(scheduler)} schedulers in a {type(scheduler).__name__}: give "
            "holdfast.Schedulers(first, second), to Snapshots as well"
        )
    for each in scheduler.schedulers if isinstance(scheduler, Schedulers) else (scheduler,):
        if missing := _required(getattr(type(each), "step", None)):
            raise ConfigError(
                f"{type(each).__name__}.step needs {missing}, which differ between ranks in one "
                "step: call it yourself with a metric that is the same on all ranks, as in "
                "guard.step(..., after=lambda: scheduler.step(metric)), and give it to "
                "Snapshots(extra=...)"
            )


def in_snapshots(name: str, given: Any, held: Any) -> Any:
    """Return the part of a run that the snapshots hold too, so that it is rolled back.

    Raises:
        ConfigError: It is another one than the snapshots hold.
    """
    if given is not None and given is not held:
        raise ConfigError(
            f"the {name} {type(given).__name__} is not the one in the snapshots, so "
            f"that it would not be rolled back: give it to Snapshots({name}=...)"
        )
    return held


def _required(step: object) -> str:
    """Return the names of the arguments that a method ``step`` cannot do without."""
    try:
        found = list(inspect.signature(step).parameters.values())[1:]  # type: ignore[arg-type]
    except (TypeError, ValueError):  # built in, or none at all
        return ""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return ", ".join(p.name for p in found if p.kind in plain and p.default is p.empty)
