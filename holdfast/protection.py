"""``protect(model)``: verify every matmul of a model, say what is covered, take it off again."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from holdfast import config, sites
from holdfast.abft.attention import section_counters
from holdfast.abft.attention.sections import SECTIONS
from holdfast.abft.frequency import due
from holdfast.abft.gemm import compiled, recovery
from holdfast.abft.gemm.backend import backend
from holdfast.abft.gemm.modules import identifier
from holdfast.abft.gemm.recovery import Deferred, deferring
from holdfast.nn import FrozenEmbeddingBag, Int8EmbeddingBag, Int8Linear

__all__ = ["CoverageReport", "Deferred", "Protection", "SiteCoverage", "deferring", "protect"]

# Modules that multiply matrices by other means than mm, addmm, bmm and baddbmm.
NOT_COVERED_MODULES: dict[type[nn.Module], str] = {
    nn.modules.conv._ConvNd: "convolution: no checksum for it yet",
    nn.RNNBase: "the fused recurrent kernels do not call mm",
    nn.Bilinear: "the trilinear product is a reduction, not a matmul",
    nn.EmbeddingBag: "while it trains; holdfast.nn.Int8EmbeddingBag checks a frozen one",
}

# How a site is verified: every output row after the product (ops/gemm), every output row at the end
# of its section, or every tile before it is used (ops/attention).
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
        """What the checks took, as a share of the products' own time."""
        return (self.encode_s + self.verify_s) / self.product_s if self.product_s else 0.0


