"""One of two data-parallel ranks; runs clean, struck and unprotected passes and reports on them."""

import argparse
import datetime
import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gemm_strikes import Program, Strike, bare, products, protected
from programs_training import ROWS, WIDTH, loss_of, perceptron, state
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
STRUCK_RANK = 1
TIMEOUT = datetime.timedelta(seconds=30)

Wrap = Callable[[nn.Module], DistributedDataParallel]


def compressing(model: nn.Module) -> DistributedDataParallel:
    """Gradients are reduced in fp16, by a hook."""
    wrapper = DistributedDataParallel(model)
    wrapper.register_comm_hook(None, fp16_compress_hook)
    return wrapper


WRAPPERS: dict[str, Wrap] = {
    "plain": DistributedDataParallel,
    "bucket views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "compressing hook": compressing,
}


def accumulate(wrap: Wrap, model: nn.Module) -> list[torch.Tensor]:
    """Two batches of this rank's own; the second one's backward reduces both."""
    wrapper = wrap(model)
    torch.manual_seed(1 + distributed.get_rank())
    with wrapper.no_sync():
        loss_of(wrapper, torch.randn(ROWS, WIDTH)).backward()
    loss_of(wrapper, torch.randn(ROWS, WIDTH)).backward()
    return state(model)


def observe(wrap: Wrap) -> dict[str, object]:
    """What this rank sees of every pass; both ranks make the same passes."""
    program = Program(perceptron, partial(accumulate, wrap), {})
    names = products(program)
    passes: dict[str, list[object]] = {"repaired": [], "reaches": []}
    for nth in range(len(names)):
        for word, verify in (("repaired", True), ("reaches", False)):
            strike = Strike(nth if distributed.get_rank() == STRUCK_RANK else -1)
            outcome = protected(program, verify=verify, strike=strike)
            events = [(event.kind, event.op) for event in outcome.events]
            passes[word].append([outcome.digest, events])
    clean = protected(program)
    return {
        "names": names,
        "bare": bare(program),
        "clean": [clean.digest, clean.kinds],
        "covered": clean.covered(),
        **passes,
    }


def main() -> None:
    """Join the other rank, observe, write the observations as JSON."""
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
        seen = {name: observe(wrap) for name, wrap in WRAPPERS.items()}
    finally:
        # The wrappers are cycles that hold the group: while they live its threads are not joined,
        # and one that lets go of a tensor while the interpreter ends aborts the process.
        gc.collect()
        distributed.destroy_process_group()
    (options.directory / f"{options.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
