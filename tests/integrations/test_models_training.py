"""Models as they are trained and used: no false alarm, the same bits, and faults are still seen."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from holdfast import events
from holdfast.digest.tensors import tensors_digest
from holdfast.inject import Fault, Injector
from holdfast.protection import CoverageReport, protect
from holdfast_lab.study.attnchecker.attack import attack, calm, gradients, products, reaching
from holdfast_lab.study.attnchecker.configurations import PAD
from holdfast_lab.study.attnchecker.models import FAMILIES, PAPER_MODELS, TINY, library, subject
from holdfast_lab.study.attnchecker.subjects import Subject

pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")

NEW_TOKENS = 5

Tensors = list[torch.Tensor | None]


def attentions(*names: str) -> list[tuple[str, str]]:
    """Each model with every attention that it has."""
    return [(name, attention) for name in names for attention in FAMILIES[name].attentions]


def compare(case: Subject, run: Callable[[], Tensors], *, exact: bool = True) -> CoverageReport:
    """Run bare and protected: the same bits, in silence. Returns the report.

    Fused attention is protected by a kernel of its own, which rounds differently than torch's: not
    ``exact``, it need only repeat itself and be close.
    """
    clean = run()
    with protect(case.model) as protection:
        found = run()
        assert tensors_digest(found) == tensors_digest(clean if exact else run())
        report = protection.report()
    torch.testing.assert_close(found, clean, equal_nan=True)
    assert events.recent() == []
    assert [site.site for site in report.sites if site.suspects] == []
    return report


def step(case: Subject) -> Tensors:
    """Loss and gradients by ``backward``, as trainers compute them."""
    case.model.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loss = case.loss()
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in case.model.parameters())]


@contextmanager
def struck(
    model: torch.nn.Module, site: str, kind: str, index: tuple[int, ...], verify: bool = True
) -> Iterator[None]:
    """Strike one product, and check that it is repaired if the model's products are verified."""
    events.clear()
    fault = Fault(step=0, rank=0, kind=kind, op=site, index=index)
    with protect(model, verify=verify), Injector(model, [fault], rank=0).step(0):
        yield
    found = [(event.kind, event.op) for event in events.recent()]
    assert found == [("injected", site), ("gemm_fault", site)][: 1 + verify]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_computes_every_product_again_and_verifies_it(
    reentrant: bool,
) -> None:
    case = subject("bert", dropout=0.1)
    model: Any = case.model
    plain = compare(case, lambda: step(case))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = compare(case, lambda: step(case))
    query = case.matrices["Q"].forward
    assert sum(s.calls for s in found.sites if s.covered) > sum(s.calls for s in plain.sites)
    assert next(site.calls for site in found.sites if site.site == query) >= 1
    clean = tensors_digest(step(case))
    with struck(model, case.matrices["CL"].forward, "nan", (0, 3, 1)):
        assert tensors_digest(step(case)) == clean


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_autocast_is_covered_in_bf16(name: str) -> None:
    case = subject(name, dropout=0.1)

    def run() -> Tensors:
        with torch.autocast("cpu", torch.bfloat16):
            return step(case)

    found = compare(case, run)
    covered = {site.site for site in found.sites if site.covered}
    assert {matrix.forward for matrix in case.matrices.values()} <= covered


def test_a_fault_under_autocast_is_repaired() -> None:
    case = subject("gpt2")
    place = case.matrices["AS"].forward, "inf", (0, 3, 0)
    with torch.autocast("cpu", torch.bfloat16):
        clean = tensors_digest(step(case))
        with struck(case.model, *place, verify=False):
            assert tensors_digest(step(case)) != clean
        with struck(case.model, *place):
            assert tensors_digest(step(case)) == clean


def language_model(name: str) -> Any:
    """A tiny model that continues text."""
    builder = {"gpt2": "GPT2LMHeadModel", "gpt-neo": "GPTNeoForCausalLM"}.get(name)
    model: Any = subject(name).model
    if builder is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(library(), builder)(model.config)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None  # never ends early
    return model.eval()


