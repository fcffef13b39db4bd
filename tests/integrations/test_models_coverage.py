"""Every product of the attention of real models: silent, caught and repaired, harmful if not."""

from dataclasses import replace
from itertools import product as every

import pytest

from holdfast import events
from holdfast.digest.tensors import tensors_digest
from holdfast.protection import protect
from holdfast.sites import ROLES
from holdfast_lab.study.attnchecker.attack import KINDS, attack, calm, gradients, products, reaching
from holdfast_lab.study.attnchecker.coverage import named
from holdfast_lab.study.attnchecker.models import FAMILIES, TINY, subject
from holdfast_lab.study.attnchecker.subjects import GEMMS, Matrix, Subject
from holdfast_lab.trainer.gpt import GPT, GPTConfig, loss

pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")

DEMO = "holdfast's own GPT"


def demo(dropout: float) -> Subject:
    """The model that ``holdfast demo`` trains."""
    config = GPTConfig(2, TINY.heads, TINY.width, TINY.length, TINY.vocabulary, dropout)
    base = subject("bert")
    tokens = base.batch["input_ids"]
    block = "blocks.0.attn"
    matrices = {m: Matrix(f"{block}.qkv/addmm", part, 3) for part, m in enumerate("QKV")}
    matrices |= {"AS": Matrix(f"{block}/bmm"), "CL": Matrix(f"{block}/bmm#2")}
    matrices |= {"O": Matrix(f"{block}.proj/addmm")}
    return replace(
        base,
        name=DEMO,
        model=GPT(config),
        batch={"inputs": tokens[:, :-1], "targets": tokens[:, 1:]},
        matrices=matrices,
        compute=lambda model, batch: loss(model, **batch),
    )


def build(name: str, dropout: float = 0.0) -> Subject:
    """A tiny model in training; without dropout, which would hide some of the faults."""
    return demo(dropout) if name == DEMO else subject(name, dropout=dropout)


NAMES = [*FAMILIES, DEMO]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_a_protected_step_is_silent_covers_the_attention_and_computes_the_same_bits(
    name: str, dropout: float
) -> None:
    case = build(name, dropout)
    clean = calm(case)
    with protect(case.model) as protection:
        assert tensors_digest(gradients(case)) == clean
        sites = protection.report().sites
    assert [site.site for site in sites if site.suspects] == []
    assert events.recent() == []
    covered = {site.site for site in sites if site.covered}
    assert sorted(case.matrices) == sorted(GEMMS)
    gemms = set(named(case).values())
    assert len(gemms) == (6 if len(named(case)) == 6 else 4)  # 4: one product for Q, K and V
    assert {f"{gemm}/{role}" for gemm in gemms for role in ROLES} <= covered


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_in_any_product_is_repaired_bit_for_bit_and_harmful_unprotected(name: str) -> None:
    case = build(name)
    clean, shapes = calm(case), products(case)
    sites = [f"{gemm}/{role}" for gemm, role in every(named(case).values(), ROLES)]
    # A kind of fault for each site, in turn, and for the next model the next one: the study
    # attnchecker.coverage has every kind at every site.
    for number, site in enumerate(sites, NAMES.index(name)):
        kind = KINDS[number % len(KINDS)]
        index = reaching(shapes[site], TINY.length)
        outcome = attack(case, site, kind, index, verify=True)
        assert (outcome.caught, outcome.unrepaired) == ((site,), ()), kind
        assert outcome.digest == clean, (site, kind)
        outcome = attack(case, site, kind, index, verify=False)
        assert (outcome.caught, outcome.unrepaired) == ((), ())
        assert outcome.digest != clean, (site, kind)
