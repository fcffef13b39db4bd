"""Row checks with each threshold at choice: silent, sure of faults, and never harmful."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from case_loops import for_each
from gemm_distributions import COHERENT, RANDOM
from struck import kinds, same_bits, struck
from torch import nn

import holdfast
from holdfast.abft.checksums.weights import signs
from holdfast.abft.gemm.cpu import count_suspects, encode, verify
from holdfast.abft.gemm.reference import over_threshold, suspect_rows, verify_rows_reference
from holdfast.abft.gemm.row_tolerances import other, tolerances
from holdfast.abft.thresholds import REGISTRY, EMax, Norm, Product, Rounding, VAbft
from holdfast.abft.thresholds.calibrate import apply
from holdfast.abft.thresholds.profile import Bucket, Profile, save
from holdfast.abft.thresholds.settings import numeric_settings
from holdfast.abft.thresholds.vabft import E_MAX
from holdfast.errors import ConfigError
from holdfast.sites import Gemm
from holdfast_lab.distributions import Operands

NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNDERFLOW = ("subnormal", "underflow", "huge_range")
NORMAL = [*RANDOM, *(name for name in COHERENT if name not in UNDERFLOW)]
# The distributions on which a method claims to be silent.
CLAIMED = {"norm": NORMAL, "sea": NORMAL, "aabft": [*RANDOM], "vabft": [*RANDOM]}
CLAIMED["analytic"] = [*RANDOM, *COHERENT]
M, K, N = 40, 24, 33  # K + 2 N below a hundred, which SEA asks for in bf16

every_method = for_each("method", CLAIMED)
every_dtype = for_each("dtype", NAMES.values())


def profile(*dtypes: str, **changes: str) -> Profile:
    """A profile of this machine with the paper's e_max, margin included; some settings changed."""
    settings = numeric_settings(torch.device("cpu")) | changes
    buckets = tuple(Bucket(name, 1024, 100, E_MAX[NAMES[name]] / 1.2, {}) for name in dtypes)
    return Profile(settings, "quick", 0, 1.0, "2026-01-02T03:04:05+00:00", buckets)


@pytest.fixture(autouse=True)
def calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield save(profile("fp32", "bf16"))
    assert other() is None


def protect(threshold: object, model: nn.Module | None = None) -> holdfast.Protection:
    return holdfast.protect(model or nn.Identity(), threshold=threshold)  # type: ignore[arg-type]


def operands(dtype: torch.dtype, name: str = "n01", m: int = M) -> Operands:
    return (RANDOM | COHERENT)[name](m, K, N, dtype, torch.Generator().manual_seed(len(name)))


def gemm_of(a: torch.Tensor, b: torch.Tensor) -> Gemm:
    return Gemm(None, a, b, 1.0, 1.0, *encode(b))


@every_method
@every_dtype
def test_healthy_rows_are_silent_and_keep_their_bits(method: str, dtype: torch.dtype) -> None:
    drawn = [operands(dtype, name, 300) for name in CLAIMED[method]]
    expected = [a @ b for a, b in drawn]
    with protect(method) as protection:
        assert same_bits([a @ b for a, b in drawn], expected)
        (site,) = protection.report().sites
    assert (site.rows, site.suspects, kinds()) == (300 * len(drawn), 0, [])
    assert f"signed checksums, {method} threshold, native core" in str(protection.report())


@every_method
@every_dtype
def test_products_with_addends_are_silent(method: str, dtype: torch.dtype) -> None:
    """A bias far above the product, an addend of every row, factors, and a mask."""
    a, b = operands(dtype)
    layer, x = nn.Linear(K, N, dtype=dtype), a.clone().requires_grad_()
    nn.init.constant_(layer.bias, 1e4)
    rows = torch.linspace(-1e3, 1e3, M * N).view(M, N).to(dtype)
    hidden = torch.zeros(M, N, dtype=dtype).masked_fill_(torch.ones(M, N).triu(1).bool(), -1e9)

    def products() -> list[torch.Tensor]:
        output = layer(x)
        gradients = torch.autograd.grad(output, (x, *layer.parameters()), rows)
        factors = torch.addmm(rows, a, b, beta=-2, alpha=1e-3), torch.addmm(rows, a, b, alpha=3)
        return [output, *gradients, *factors, torch.baddbmm(hidden[None], a[None], b[None])]

    expected = products()
    with protect(method, layer) as protection:
        assert same_bits(products(), expected)
        sites = protection.report().sites
    assert (sum(site.calls for site in sites), sum(site.suspects for site in sites)) == (6, 0)


@every_method
@every_dtype
def test_a_fault_above_the_tolerance_is_repaired_and_unverified_gets_through(
    method: str, dtype: torch.dtype
) -> None:
    a, b = operands(dtype)
    clean = a @ b
    change = 4 * float(tolerances(gemm_of(a, b), REGISTRY[method])[0, 3])
    with protect(method), struck((3, 5), lambda old: old + change):
        assert same_bits(a @ b, clean)
    assert kinds() == ["gemm_fault"]
    unverified = holdfast.protect(nn.Identity(), threshold=method, verify=False)
    with unverified, struck((3, 5), lambda old: old + change):
        assert not torch.equal(a @ b, clean)
    assert kinds() == ["gemm_fault"]


@every_dtype
def test_the_chosen_threshold_decides_and_not_the_built_in_one(dtype: torch.dtype) -> None:
    a, b = operands(dtype)
    clean = a @ b
    change = float(tolerances(gemm_of(a, b), REGISTRY["analytic"])[0, 3]) / 4
    for method, repaired in (("analytic", False), ("rounding", True)):
        with protect(method), struck((3, 5), lambda old: old + change):
            assert torch.equal(a @ b, clean) is repaired


