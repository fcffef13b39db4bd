"""``protect(model)``: verify every matmul of a model, say what is covered, take it off again."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from holdfast import config, native, sites
from holdfast.abft import policy
from holdfast.abft.attention import section_counters
from holdfast.abft.attention.sections import SECTIONS
from holdfast.abft.frequency import due
from holdfast.abft.gemm import compiled
from holdfast.abft.gemm.interception import Counters, interception
from holdfast.abft.gemm.modules import identifier
from holdfast.abft.policy import Collected, Policy, collecting
from holdfast.nn import FrozenEmbeddingBag, Int8EmbeddingBag, Int8Linear

__all__ = ["Collected", "CoverageReport", "Protection", "SiteCoverage", "collecting", "protect"]

_logger = logging.getLogger("holdfast.protection")

# Modules that multiply matrices by other means than mm, addmm, bmm and baddbmm.
NOT_COVERED_MODULES: dict[type[nn.Module], str] = {
    nn.modules.conv._ConvNd: "convolution: no checksum for it yet",
    nn.RNNBase: "the fused recurrent kernels do not call mm",
    nn.Bilinear: "the trilinear product is a reduction, not a matmul",
    nn.EmbeddingBag: "while it trains; holdfast.nn.Int8EmbeddingBag checks a frozen one",
}

# The site that stands for all of torch's own products where none can be intercepted.
PRODUCTS_OF_TORCH = "(every mm, addmm, bmm, baddbmm and fused attention)"

# How a site is verified: every output row after the product (abft/gemm), every output row at the
# end of its section, or every tile before it is used (abft/attention).
METHODS = ("row checksums", "sections", "fused tiles")


@dataclass(frozen=True)
class SiteCoverage:
    """One matmul site: what it did since ``protect``, and whether and how it is verified."""

    site: str
    covered: bool
    reason: str  # why not covered; empty if it is
    calls: int = 0
    rows: int = 0
    suspects: int = 0
    line: float = 0.0  # threshold / rms of a row, of a call now and then: smaller changes pass
    encode_s: float = 0.0  # spent on checksums of the right operand
    product_s: float = 0.0  # spent on the product itself
    verify_s: float = 0.0  # spent on the check of the output
    method: str = ""  # by which its calls were verified, one of METHODS; empty if none was

    @property
    def cost(self) -> float:
        """Time of the checks, as a share of the products' own time."""
        return (self.encode_s + self.verify_s) / self.product_s if self.product_s else 0.0


@dataclass(frozen=True)
class CoverageReport:
    """The coverage of a :class:`Protection`; ``print`` it, or use ``sites`` and ``as_dict``."""

    backend: str
    sites: list[SiteCoverage] = field(default_factory=list)
    false_alarms: int = 0  # suspect rows that a second opinion cleared
    frequency: float = 1.0  # share of steps whose products are verified

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON-ready values."""
        return asdict(self)

    def __str__(self) -> str:
        covered = [site for site in self.sites if site.covered]
        methods = Counter(site.method for site in covered)
        by = ", ".join(f"{methods[name]} by {name}" for name in METHODS if methods[name])
        width = max([len(site.site) for site in self.sites], default=4)
        lines = [
            f"{len(covered)} of {len(self.sites)} matmul sites covered{f': {by}' if by else ''} "
            f"(signed checksums, rounding threshold, {self.backend} core); suspect rows cleared by "
            f"a second opinion: {self.false_alarms}",
            *([f"verified in {self.frequency:.4g} of the steps"] if self.frequency < 1 else []),
            f"{'site':{width}}  {'calls':>8} {'rows':>10} {'suspects':>8}  line/rms   cost  status",
        ]
        for site in self.sites:
            how = f"covered by {site.method}" if site.method else "covered"
            status = how if site.covered else f"NOT COVERED: {site.reason}"
            lines.append(
                f"{site.site:{width}}  {site.calls:8} {site.rows:10} {site.suspects:8}  "
                f"{site.line:8.1e} {site.cost:6.1%}  {status}"
            )
        return "\n".join(lines)


# Their own forward multiplies nothing: no product is named after them, and entering them costs. Not
# Sequential: blocks that are compiled one by one share a graph, and only its hooks tell them apart.
_WITHOUT_PRODUCTS = frozenset(
    {
        *(nn.Identity, nn.Flatten, nn.Dropout, nn.Embedding, nn.LayerNorm),
        *(nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid),
        *(nn.Tanh, nn.Softmax, Int8EmbeddingBag, FrozenEmbeddingBag, Int8Linear),
    }
)


def _unprotected(module: int) -> None:
    """Do nothing: the hooks of a copied or unpickled module, as copies are not protected."""


class _Frame:
    """A module hook that enters or leaves the module on the interception's stack."""

    def __init__(self, act: Callable[[int], None], module: int) -> None:
        self._act, self._module = act, module

    def __call__(self, *_: object) -> None:
        # Compiled code does not run this: its products are named when the graph is made.
        if not torch.compiler.is_compiling():
            self._act(self._module)

    def __reduce__(self) -> tuple[object, ...]:
        return _Frame, (_unprotected, self._module)