@dataclass(frozen=True)
class CoverageReport:
    """What a :class:`Protection` covers; ``print`` it, or use ``sites`` and ``as_dict``."""

    backend: str
    sites: list[SiteCoverage] = field(default_factory=list)
    dismissed_rows: int = 0
    frequency: float = 1.0  # share of steps whose products are verified

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON-ready values."""
        return asdict(self)

    def __str__(self) -> str:
        covered = [site for site in self.sites if site.covered]
        methods = Counter(site.method for site in covered)
        by = ", ".join(f"{methods[name]} by {name}" for name in METHODS if methods[name])
        width = max([len(site.site) for site in self.sites], default=4)
        lines = [
            f"{len(covered)} of {len(self.sites)} matmul sites covered{f': {by}' if by else ''} "
            f"(signed checksums, rounding threshold, {self.backend} core); suspect rows cleared by "
            f"a second opinion: {self.dismissed_rows}",
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
    """What the hooks of a copied or unpickled module do: copies are not protected."""


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


class Protection:
    """Verified matmuls for a model; made by :func:`protect`.

    Usable as a context manager, which removes it at the end. The counters are the process's: they
    start from zero with the first of several protections.
    """

    _active_now = 0

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
        recovery.set_correction(correction)
        self.model = model
        self._verify = verify
        self._backend = backend()
        self._paths = dict(_names(model))
        self._identifiers = {identifier(module) for module in self._paths}
        self._scope = self._backend.open_scope()
        self._hooks = [hook for module in model.modules() for hook in self._name(module)]
        if not Protection._active_now:
            self._backend.reset_counters()
            section_counters.reset()
            compiled.install()
        Protection._active_now += 1
        self._watched = self._backend.watch(list(model.parameters()))
        self._trained = {id(parameter) for parameter in model.parameters()}
        self._hooks.append(register_optimizer_step_post_hook(self._stepped))
        self._backend.start(verify=verify and self._due)
        self._dismissed_before = recovery.dismissed_rows()
        self._graphs_before = compiled.graphs_compiled()
        self._active = True

    def _name(self, module: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        push, pop = partial(self._backend.push_module, scope=self._scope), self._backend.pop_module
        number = identifier(module)
        sites.module_names[number] = self._paths[module]
        if type(module) in _WITHOUT_PRODUCTS:
            return []
        return [
            module.register_forward_pre_hook(_Frame(push, number)),
            module.register_forward_hook(_Frame(pop, number), always_call=True),
        ]

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        # Fused optimizers write parameters without moving the version counter.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._backend.forget(parameter)
        if not self._trained.isdisjoint(id(p) for g in optimizer.param_groups for p in g["params"]):
            self._next_step()

    def _next_step(self) -> None:
        """Verify, or do not, from here to the optimizer's next step: forward and backward alike."""
        self._steps += 1
        wanted = due(self._steps, self.frequency)
        if wanted != self._due:
            self._backend.start(verify=self._verify and wanted)
            self._backend.stop(verify=self._verify and self._due)
            self._due = wanted

    def report(self) -> CoverageReport:
        """Every matmul site seen since ``protect``, and the modules that cannot be covered.

        Sites are found as the model runs: before its first forward and backward pass a linear
        layer is listed as not run yet.
        """
        ours = self._identifiers | {0}
        counters = [*self._backend.counters(), *section_counters.counters()]
        counters = [row for row in counters if row["site"][0] in ours]
        rows = [_coverage(counter) for counter in counters]
        rows += [
            SiteCoverage(sites.site_name(site), False, reason)
            for site, reason in compiled.uncovered().items()
            if site[0] in ours
        ]
        seen = {_module_of(row.site) for row in rows}
        static = (_static(module, path, self._idle()) for module, path in self._paths.items())
        rows += [row for row in static if row and row.site not in seen]
        dismissed = recovery.dismissed_rows() - self._dismissed_before
        rows = sorted(rows, key=lambda row: _order(row.site))
        return CoverageReport(self._backend.name, rows, dismissed, self.frequency)

    def _idle(self) -> str:
        """Why a layer may have no counts."""
        new = compiled.graphs_compiled() != self._graphs_before
        if new or any(module._compiled_call_impl is not None for module in self._paths):
            return "not run yet, or compiled code counts it under the name of another module"
        return "not run yet"

    def reset_counters(self) -> None:
        """Start counting calls, rows and suspects from zero."""
        self._backend.reset_counters()
        section_counters.reset()
        self._dismissed_before = recovery.dismissed_rows()

    def remove(self) -> None:
        """Leave the model exactly as it was; a second call does nothing."""
        if not self._active:
            return
        self._active = False
        Protection._active_now -= 1
        for hook in self._hooks:
            hook.remove()
        self._backend.stop(verify=self._verify and self._due)
        self._backend.unwatch(self._watched)
        self._backend.close_scope(self._scope)
        if not Protection._active_now:
            compiled.uninstall()

    def __enter__(self) -> "Protection":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def protect(
    model: nn.Module,
    *,
    verify: bool = True,
    correction: str = "recompute",
    frequency: float | None = None,
) -> Protection:
    """Verify every matmul that the model runs on CPU, forward and backward, eager or compiled.

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
            most twice torch's own (``ops/attention/README.md``). The same run protected twice has
            the same bits.
        verify: False names the model's matmuls without verifying or counting them, so that faults
            can be injected into an unprotected run.
        correction: what is done about a fault, in the whole process; the latest call decides.
            ``recompute``: the product is computed again and its rows replaced, bit for bit.
            ``checksum``: the wrong element of a row is rebuilt from the row's checksums, to within
            its threshold, without computing the product again; rows with several wrong elements
            are recomputed. ``detect``: nothing is changed, the fault raises (or fails the step of
            a ``Guard``).

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
    return Protection(model, verify=verify, correction=correction, frequency=frequency)


def _names(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Path of each module; wrappers (DDP's, torch.compile's) add nothing to it."""
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


def _coverage(counter: dict[str, Any]) -> SiteCoverage:
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
    """Which of ``METHODS`` verifies an op, by the name that its sites have."""
    checksums, sections, tiles = METHODS
    if op.startswith("sdpa"):
        return tiles
    return sections if op.split(".")[0] in SECTIONS else checksums


def _static(module: nn.Module, path: str, idle: str) -> SiteCoverage | None:
    """What can be said of a module before, or without, its matmuls being seen."""
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