@every_method
@every_dtype
def test_the_native_core_and_plain_torch_decide_alike_by_the_published_formula(
    method: str, dtype: torch.dtype
) -> None:
    a, b = (torch.stack([each, each]) for each in operands(dtype))
    rows = torch.linspace(-2, 2, M * N).view(M, N).to(dtype)
    gemm = replace(gemm_of(a, b), addend=rows, beta=0.5, alpha=-2.0)
    output = (0.5 * rows.double() - 2.0 * (a.double() @ b.double())).to(dtype)
    output[1, 7, 1] += 4 * float(tolerances(gemm, REGISTRY[method])[1, 7])
    with protect(method):
        known = gemm.a, gemm.row_sum, gemm.statistics, gemm.addend, gemm.beta, gemm.alpha, gemm.b
        native, plain = verify(output, *known), verify_rows_reference(output, *known)
        assert count_suspects(gemm, output)[0] == 1
    assert torch.equal(native[1], plain[1])
    assert suspect_rows(native).nonzero().tolist() == [[1, 7]]
    assert suspect_rows(plain).nonzero().tolist() == [[1, 7]]
    published = REGISTRY[method](Product(a, b * signs(N, dtype), None, dtype))
    torch.testing.assert_close(tolerances(gemm_of(a, b), REGISTRY[method]), published)


def test_vabft_flags_coherent_data_and_bounds_that_hold_for_any_do_not() -> None:
    a, b, c = torch.ones(64, 256), torch.full((256, 64), 0.1), torch.zeros(64, 64)
    for k in range(256):  # one long chain, whose roundings are all alike
        c += a[:, k : k + 1] * b[k : k + 1]
    for method, flagged in {"vabft": 64, "analytic": 0, "norm": 0, "sea": 0}.items():
        with protect(method):
            assert int(over_threshold(verify(c, a, *encode(b), b=b)).sum()) == flagged, method


def test_aabft_flags_rows_whose_checksum_cancels_and_others_do_not() -> None:
    """Its y is the largest |a_k (B r)_k|, which is nothing of the size of the products here."""
    a, drawn = operands(torch.bfloat16)[0], torch.Generator().manual_seed(0)
    left, right = (torch.randint(-8, 9, (K, 11), generator=drawn) for _ in range(2))
    b = (torch.cat([left, right, -(left + right)], 1) * signs(N)).to(torch.bfloat16)
    assert not encode(b)[0].any()
    clean = a @ b
    for method, alarms in (("aabft", True), ("vabft", False), ("sea", False)):
        with protect(method) as protection:
            assert same_bits(a @ b, clean)
        assert (protection.report().false_alarms > M / 2) is alarms, method
    assert kinds() == []


@every_dtype
def test_false_alarms_are_counted_and_change_nothing(dtype: torch.dtype) -> None:
    """With an e_max far below any rounding every inexact row is suspect."""
    a, b = operands(dtype)
    clean = a @ b
    with protect(VAbft(e_max=dict.fromkeys(E_MAX, EMax(1e-14)))) as protection:
        assert same_bits(a @ b, clean)
        report = protection.report()
    assert report.false_alarms == report.sites[0].suspects > 0
    assert kinds() == []


def test_vabft_reads_the_profile_and_refuses_one_of_other_settings(calibrated: Path) -> None:
    with protect("vabft", nn.Linear(2, 2)):
        assert other() == apply(profile("fp32", "bf16"))
    calibrated.unlink()
    with pytest.raises(ConfigError, match=r"needs this device's profile.*holdfast calibrate"):
        protect("vabft")
    for name in numeric_settings(torch.device("cpu")):
        save(profile("fp32", **{name: "elsewhere"}), calibrated)
        with pytest.raises(ConfigError, match=f"settings: {name} was elsewhere and is .*; measure"):
            protect("vabft")
    save(profile("fp32"), calibrated)
    with pytest.raises(ConfigError, match=r"needs bf16, and this device's profile has only fp32"):
        protect("vabft", nn.Linear(2, 2, dtype=torch.bfloat16))


def test_what_is_no_threshold_or_cannot_apply_is_refused() -> None:
    for unknown in ("vabtf", "", "Rounding", 7, None):
        with pytest.raises(ConfigError, match="choose one of analytic, norm, sea, aabft, vabft, r"):
            protect(unknown)
    with pytest.raises(ConfigError, match="parameters are on meta"):
        protect("sea", nn.Linear(2, 2, device="meta"))
    with protect("norm"), protect(Norm()):
        for another in ("rounding", "analytic", Norm(scope="row")):
            with pytest.raises(ConfigError, match=r"another protection of this process uses Norm"):
                protect(another)
    with protect(Rounding()), protect("rounding"):
        assert other() is None


@dataclass(frozen=True)
class Failing(Norm):
    """A threshold that raises."""

    error: type[BaseException] = ValueError

    def __call__(self, product: Product) -> torch.Tensor:
        raise self.error("no bound")


def test_a_threshold_that_fails_costs_the_check_and_an_interrupt_is_none() -> None:
    a, b = operands(torch.float32)
    clean = a @ b
    with protect(Failing()) as protection:
        assert same_bits(a @ b, clean)
        assert not protection.report().sites[0].covered
    assert kinds() == ["check_failed"]
    with protect(Failing(error=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        a @ b