class _Interception:
    """One protection's use of the interception of torch's products, until it is closed.

    Args:
        modules: the model's modules and their numbers.
        weights: whose checksums are kept until they change.
        verify: whether products are verified from the start.
    """

    _open_now = 0

    def __init__(
        self, modules: dict[nn.Module, int], weights: list[nn.Parameter], *, verify: bool
    ) -> None:
        self._shared = interception()
        self._verifying = verify
        self._scope = self._shared.open_scope()
        self._hooks = [hook for each in modules.items() for hook in self._enter_and_leave(*each)]
        if not _Interception._open_now:
            self._shared.reset_counters()
            section_counters.reset()
            compiled.install()
        _Interception._open_now += 1
        self._watched = self._shared.watch(weights)
        self.forget = self._shared.forget
        self._shared.start(verify=verify)

    def _enter_and_leave(
        self, module: nn.Module, number: int
    ) -> list[torch.utils.hooks.RemovableHandle]:
        if type(module) in _WITHOUT_PRODUCTS:
            return []
        push, pop = partial(self._shared.push_module, scope=self._scope), self._shared.pop_module
        return [
            module.register_forward_pre_hook(_Frame(push, number)),
            module.register_forward_hook(_Frame(pop, number), always_call=True),
        ]

    def verify(self, wanted: bool) -> None:
        """Verify the products from here on, or do not."""
        if wanted != self._verifying:
            self._shared.start(verify=wanted)
            self._shared.stop(verify=self._verifying)
            self._verifying = wanted

    def counters(self) -> list[Counters]:
        """Return what every site of the process did."""
        of_sections = cast(list[Counters], section_counters.counters())
        return [*self._shared.counters(), *of_sections]

    def close(self) -> None:
        """Undo everything."""
        _Interception._open_now -= 1
        for hook in self._hooks:
            hook.remove()
        self._shared.stop(verify=self._verifying)
        self._shared.unwatch(self._watched)
        self._shared.close_scope(self._scope)
        if not _Interception._open_now:
            compiled.uninstall()


