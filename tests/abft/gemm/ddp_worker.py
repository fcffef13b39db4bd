"""One of two data-parallel ranks: a fault on one is repaired there, and else reaches the other."""

import argparse
import datetime
import gc
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gemm_strikes import Program, bare, products, protected
from programs_training import ROWS, WIDTH, loss_of, perceptron, state
from site_reports import covered
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
TIMEOUT = datetime.timedelta(seconds=30)

Wrap = Callable[[nn.Module], DistributedDataParallel]


def compressing(model: nn.Module) -> DistributedDataParallel:
    wrapper = DistributedDataParallel(model)
    wrapper.register_comm_hook(None, fp16_compress_hook)
    return wrapper


WRAPPERS: list[Wrap] = [
    DistributedDataParallel,
    partial(DistributedDataParallel, gradient_as_bucket_view=True),
    compressing,
]


def accumulate(wrap: Wrap, model: nn.Module) -> list[torch.Tensor]:
    """Two batches of this rank's own; the second one's backward reduces both."""
    wrapper = wrap(model)
    torch.manual_seed(1 + distributed.get_rank())
    with wrapper.no_sync():
        loss_of(wrapper, torch.randn(ROWS, WIDTH)).backward()
    loss_of(wrapper, torch.randn(ROWS, WIDTH)).backward()
    return state(model)


def check(wrap: Wrap, struck: bool) -> None:
    """Make every pass clean, with a fault on one rank, and with the fault unverified."""
    program = Program(perceptron, partial(accumulate, wrap), {})
    names, expected = products(program), bare(program)
    assert {name.rsplit("/")[-1] for name in names} == {"forward", "grad_a", "grad_b"}
    clean = protected(program)
    assert (clean.digest, clean.events) == (expected, [])
    assert covered(clean.report) == Counter(names)
    for nth, name in enumerate(names):
        repaired = protected(program, nth if struck else -1)
        assert repaired.digest == expected, name
        found = [(event.kind, event.op) for event in repaired.events]
        assert found == ([("gemm_fault", name)] if struck else [])
        harmed = protected(program, nth if struck else -1, verify=False)
        assert harmed.digest != expected, name
        assert harmed.events == []


def main() -> None:
    """Join the other rank, and check every wrapper; both ranks make the same passes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{options.directory}/rendezvous",
        rank=options.rank,
        world_size=RANKS,
        timeout=TIMEOUT,
    )
    try:
        for wrap in WRAPPERS:
            check(wrap, struck=options.rank == 1)
    finally:
        # The wrappers are cycles that hold the group: while they live its threads are not joined,
        # and one that lets go of a tensor while the interpreter ends aborts the process.
        gc.collect()
        distributed.destroy_process_group()
    print("checked")


if __name__ == "__main__":
    main()
