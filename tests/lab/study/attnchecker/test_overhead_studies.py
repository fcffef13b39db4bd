"""What is timed is what it is called: unfused checks check, baselines do not, arrays differ."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from case_loops import for_each
from torch import nn

from holdfast import events
from holdfast.errors import UncorrectableFault
from holdfast.protection import protect
from holdfast_lab.study.attnchecker import overhead
from holdfast_lab.study.attnchecker.attack import gradients
from holdfast_lab.study.attnchecker.models import PAPER_MODELS, TINY, subject
from holdfast_lab.study.attnchecker.unfused import Unfused

pytestmark = pytest.mark.study

SIZE = replace(TINY, layers=1)
needs_models = pytest.mark.usefixtures("_models")


@pytest.fixture
def _models() -> None:
    pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")


def struck(a: torch.Tensor, b: torch.Tensor, value: float) -> None:
    """A product one of whose elements is wrong, as the variant would see it."""
    with Unfused() as mode:
        c = a @ b
        c.flatten()[3] = value
        mode._check(c, None, a, b)


@for_each("shape", [(40, 30, 20), (3, 40, 30, 20)])
@for_each("value", [float("inf"), float("nan"), 1e30, 50.0])
def test_unfused_checks_find_a_wrong_element(shape: tuple[int, ...], value: float) -> None:
    torch.manual_seed(0)
    *batch, m, k, n = shape
    a, b = torch.randn(*batch, m, k), torch.randn(*batch, k, n)
    with pytest.raises(UncorrectableFault, match="1 rows of a product"):
        struck(a, b, value)


@needs_models
@for_each("name", PAPER_MODELS)
def test_unfused_checks_see_every_product_of_a_step_and_are_silent(name: str) -> None:
    case = subject(name, SIZE)
    with protect(case.model) as protection:
        expected = gradients(case)
        calls = sum(site.calls for site in protection.report().sites)
    with Unfused() as mode:
        found = gradients(case)
    assert mode.checked == calls > 15
    for one, other in zip(found, expected, strict=True):
        assert one is other is None or torch.equal(one, other)


@needs_models
@for_each("name", PAPER_MODELS)
def test_only_the_protected_variants_are_verified(name: str) -> None:
    case = subject(name, SIZE)
    model, sections = overhead.sections_of(case, SIZE.heads)
    with protect(nn.ModuleList([case.model, model])):
        run = overhead.attention_of(case)

        def verified(variant: Callable[[], object]) -> int:
            overhead.interception().reset_counters()
            variant()
            return sum(row["calls"] for row in overhead.interception().counters())

        assert verified(overhead.without_checks(run)) == 0
        assert verified(overhead.by_operators(run)) == 0
        assert verified(overhead.forgetting(case.model, run)) == verified(run) > 0
        assert verified(sections) == 0  # sections check by themselves
    assert events.recent() == []


def test_overheads_are_relative_to_the_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 1.5, 2.0, 5.0, 1.0, 1.5, 2.0, 5.0])
    monkeypatch.setattr(overhead, "seconds", lambda _: next(seconds))
    variants = {"a": lambda: None, "b": lambda: None}
    bare_s, found = overhead.overheads(lambda: None, variants, pairs=2)
    assert bare_s == 1.5
    assert found == pytest.approx({"a": 50.0, "b": 150.0})