@pytest.mark.parametrize(("name", "attention"), attentions("gpt2", "gpt-neo", "llama", "opt"))
def test_generation_with_a_cache_is_silent_and_the_same(name: str, attention: str) -> None:
    model = language_model(name)
    model.set_attn_implementation(attention)
    prompt = torch.randint(4, TINY.vocabulary, (2, 3))
    mask = torch.ones_like(prompt)
    mask[0, 0] = 0  # padded on the left, as generation wants it

    def run() -> torch.Tensor:
        with torch.inference_mode():
            tokens: torch.Tensor = model.generate(
                input_ids=prompt,
                attention_mask=mask,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
        return tokens

    clean = run()
    with protect(model) as protection:
        assert torch.equal(run(), clean)
        found = protection.report()
    assert clean.shape == (2, 3 + NEW_TOKENS)
    assert events.recent() == []
    assert [site.site for site in found.sites if not site.covered and not site.reason] == []
    assert max(site.calls for site in found.sites if site.covered) == NEW_TOKENS


def test_a_fault_in_decoding_is_repaired() -> None:
    model = language_model("llama")
    prompt = torch.randint(4, TINY.vocabulary, (2, 3))

    def run() -> torch.Tensor:
        with torch.inference_mode():
            return model(prompt, use_cache=True, output_attentions=False).logits

    clean = run()
    with struck(model, "model.layers.0.self_attn/bmm#2/forward", "nan", (0, 1, 1)):
        assert torch.equal(run(), clean)


@pytest.mark.parametrize(
    ("name", "attention"), attentions("bert", "gpt2", "gpt-neo", "llama", "t5")
)
@pytest.mark.parametrize("visible", ["all", "left", "right", "none"])
def test_masks_raise_no_alarm(name: str, attention: str, visible: str) -> None:
    case = subject(name, attention=attention)
    mask = torch.ones_like(case.batch["attention_mask"])
    hidden = {"all": slice(0), "left": slice(4), "right": slice(-4, None), "none": slice(None)}
    mask[1, hidden[visible]] = 0
    batch = {**case.batch, "attention_mask": mask}

    def run() -> Tensors:
        loss = case.loss(batch)
        return [loss.detach(), *torch.autograd.grad(loss, list(case.model.parameters()))]

    compare(case, run, exact=attention == "eager")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_that_see_nothing_raise_no_alarm(attention: str) -> None:
    case = subject("TransformerEncoderLayer", attention=attention)
    x = case.batch["x"]
    all_of_the_first = torch.arange(x.shape[0])[:, None].expand(x.shape[:2]) == 0

    def run() -> Tensors:
        output = case.model(x, src_key_padding_mask=all_of_the_first)
        assert output.isfinite().all()  # torch makes the softmax of nothing zero
        return [output.detach(), *torch.autograd.grad(output.square().sum(), [x])]

    compare(case, run, exact=attention == "eager")


def test_a_padding_mask_of_torchs_unfused_heads_raises_no_alarm() -> None:
    case = subject("MultiheadAttention")
    x, heads = case.batch["x"], case.model.get_submodule("attention")
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    padding[:, -2:] = True
    compare(case, lambda: list(heads(x, x, x, key_padding_mask=padding, need_weights=True)))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_an_input_that_is_not_a_number_is_named_as_such(name: str) -> None:
    case = subject(name)
    embedding = next(m for m in case.model.modules() if isinstance(m, torch.nn.Embedding))
    with torch.no_grad():
        embedding.weight[7, 0] = torch.nan
    tokens = case.batch["input_ids"].clone()
    tokens[0, 2] = 7
    with protect(case.model):
        loss = case.loss({**case.batch, "input_ids": tokens})
    assert loss.isnan()
    assert {event.kind for event in events.recent()} == {"nonfinite_input"}


def test_a_step_of_an_optimizer_between_two_protected_steps_raises_no_alarm() -> None:
    case = subject("roberta", dropout=0.1)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2, fused=True)
    with protect(case.model):
        before = calm(case)
        for _ in range(3):
            step(case)
            optimizer.step()
        assert calm(case) != before
    assert events.recent() == []


def test_a_model_in_evaluation_is_attacked_too() -> None:
    case = subject("vit")
    case.model.eval()
    clean, site = calm(case), case.matrices["O"].forward
    index = reaching(products(case)[site], TINY.length)
    assert attack(case, site, "near_inf", index, verify=False).digest != clean
    assert attack(case, site, "near_inf", index, verify=True).digest == clean
    assert len(gradients(case)) > 1
