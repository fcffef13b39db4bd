"""What protection costs a training step of BERT-base, against the same step unprotected.

    python -m bench.bert_step [--pairs N] [--dtype NAME]

`BertForMaskedLM(BertConfig())` of transformers (extra `models`), 110 M parameters, random weights:
12 layers of width 768, dropout 0.1, batches of 8 sequences of 128 tokens, 15 % of them to be
predicted; gradients clipped, fused AdamW. bf16 is autocast. The gate demands the unprotected step's
bits, of parameters, gradients and optimizer state, while torch's fused kernels are off: attention
is then two products and a softmax. What is timed has holdfast's fused kernel in its place.
"""

import argparse
from collections import defaultdict
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_

from bench.paired import paired
from bench.rows import record
from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.protection import SiteCoverage, protect

BATCH, LENGTH, PREDICTED = 8, 128, 0.15
GATE_STEPS, SHARE_STEPS = 2, 4
MOST_KINDS = 12  # that are listed


class Step:
    """One training step, always on the same batch."""

    def __init__(self, dtype: str) -> None:
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(0)
        config = BertConfig()
        self.model = BertForMaskedLM(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5, fused=True)
        self.tokens = torch.randint(config.vocab_size, (BATCH, LENGTH))
        left_out = torch.rand(BATCH, LENGTH) > PREDICTED
        self.labels = self.tokens.masked_fill(left_out, -100)
        self.bf16 = dtype == "bf16"

    def run(self) -> None:
        """Forward, backward, update; the same dropout every time."""
        torch.manual_seed(1)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = self.model(input_ids=self.tokens, labels=self.labels).loss
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def digest(self) -> str:
        """Of everything a step leaves."""
        gradients = [p.grad for p in self.model.parameters()]
        return state_digest([self.model.state_dict(), gradients, self.optimizer.state_dict()])


def gate(plain: Step, candidate: Step) -> None:
    """The unprotected bits, every product covered, and silence; else nothing is timed."""
    events.clear()
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(GATE_STEPS):
            plain.run()
    with sdpa_kernel(SDPBackend.MATH), protect(candidate.model) as protection:
        for _ in range(GATE_STEPS):
            candidate.run()
        report = protection.report()
    uncovered = [site.site for site in report.sites if not site.covered]
    if plain.digest() != candidate.digest():
        raise SystemExit("not the unprotected step's bits; nothing was timed")
    if uncovered or events.recent():
        raise SystemExit(f"uncovered {uncovered}, events {events.recent()}; nothing was timed")


def shares(step: Step) -> dict[str, Any]:
    """Where the checks' time goes in the quickest of some steps, in milliseconds."""
    sites = min((_counted(step) for _ in range(SHARE_STEPS)), key=_product_s)
    by_kind: defaultdict[str, float] = defaultdict(float)
    for site in sites:
        path, op, role = site.site.rsplit("/", 2)
        kind = path.rsplit(".", 1)[-1] if op.startswith("addmm") else op.split("#")[0]
        by_kind[f"{kind}/{role}"] += 1e3 * (site.encode_s + site.verify_s)
    costly = sorted(by_kind, key=by_kind.__getitem__, reverse=True)[:MOST_KINDS]
    return {
        "encode_ms": round(1e3 * sum(site.encode_s for site in sites), 1),
        "verify_ms": round(1e3 * sum(site.verify_s for site in sites), 1),
        "product_ms": round(1e3 * _product_s(sites), 1),
        "suspects": sum(site.suspects for site in sites),
        "checks_ms": {kind: round(by_kind[kind], 1) for kind in costly},
    }


def _counted(step: Step) -> list[SiteCoverage]:
    """The counters of one step."""
    with protect(step.model) as protection:
        step.run()
        return protection.report().sites


def _product_s(sites: list[SiteCoverage]) -> float:
    return sum(site.product_s for site in sites)


def measure(dtype: str, pairs: int) -> None:
    """Gate, then time, one dtype."""
    plain, candidate = Step(dtype), Step(dtype)
    gate(plain, candidate)

    def protected() -> None:
        with protect(candidate.model):
            candidate.run()

    row = paired(plain.run, protected, pairs=pairs, warmup=1)
    record(
        "bert_step",
        {
            "variant": "protect",
            "dtype": dtype,
            "sequence": LENGTH,
            "batch": BATCH,
            "parameters": sum(p.numel() for p in plain.model.parameters()),
            **row,
            **shares(candidate),
        },
    )


def main() -> None:
    """Measure the dtypes asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), action="append", help="default: both")
    args = parser.parse_args()
    for dtype in args.dtype or ("fp32", "bf16"):
        measure(dtype, args.pairs)


if __name__ == "__main__":
    main()
