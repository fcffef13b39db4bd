"""Injection of faults into the attention probabilities of a model's verified attention block."""

import math
from functools import partial

import torch
from torch import nn

from holdfast import events
from holdfast.abft.attention import section_softmax
from holdfast.abft.attention.section_product import Section
from holdfast.nn import Attention
from holdfast_lab.campaign.counts import PATIENCE, Counts, settled
from holdfast_lab.campaign.effects import Scale, change
from holdfast_lab.campaign.workload import Computed
from holdfast_lab.study.attnchecker.injected_products import computed
from holdfast_lab.study.attnchecker.models import weighed
from holdfast_lab.study.attnchecker.probe import Strike
from holdfast_lab.study.attnchecker.subjects import Batch, Matrix, Subject

SITES = {
    "Q": "S_AS.Q",
    "K": "S_AS.K",
    "AS": "S_AS.AS",
    "V": "S_CL.V",
    "AP": "S_CL.AP",
    "CL": "S_CL.CL",
    "O": "S_O.O",
}
CAUSAL = {"gpt2", "gpt-neo"}
UNSCALED = {"gpt-neo"}  # its scores are not divided by √d


def as_sections(case: Subject, heads: int) -> Subject:
    """Convert the first attention block of a model of the paper to ``holdfast.nn.Attention``.

    It has the block's weights, input and masks, and a loss of its own.
    """
    products = computed(case, {matrix.forward for matrix in case.matrices.values()})
    layers = {name: _layer(products, case.matrices[name]) for name in ("Q", "K", "V", "O")}
    width = layers["Q"][0].shape[1]
    model = Attention(width, heads, causal=case.name in CAUSAL)
    factor = math.sqrt(width / heads) if case.name in UNSCALED else 1.0
    modules = {"Q": model.q_proj, "K": model.k_proj, "V": model.v_proj, "O": model.out_proj}
    with torch.no_grad():
        for name, module in modules.items():
            weight, bias = layers[name]
            by = factor if name == "Q" else 1.0
            module.weight.copy_(weight * by)
            module.bias.copy_(bias * by)
    x = products[case.matrices["Q"].forward].a
    mask = case.batch["attention_mask"] == 0
    batch = {"x": x.reshape(*mask.shape, width).clone().requires_grad_(), "padding": mask}
    matrices = {name: Matrix(f"{type(model).__name__}/{site}") for name, site in SITES.items()}
    return Subject(case.name, model, batch, matrices, _loss)


def _layer(products: dict[str, Computed], matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight [outputs, inputs] and the bias of a projection; zeros if it has no bias."""
    gemm = products[matrix.forward].gemm
    weight = matrix.of(gemm.b.detach()).t()
    if gemm.addend is None:
        return weight, weight.new_zeros(len(weight))
    return weight, matrix.of(gemm.addend.detach().reshape(-1, gemm.b.shape[1])[0])


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return weighed(model(batch["x"], key_padding_mask=batch["padding"]))


def injected_probabilities(probabilities: torch.Tensor, strike: Strike, wanted: int) -> Counts:
    """Inject faults one at a time into attention probabilities [batch, rows, columns], then verify.

    The clean copy takes the place of the recomputation, which is deterministic. The events of this
    process are cleared.
    """
    section = Section("S_CL", 0, True, "recompute")
    counts = Counts()
    for _ in range(PATIENCE * wanted):
        if counts.trials == wanted:
            break
        drawn = int(torch.randint(len(probabilities), (), generator=strike.generator))
        clean = probabilities[drawn : drawn + 1]
        struck = clean.clone()
        if not strike.into(struck):
            continue
        effect = partial(_effect, struck[0].clone(), clean[0])
        events.clear()
        section_softmax.settle(section, struck, None, clean.clone)
        counts += settled(len(events.recent()) > 0, torch.equal(struck, clean), effect)
    events.clear()
    return counts


def _effect(struck: torch.Tensor, clean: torch.Tensor) -> int:
    """Classify one changed row; its rounding error is that of its largest probability."""
    u = torch.finfo(clean.dtype).eps / 2
    scale = Scale(u * clean.double().amax(-1), clean.double().norm(dim=-1), math.sqrt(u))
    moved = change(struck, clean)
    row = (moved != 0).any(-1).byte().argmax().view(1)
    return int(scale.classify(moved[row].amax(-1), moved[row].norm(dim=-1), (row,)))
