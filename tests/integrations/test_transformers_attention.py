"""Verified attention as transformers' models choose it, by ``attn_implementation``."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from math import nan
from typing import Any

import pytest
import torch
from struck import Strike
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    GPTNeoConfig,
    GPTNeoModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
    set_seed,
)

from holdfast import ConfigError, events, native, protect, sites
from holdfast.digest.tensors import tensors_digest
from holdfast.integrations.transformers import register_attention
from holdfast.sites import ROLES

pytestmark = pytest.mark.processes

LENGTH = 8
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
ENCODER = SIZES | {"hidden_dropout_prob": 0.0}
DECODER = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
FAMILIES: dict[str, Any] = {
    "bert": (BertModel, BertConfig, ENCODER, "attention_probs_dropout_prob"),
    "roberta": (RobertaModel, RobertaConfig, ENCODER, "attention_probs_dropout_prob"),
    "gpt2": (GPT2Model, GPT2Config, GPT2, "attn_pdrop"),
    "llama": (LlamaModel, LlamaConfig, DECODER, "attention_dropout"),
    "qwen": (Qwen3Model, Qwen3Config, DECODER, "attention_dropout"),
}
NONE = torch.ones(2, LENGTH, dtype=torch.long)
RIGHT, LEFT = NONE.clone(), NONE.clone()
RIGHT[1, 5:] = 0
LEFT[1, :3] = 0


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_attention()
    yield
    register_attention()


def model_of(family: str, attention: str, dropout: float = 0.0) -> Any:
    kind, config, sizes, dropout_name = FAMILIES[family]
    set_seed(1)
    settings = sizes | {dropout_name: dropout, "attn_implementation": attention}
    return kind(config(**settings, pad_token_id=0)).train()


@cache
def tokens() -> torch.Tensor:
    return torch.randint(4, 61, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def step(model: Any, mask: torch.Tensor | None) -> str:
    """The digest of one pass: its output where there are tokens, and all gradients."""
    model.zero_grad()
    torch.manual_seed(9)
    output = model(input_ids=tokens(), attention_mask=mask).last_hidden_state
    output = output[slice(None) if mask is None else mask.bool()]
    output.square().mean().backward()
    return tensors_digest([output, *(p.grad for p in model.parameters() if p.grad is not None)])


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_bits_are_those_of_the_attention_it_stands_for(family: str) -> None:
    for number, mask in enumerate((None, NONE, RIGHT, LEFT), list(FAMILIES).index(family)):
        dropout = (0.0, 0.2)[number % 2]  # of the next family each mask has the other one
        eager = step(model_of(family, "eager", dropout), mask)
        for attention in ("holdfast_sections", "holdfast_products"):
            assert step(model_of(family, attention, dropout), mask) == eager, attention
        found = [model_of(family, name, dropout) for name in ("sdpa", "holdfast")]
        with protect(found[0]), protect(found[1]):
            assert step(found[0], mask) == step(found[1], mask)
    assert events.recent() == []


STAGES = ("scores", "probabilities", "accumulator", "grad_query")


def run(model: Any, strike: Strike, *, protected: bool) -> str:
    with protect(model) if protected else nullcontext():
        sites.arm(strike)
        try:
            return step(model, RIGHT)
        finally:
            sites.disarm()


@pytest.mark.skipif(native.core is None, reason="the fused kernel is native")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fault_in_each_stage_of_the_fused_kernel_is_repaired_bit_for_bit(family: str) -> None:
    model = model_of(family, "holdfast")
    clean = run(model, Strike((0, 0), nan, stage="none"), protected=True)
    for stage in STAGES:
        strike = Strike((0, 0), nan, stage=stage)
        assert run(model, strike, protected=True) == clean, stage
        assert [event.kind for event in events.recent()] == ["gemm_fault"]
        events.clear()
        with protect(model, verify=False):
            assert run(model, Strike((0, 0), nan, stage=stage), protected=False) != clean


SECTIONS = {
    *(f"S_AS.AS/{role}" for role in ROLES),
    *("S_CL.AP/forward", *(f"S_CL.CL/{role}" for role in ROLES)),
}
PRODUCTS = {f"(outside)/bmm/{role}" for role in ROLES}


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_fault_in_any_product_of_a_section_is_repaired_and_passes_where_it_is_not_due(
    family: str,
) -> None:
    clean = step(model_of(family, "holdfast_sections"), RIGHT)
    for name in SECTIONS:
        strike = Strike((0, 0, 0), nan, site=name)
        assert run(model_of(family, "holdfast_sections"), strike, protected=False) == clean, name
        assert [event.op for event in events.recent()] == [strike.seen[0]]
        events.clear()
    register_attention({"S_AS": 0.0, "S_CL": 0.0})
    for name in SECTIONS:
        strike = Strike((0, 0, 0), nan, site=name)
        assert run(model_of(family, "holdfast_sections"), strike, protected=False) != clean, name
    assert events.recent() == []


def test_sections_are_checked_in_the_planned_share_of_the_calls() -> None:
    register_attention({"S_AS": 0.5, "S_CL": 1.0})
    model = model_of("gpt2", "holdfast_sections")
    caught = 0
    for _ in range(4):
        run(model, Strike((0, 0, 0), nan, site="S_AS.AS/forward"), protected=False)
        caught += len([event for event in events.recent() if "S_AS" in event.op])
        events.clear()
    assert caught == 2


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_fault_in_any_product_of_the_eager_attention_is_repaired_without_protect(
    family: str,
) -> None:
    clean = step(model_of(family, "holdfast_products"), RIGHT)
    for name in PRODUCTS:
        strike = Strike((0, 0, 0), nan, site=name)
        assert run(model_of(family, "holdfast_products"), strike, protected=False) == clean, name
        assert [event.op for event in events.recent()] == [strike.seen[0]]
        events.clear()
        strike = Strike((0, 0, 0), nan, site=name.removeprefix("(outside)"))
        model = model_of(family, "eager")
        with protect(model, verify=False):
            assert run(model, strike, protected=False) != clean, name
        assert strike.seen


def test_decoding_gives_the_tokens_of_the_attention_it_stands_for() -> None:
    def decoded(attention: str) -> list[list[int]]:
        set_seed(1)
        config = LlamaConfig(**DECODER, attn_implementation=attention, pad_token_id=0)
        model = LlamaForCausalLM(config).eval()
        with protect(model):
            prompt = tokens()[:, :4]
            found = model.generate(prompt, max_new_tokens=6, do_sample=False)
        return found.tolist()

    assert decoded("holdfast") == decoded("sdpa")
    assert decoded("holdfast_sections") == decoded("holdfast_products") == decoded("eager")


def test_attention_that_would_not_be_verified_is_refused() -> None:
    model = model_of("llama", "holdfast")
    with pytest.raises(
        ConfigError, match=r"nothing protects LlamaAttention: call holdfast\.protect"
    ):
        step(model, None)
    with protect(model):
        step(model, None)
    with pytest.raises(ConfigError, match="nothing protects"):
        step(model, None)
    inputs = torch.zeros(1, 4, 2, 8)
    with (
        protect(model),
        pytest.raises(ConfigError, match="cannot follow softcap of LlamaAttention"),
    ):
        AttentionInterface()["holdfast"](
            model.layers[0].self_attn, *[inputs] * 3, None, softcap=3.0
        )
    with pytest.raises(ConfigError, match=r"frequencies of \['S_X'\]"):
        register_attention({"S_X": 1.0})
    with pytest.raises(ConfigError, match="0 to 1"):
        register_attention({"S_AS": 1.5})


def gpt_neo(attention: str, dropout: float = 0.0) -> Any:
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    sizes |= {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32}
    sizes |= {"window_size": 3, "attention_dropout": dropout, "attn_implementation": attention}
    set_seed(1)
    return GPTNeoModel(GPTNeoConfig(**sizes)).train()


def test_gpt_neo_has_the_bits_of_its_own_attention() -> None:
    for mask in (None, NONE, RIGHT, LEFT):
        for dropout in (0.0, 0.2):
            clean = step(gpt_neo("eager", dropout), mask)
            for attention in ("holdfast_sections", "holdfast_products"):
                assert step(gpt_neo(attention, dropout), mask) == clean, attention
    inputs = {"input_ids": tokens(), "attention_mask": LEFT}
    own, fused = gpt_neo("eager"), gpt_neo("holdfast")
    with protect(own), protect(fused):
        found = [model(**inputs).last_hidden_state[LEFT.bool()] for model in (own, fused)]
    torch.testing.assert_close(found[1], found[0])
    assert events.recent() == []


def test_a_fault_in_the_attention_of_gpt_neo_is_repaired() -> None:
    clean = step(gpt_neo("eager"), RIGHT)
    for attention, names in (("holdfast_products", PRODUCTS), ("holdfast_sections", SECTIONS)):
        for name in names:
            strike = Strike((0, 0, 0), nan, site=name)
            assert run(gpt_neo(attention), strike, protected=False) == clean, name
            assert [event.op for event in events.recent()] == [strike.seen[0]]
            events.clear()
    model = gpt_neo("holdfast")
    with pytest.raises(ConfigError, match="nothing protects _GPTNeo"):
        step(model, RIGHT)
    if native.core is not None:
        clean = run(model, Strike((0, 0), nan, stage="none"), protected=True)
        for stage in STAGES:
            assert run(model, Strike((0, 0), nan, stage=stage), protected=True) == clean, stage
            assert [event.kind for event in events.recent()] == ["gemm_fault"]
            events.clear()
