"""What protection and the whole ladder cost the training step of three Hugging Face models.

    python -m bench.step_costs [--model NAME …] [--tokens N …] [--dtype NAME …] [--variant NAME …]
    python -m bench.step_costs --table

GPT-2, BERT and Llama of 23 to 26 million parameters as transformers (extra `models`) builds them,
with their own dropout, 1,024 tokens a step in sequences of 128 or 512, clipped gradients, AdamW.
`protect` verifies the products; `ladder` adds a Guard with all its defaults and a snapshot that is
committed before the step counts as done. A step that an audit repeats costs twice as much; none is
in a sample.

Correctness first: the variant's gradients may differ from the bare ones by at most twice what
torch's two attention kernels differ by, as verified attention rounds otherwise than torch's. With
dropout torch has one, and theirs are compared without. To measure another instruction set, set all
of HOLDFAST_SIMD=avx2, ATEN_CPU_CAPABILITY=avx2, ONEDNN_MAX_CPU_ISA=AVX2 and
MKL_ENABLE_INSTRUCTIONS=AVX2: the last one limits torch's own fp32 products. `--table` prints the
newest row of each cell as Markdown.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_

from bench.paired import paired
from bench.rows import RESULTS, record
from holdfast.abft.gemm.raw import raw
from holdfast.guard import Guard
from holdfast.protection import protect
from holdfast.snapshot.client.snapshots import Snapshots

CLAIM = "step_costs"
MODELS, TOKENS, DTYPES = ("gpt2", "bert", "llama"), (128, 512), ("fp32", "bf16")
VARIANTS = ("protect", "ladder")
WIDTH, LAYERS, HEADS, WORDS, A_STEP = 512, 6, 8, 8192, 1024
WARM_UP = 4  # the first three snapshots map the pages that the later ones use again
SETTINGS = ("HOLDFAST_SIMD", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
SETTINGS += ("MKL_ENABLE_INSTRUCTIONS",)


def build(name: str) -> nn.Module:
    """Build a model with random weights."""
    import transformers

    common = {"vocab_size": WORDS, "max_position_embeddings": max(TOKENS)}
    if name == "gpt2":
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
        config = transformers.GPT2Config(**sizes, vocab_size=WORDS, n_positions=max(TOKENS))
        return transformers.GPT2LMHeadModel(config)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    if name == "bert":
        config = transformers.BertConfig(**sizes, **common, intermediate_size=4 * WIDTH)
        return transformers.BertForMaskedLM(config)
    sizes |= {"intermediate_size": 1408, "num_key_value_heads": HEADS // 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **common))


class Step:
    """One training step, always on the same batch and with the same dropout."""

    def __init__(self, name: str, tokens: int, dtype: str) -> None:
        torch.manual_seed(0)
        self.model = build(name).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.batch = torch.randint(WORDS, (A_STEP // tokens, tokens))
        self.bf16 = dtype == "bf16"

    def forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        """Compute the loss and the gradients."""
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        return loss.detach()

    def bare(self) -> None:
        """Train without holdfast."""
        self.optimizer.zero_grad(set_to_none=True)
        float(self.forward_backward(self.batch))
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def gradients(self) -> list[torch.Tensor]:
        """Compute the gradients; the optimizer does not run."""
        self.optimizer.zero_grad(set_to_none=True)
        self.forward_backward(self.batch)
        found = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return found

    @contextmanager
    def protected(self, variant: str) -> Iterator[Callable[[], None]]:
        """Give the step of a variant."""
        with ExitStack() as stack:
            stack.enter_context(protect(self.model))
            if variant == "protect":
                yield self.bare
                return
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            snapshots = Snapshots(self.model, self.optimizer, run_dir=folder, every=1)
            guard = Guard(self.model, self.optimizer, snapshots=snapshots, clip_grad_norm=1.0)
            stack.enter_context(guard)

            def run() -> None:
                float(guard.step(self.forward_backward, self.batch))
                snapshots.wait_committed()

            yield run


def difference(one: list[torch.Tensor], two: list[torch.Tensor]) -> float:
    """Compare gradients: the norm of their difference over the norm of the first."""
    apart = sum(float((a - b).double().square().sum()) for a, b in zip(one, two, strict=True))
    return (apart / sum(float(a.double().square().sum()) for a in one)) ** 0.5


def gate(name: str, tokens: int, dtype: str) -> dict[str, float]:
    """Compare protected gradients with bare ones; return the differences, or end the program."""
    step = Step(name, tokens, dtype)
    step.model.eval()
    bare = step.gradients()
    with sdpa_kernel(SDPBackend.MATH):
        noise = difference(bare, step.gradients())
    step.model.train()
    bare = step.gradients()
    with protect(step.model):
        found = difference(bare, step.gradients())
    if found > 2 * noise:
        raise SystemExit(f"{name}: gradients differ by {found:.2e}, torch's own by {noise:.2e}")
    return {"difference": found, "difference_of_kernels": noise}


def measure(name: str, tokens: int, dtype: str, variant: str, pairs: int) -> dict[str, Any]:
    """Gate, then time a variant against the bare step."""
    compared = gate(name, tokens, dtype)
    plain, other = Step(name, tokens, dtype), Step(name, tokens, dtype)

    def bare() -> None:
        with raw():  # a protection verifies all products of its process
            plain.bare()

    with other.protected(variant) as run:
        times = paired(bare, run, pairs=pairs, warmup=WARM_UP)
    settings = {key: os.environ[key] for key in SETTINGS if key in os.environ}
    cell = {"model": name, "tokens": tokens, "dtype": dtype, "variant": variant}
    cell["parameters"] = sum(p.numel() for p in plain.model.parameters())
    return {**cell, "settings": settings, **compared, **times}


def table() -> str:
    """Write the newest row of each cell as Markdown."""
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in (RESULTS / f"{CLAIM}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if 0 < len(row["settings"]) < len(SETTINGS):
            continue  # products of another instruction set than the checks
        key = (row["model"], row["tokens"], row["dtype"], row["native"], row["variant"])
        newest[key] = row
    lines = ["| model | tokens | dtype | instructions | bare, s | protect | whole ladder |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for cell in sorted({key[:4] for key in newest}):
        rows = [newest.get((*cell, variant)) for variant in VARIANTS]
        bare_s = next(row["baseline_s"] for row in rows if row)
        texts = [
            f"{row['ratio']:.3f} ({row['ratio_quartiles'][0]:.3f}–{row['ratio_quartiles'][1]:.3f})"
            if row
            else "not measured"
            for row in rows
        ]
        lines.append("| " + " | ".join([*map(str, cell), f"{bare_s:.2f}", *texts]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure every cell that was asked for, and record a row of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--tokens", type=int, choices=TOKENS, action="append", help="of a sequence")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="default: both")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--table", action="store_true", help="print the rows; measure nothing")
    args = parser.parse_args()
    if args.table:
        print(table())
        return
    if 0 < sum(key in os.environ for key in SETTINGS) < len(SETTINGS):
        raise SystemExit(f"set all of {', '.join(SETTINGS)}, or none")
    chosen = (args.model or MODELS, args.tokens or TOKENS, args.dtype or DTYPES)
    for name, tokens, dtype, variant in product(*chosen, args.variant or VARIANTS):
        record(CLAIM, measure(name, tokens, dtype, variant, args.pairs))


if __name__ == "__main__":
    main()