class Protection:
    """Verified matmuls for a model; made by :func:`protect`.

    Usable as a context manager, which removes it at the end. Its policy and its counters are its
    own, told apart by the module that a product belongs to:

    - a module of several protections follows the latest one's policy, and is counted by all;
    - products outside every module (``(outside)``) follow the latest protection in force, and are
      counted by all: the interception sees the whole process and cannot tell who called them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        verify: bool = True,
        correction: str = "recompute",
        frequency: float | None = None,
    ) -> None:
        self.frequency = config.value("protect.frequency", frequency, 1.0)
        self._steps, self._due = 0, due(0, self.frequency)
        self._policy = Policy(correction)
        self.model = model
        self._verify = verify
        self._paths = dict(_names(model))
        self._numbers = {module: identifier(module) for module in self._paths}
        for module, number in self._numbers.items():
            sites.module_names[number] = self._paths[module]
        self._interception: _Interception | None = None
        if native.core is not None:
            parameters = list(model.parameters())
            self._interception = _Interception(
                self._numbers, parameters, verify=verify and self._due
            )
        self._trained = {id(parameter) for parameter in model.parameters()}
        self._hook = register_optimizer_step_post_hook(self._stepped)
        if verify:
            policy.put_in_force(self._policy, self._numbers.values())
        self._active, self._final_counters = True, list[Counters]()
        self._graphs_before = compiled.graphs_compiled()
        self.reset_counters()

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._interception is not None:
            for parameter in parameters:
                # Fused optimizers write parameters without moving the version counter.
                self._interception.forget(parameter)
        if not self._trained.isdisjoint(map(id, parameters)):
            self._next_step()

    def _next_step(self) -> None:
        """Verify, or do not, from here to the optimizer's next step: forward and backward alike."""
        self._steps += 1
        self._due = due(self._steps, self.frequency)
        if self._interception is not None:
            self._interception.verify(self._verify and self._due)

    def report(self) -> CoverageReport:
        """List every matmul site seen since ``protect``, and what cannot be covered.

        Sites are found as the model runs: before its first forward and backward pass a linear
        layer is listed as not run yet.
        """
        ours = {*self._numbers.values(), 0}
        rows = [_coverage(counter) for counter in self._counters() if counter["site"][0] in ours]
        rows += [
            SiteCoverage(sites.site_name(site), False, reason)
            for site, reason in compiled.uncovered().items()
            if site[0] in ours
        ]
        seen = {_module_of(row.site) for row in rows}
        static = (_static(module, path, self._idle()) for module, path in self._paths.items())
        rows += [row for row in static if row and row.site not in seen]
        if self._interception is None:
            rows.append(SiteCoverage(PRODUCTS_OF_TORCH, False, native.MISSING))
        rows = sorted(rows, key=lambda row: _order(row.site))
        core = "no native" if self._interception is None else "native"
        alarms = self._policy.false_alarms - self._false_alarms_before
        return CoverageReport(core, rows, alarms, self.frequency)

    def _counters(self) -> list[Counters]:
        """Return what each site did since the counters of this protection were zero."""
        if self._interception is None or not self._active:
            return self._final_counters
        rows = []
        for row in self._interception.counters():
            before = self._counters_before.get(row["site"])
            since = row if before is None else _difference(row, before)
            if since["calls"] or since["unverified"]:
                rows.append(since)
        return rows

    def _idle(self) -> str:
        """Say why a layer may have no counts."""
        if self._interception is None:
            return native.MISSING
        new = compiled.graphs_compiled() != self._graphs_before
        if new or any(module._compiled_call_impl is not None for module in self._paths):
            return "not run yet, or compiled code counts it under the name of another module"
        return "not run yet"

    def reset_counters(self) -> None:
        """Start counting calls, rows and suspects from zero."""
        counters = [] if self._interception is None else self._interception.counters()
        self._counters_before = {row["site"]: row for row in counters}
        self._false_alarms_before = self._policy.false_alarms

    def remove(self) -> None:
        """Leave the model exactly as it was; a second call does nothing."""
        if not self._active:
            return
        self._final_counters, self._active = self._counters(), False
        self._hook.remove()
        if self._verify:
            policy.retire(self._policy, self._numbers.values())
        if self._interception is not None:
            self._interception.close()

    def __enter__(self) -> "Protection":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _difference(now: Counters, before: Counters) -> Counters:
    since = now.copy()
    for name in ("calls", "rows", "suspects", "unverified", "encode_s", "product_s", "verify_s"):
        since[name] = now[name] - before[name]
    return since


