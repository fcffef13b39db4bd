"""What protection, the Guard and a snapshot every step cost a training step, against the bare loop.

    python -m bench.training_step [--large] [--variant NAME] [--pairs N] [--device cuda]

One process with all cores; correctness first: every variant must leave the bare loop's bits. A
sample is four steps, with the last snapshot committed before it ends: no copy overlaps the other
side's time.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from bench.paired import paired
from bench.rows import record
from holdfast.digest.tensors import state_digest
from holdfast.guard import Guard
from holdfast.protection import protect
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast_lab.trainer.data import ByteLoader, read_corpus
from holdfast_lab.trainer.gpt import GPT, GPTConfig, loss, make_optimizer

DEMO = (GPTConfig(layers=4, heads=4, width=256, context=128), 8)
LARGE = (GPTConfig(layers=8, heads=8, width=512, context=256), 8)
STEPS_PER_SAMPLE = 4
VARIANTS = ("protect", "guard", "guard+snapshot")


class Step:
    """One training step of a GPT, always on the same batches."""

    def __init__(self, config: GPTConfig, batch_size: int, dtype: str, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = GPT(config).to(device)
        self.optimizer = make_optimizer(self.model, 1e-3, 0.1)
        loader = ByteLoader(read_corpus(), context=config.context, batch_size=batch_size, seed=0)
        inputs, targets = next(loader)
        self.batch = inputs.to(device), targets.to(device)
        self.bf16 = dtype == "bf16"

    def forward_backward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            value = loss(self.model, *batch)
        value.backward()
        return value.detach()

    def bare(self) -> None:
        """The loop without holdfast."""
        self.optimizer.zero_grad(set_to_none=True)
        float(self.forward_backward(self.batch))
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def digest(self) -> str:
        return state_digest([self.model.state_dict(), self.optimizer.state_dict()])


@contextmanager
def variant(name: str, step: Step) -> Iterator[tuple[Callable[[], None], Callable[[], object]]]:
    """The same step under a variant, and what ends a sample; `protected` switches protection."""
    if name == "protect":
        yield step.bare, lambda: None
        return
    with ExitStack() as stack:
        snapshots = None
        if name == "guard+snapshot":
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            snapshots = Snapshots(step.model, step.optimizer, run_dir=run_dir)
        guard = Guard(step.model, step.optimizer, snapshots=snapshots, clip_grad_norm=1.0)
        stack.enter_context(guard)
        settle = snapshots.wait_committed if snapshots is not None else lambda: None
        yield lambda: float(guard.step(step.forward_backward, step.batch)), settle


def measure(
    config: GPTConfig, batch_size: int, dtype: str, name: str, pairs: int, device: str
) -> None:
    """Gate, then time, one variant."""
    plain, candidate = (Step(config, batch_size, dtype, device) for _ in range(2))
    with variant(name, candidate) as (run, settle):

        def bare() -> None:
            for _ in range(STEPS_PER_SAMPLE):
                plain.bare()

        def protected() -> None:
            with protect(candidate.model):
                for _ in range(STEPS_PER_SAMPLE):
                    run()
                settle()

        bare()
        protected()
        if plain.digest() != candidate.digest():
            raise SystemExit(f"{name} {dtype}: not the bare loop's bits; nothing was timed")
        row = paired(bare, protected, pairs=pairs, warmup=1)
    record(
        "training_step",
        {
            "variant": name,
            "dtype": dtype,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "layers": config.layers,
            "width": config.width,
            "sequence": config.context,
            "batch": batch_size,
            "steps_per_sample": STEPS_PER_SAMPLE,
            "parameters": sum(p.numel() for p in plain.model.parameters()),
            **row,
        },
    )


def main() -> None:
    """Measure all variants in fp32 and bf16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="d_model 512, 8 layers, sequence 256")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="default: all")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    config, batch_size = LARGE if args.large else DEMO
    for dtype in ("fp32", "bf16"):
        # No product is verified on CUDA yet: a figure for it would say nothing.
        for name in args.variant or (VARIANTS if args.device == "cpu" else VARIANTS[1:]):
            measure(config, batch_size, dtype, name, args.pairs, args.device)


if __name__ == "__main__":
    main()
