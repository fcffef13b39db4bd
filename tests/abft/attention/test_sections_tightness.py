"""How far the thresholds are from healthy residuals, and from those of a carried checksum."""

import torch
from case_loops import for_each
from struck import DTYPES, armed

from holdfast import events
from holdfast.abft.checksums.weights import signs
from holdfast.abft.gemm.reference import verify_rows_reference
from holdfast.abft.thresholds.rounding import OUTPUT_SIGMAS
from holdfast.nn import Attention
from holdfast.sites import Gemm

BATCH, LENGTH, WIDTH, HEADS = 4, 128, 256, 4


def case(dtype: torch.dtype) -> tuple[Attention, torch.Tensor]:
    torch.manual_seed(0)
    made = Attention(WIDTH, HEADS, dtype=torch.float64).to(dtype)
    return made, torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64).to(dtype)


@for_each("dtype", DTYPES)
def test_the_largest_residual_is_between_a_fifth_and_all_of_the_threshold(
    dtype: torch.dtype,
) -> None:
    ratios: dict[str, float] = {}

    def hook(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if output is None or "S_CL.AP" in site:
            return
        encoding = gemm.row_sum, gemm.statistics
        rows = verify_rows_reference(output, gemm.a, *encoding, gemm.addend, 1.0, 1.0)
        ratios[site] = float((rows[0].abs() / rows[1]).max())

    made, x = case(dtype)
    with armed(hook):
        made(x.requires_grad_()).square().sum().backward()
    assert len(ratios) == 18
    assert 0.2 < max(ratios.values()) < 1
    assert events.recent() == []


@for_each("dtype", [torch.float16, torch.bfloat16])
def test_a_carried_checksum_would_see_only_far_larger_faults_of_q(dtype: torch.dtype) -> None:
    made, x = case(dtype)
    weight, bias = made.q_proj.weight.double(), made.q_proj.bias.double()
    with torch.no_grad():
        query, key = made.q_proj(x), made.k_proj(x)
        weights, unit = signs(LENGTH), OUTPUT_SIGMAS * torch.finfo(dtype).eps / 2
        carried = (weights @ x.double()) @ weight.t() + weights.sum() * bias
        q, k = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (query, key))
        scores = q @ k.mT
        predicted = k.double() @ carried.view(BATCH, HEADS, -1, 1)
        residual = weights @ scores.double() - predicted.squeeze(-1)
    q, k, scores = q.double(), k.double(), scores.double()
    of_query = q.square().sum((-1, -2)).unsqueeze(-1) * k.square().sum(-1)
    chained = unit * (of_query + scores.square().sum(-2)).sqrt()
    assert (residual.abs() <= chained).all()
    by_chain = (2 * chained.unsqueeze(-1) / k.abs()).amin(2).median()
    by_row = 2 * unit * query.double().square().sum(-1).sqrt().median()
    assert by_chain > 10 * by_row