def protect(
    model: nn.Module,
    *,
    verify: bool = True,
    correction: str = "recompute",
    frequency: float | None = None,
) -> Protection:
    """Verify every matmul that the model runs on CPU, forward and backward, eager or compiled.

    Without the native core nothing of this can be intercepted: ``report()`` says so.

    From here to ``remove()`` each ``mm``, ``addmm``, ``bmm`` and ``baddbmm`` of this process is
    checked by signed row checksums against the ``rounding`` threshold, in the pass that follows the
    product; fused attention tile by tile, before a tile is used. A suspect row is computed again by
    the same kernel; if it differs it is replaced bit for bit and a ``gemm_fault`` event is
    recorded. The checksums of the model's parameters are kept until the parameter changes.

    ``torch.compile`` may come before or after, with no graph break: what was compiled before is
    compiled again, and Inductor keeps its fusions. Blocks compiled one by one get a graph each, for
    the sake of their names: set ``torch._dynamo.config.recompile_limit`` above their number.

    Args:
        model: any module. Its numerics do not change by a bit where torch's kernels compute, which
            is everywhere but in ``scaled_dot_product_attention``: what torch would give to its
            fused CPU kernel runs in ours while protected, forward and backward, with an error of at
            most twice torch's own (``abft/attention/README.md``). The same run protected twice has
            the same bits.
        verify: False names the model's matmuls without verifying or counting them, so that faults
            can be injected into an unprotected run.
        correction: what is done about a fault in the products of this model (see ``Protection`` for
            modules of several protections and products outside of modules). ``recompute``: the
            product is computed again and its rows replaced, bit for bit. ``checksum``: the wrong
            element of a row is rebuilt from the row's checksums, to within its threshold, without
            computing the product again; rows with several wrong elements are recomputed.
            ``detect``: nothing is changed, the fault raises (or fails the step of a ``Guard``).
        frequency: share of the optimizer's steps whose products are verified, 0 to 1; by default
            the config file's ``protect.frequency``, else all of them.

    Returns:
        The protection: ``report()``, ``remove()``.

    Guarantees: a fault in one output row that moves the row's signed sum by more than twice its
    threshold is found and repaired; healthy results are never altered. Not covered (and listed by
    ``report()``): convolutions, dot products, products that Inductor computes by kernels
    of its own (single dot products, frozen weights), sparse, integer, scaled 8-bit, quantized and
    complex products; and, beyond any checksum, what is already wrong in the operands. Graphs that
    another thread or another compiler than Inductor made are covered, but their products are named
    ``(outside)`` or after the module around.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``correction`` is none of the three, or ``frequency`` no share.
        UncorrectableFault: later, from the product in which a fault persists (a ``Guard`` defers
            it to the end of the step).

    Source: Huang and Abraham for the checksums, ATTNChecker (section 4.2) for the correction by
    them; signs and threshold are ours (``thresholds.rounding``).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"protect needs a torch.nn.Module, got {type(model).__name__}")
    protection = Protection(model, verify=verify, correction=correction, frequency=frequency)
    _log_start(protection, verify, correction)
    return protection


def _log_start(protection: Protection, verify: bool, correction: str) -> None:
    share = f"verified in a share of {protection.frequency:g} of the steps, correction {correction}"
    named = protection.model.named_modules()
    bare = [name for name, module in named if isinstance(module, tuple(NOT_COVERED_MODULES))]
    _logger.info(
        "protecting %s: matrix products are %s; modules not covered: %s",
        type(protection.model).__name__,
        share if verify else "named, not verified",
        ", ".join(bare[:3] + ["…"] * (len(bare) > 3)) or "none",
    )


def _names(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the path of each module; wrappers (DDP's, torch.compile's) add nothing to it."""
    root = type(getattr(model, "_orig_mod", model)).__name__
    return [(module, _path(name) or root) for name, module in model.named_modules()]


def _path(name: str) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts).removeprefix("module.")


def _module_of(site: str) -> str:
    return site.split("/", 1)[0]


def _order(site: str) -> tuple[list[tuple[int, str]], str]:
    parts = _module_of(site).split(".")
    return [(int(p), "") if p.isdigit() else (-1, p) for p in parts], site


def _coverage(counter: Counters) -> SiteCoverage:
    verified = counter["covered"] and not counter["unverified"]
    return SiteCoverage(
        site=sites.site_name(counter["site"]),
        covered=verified,
        reason="" if verified else counter["reason"],
        calls=counter["calls"] + counter["unverified"],
        rows=counter["rows"],
        suspects=counter["suspects"],
        line=counter["line"],
        encode_s=counter["encode_s"],
        product_s=counter["product_s"],
        verify_s=counter["verify_s"],
        method=_method(counter["site"][1]) if counter["calls"] else "",
    )


def _method(op: str) -> str:
    """Return which of ``METHODS`` verifies an op, by the name that its sites have."""
    checksums, sections, tiles = METHODS
    if op.startswith("sdpa"):
        return tiles
    return sections if op.split(".")[0] in SECTIONS else checksums


def _static(module: nn.Module, path: str, idle: str) -> SiteCoverage | None:
    """Describe a module whose matmuls were not seen; None if it has none."""
    for kind, reason in NOT_COVERED_MODULES.items():
        if isinstance(module, kind):
            return SiteCoverage(path, False, reason)
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None  # nn.MultiheadAttention multiplies by its weight, under its own name
    if isinstance(module, nn.Linear | nn.MultiheadAttention):
        tensors = (*module.parameters(), *module.buffers())
        device = tensors[0].device.type if tensors else "cpu"
        reason = idle if device == "cpu" else f"on {device}: verified on CPU only so far"
        return SiteCoverage(path, False, reason)
    return None
