"""``protect(model)``: verify every matmul of a model, report what is covered, and undo it."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from holdfast import config, native, sites
from holdfast.abft import counters, policy
from holdfast.abft.attention.op import SECTIONS
from holdfast.abft.counters import Counters
from holdfast.abft.frequency import due
from holdfast.abft.gemm import compiled
from holdfast.abft.gemm.interception import interception
from holdfast.abft.gemm.modules import identifier
from holdfast.abft.policy import Collected, Policy, collecting
from holdfast.nn import FrozenEmbeddingBag, Int8EmbeddingBag, Int8Linear

__all__ = ["Collected", "CoverageReport", "Protection", "SiteCoverage", "collecting", "protect"]

_logger = logging.getLogger("holdfast.protection")

# Modules whose products do not go through aten's mm, addmm, bmm or baddbmm.
NOT_COVERED_MODULES: dict[type[nn.Module], str] = {
    nn.modules.conv._ConvNd: "convolution: no checksum for it yet",
    nn.RNNBase: "the fused recurrent kernels do not call mm",
    nn.Bilinear: "the trilinear product is a reduction, not a matmul",
    nn.EmbeddingBag: "while it trains; holdfast.nn.Int8EmbeddingBag checks a frozen one",
}

# Name, in the report, for all of torch's own products where none can be intercepted.
PRODUCTS_OF_TORCH = "(every mm, addmm, bmm, baddbmm and fused attention)"

# How a site is verified: each output row after the product (abft/gemm), each output row at the end
# of a protection section of attention, or each tile before it is used (abft/attention).
METHODS = ("row checksums", "sections", "fused tiles")


@dataclass(frozen=True)
class SiteCoverage:
    """Coverage of one matmul site, and its counts since ``protect``."""

    site: str
    covered: bool
    reason: str  # why not covered; empty if it is
    calls: int = 0
    rows: int = 0
    suspects: int = 0
    line: float = 0.0  # sampled ratio of a row's threshold to its rms; smaller changes go unnoticed
    encode_s: float = 0.0  # time spent on checksums of the right operand
    product_s: float = 0.0  # time spent on the product itself
    verify_s: float = 0.0  # time spent on the check of the output
    method: str = ""  # how its calls were verified, one of METHODS; empty if none was

    @property
    def cost(self) -> float:
        """Time of the checks divided by the time of the products."""
        return (self.encode_s + self.verify_s) / self.product_s if self.product_s else 0.0


@dataclass(frozen=True)
class CoverageReport:
    """The coverage of a :class:`Protection`; ``print`` it, or use ``sites`` and ``as_dict``."""

    backend: str
    sites: list[SiteCoverage] = field(default_factory=list)
    false_alarms: int = 0  # suspect rows that a second, stricter check found right
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


# Containers without products of their own, which get no hooks to save time. Sequential does get
# hooks: blocks compiled one by one share a graph, and only hooks tell them apart.
_WITHOUT_PRODUCTS = frozenset(
    {
        *(nn.Identity, nn.Flatten, nn.Dropout, nn.Embedding, nn.LayerNorm),
        *(nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid),
        *(nn.Tanh, nn.Softmax, Int8EmbeddingBag, FrozenEmbeddingBag, Int8Linear),
    }
)


def _unprotected(module: int) -> None:
    """Do nothing, as the hook of a copied or unpickled module, which is not protected."""


class _Frame:
    """Module hook that pushes or pops the module on the interception's stack of running modules."""

    def __init__(self, act: Callable[[int], None], module: int) -> None:
        self._act, self._module = act, module

    def __call__(self, *_: object) -> None:
        # Compiled code skips this hook, as its products are named when the graph is compiled.
        if not torch.compiler.is_compiling():
            self._act(self._module)

    def __reduce__(self) -> tuple[object, ...]:
        return _Frame, (_unprotected, self._module)


class _Interception:
    """The hooks and settings with which one protection intercepts torch's products.

    Args:
        modules: Modules of the model and their numbers in ``sites.module_names``.
        weights: Tensors whose checksums are cached until the tensor changes.
        verify: True to verify products from the start.
    """

    def __init__(
        self, modules: dict[nn.Module, int], weights: list[nn.Parameter], *, verify: bool
    ) -> None:
        self._shared = interception()
        self._verifying = verify
        self._scope = self._shared.open_scope()
        self._hooks = [hook for each in modules.items() for hook in self._enter_and_leave(*each)]
        if compiled.install():
            self._shared.reset_counters()
            counters.reset()
        self._watched = self._shared.watch(weights)
        self.forget = self._shared.forget
        self._shared.change_process_depth(int(verify))

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
        """Turn verification of the products on or off."""
        self._shared.change_process_depth(int(wanted) - int(self._verifying))
        self._verifying = wanted

    def counters(self) -> list[Counters]:
        """Return the counters of every site of the process."""
        return [*self._shared.counters(), *counters.counters()]

    def close(self) -> None:
        """Remove the hooks and stop intercepting."""
        for hook in self._hooks:
            hook.remove()
        self._shared.change_process_depth(-int(self._verifying))
        self._shared.unwatch(self._watched)
        self._shared.close_scope(self._scope)
        compiled.uninstall()


class Protection:
    """Verified matmuls for a model; made by :func:`protect`.

    As a context manager it removes itself on exit. Each protection has its own correction policy
    and counters, which apply to the products that the model's modules call:

    - a module in several protected models follows the latest policy, and all protections count it;
    - products called outside of any module (``(outside)``) follow the latest active protection and
      are counted by all, as the interception cannot tell who called them.
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
                # Fused optimizers write parameters without incrementing the version counter.
                self._interception.forget(parameter)
        if not self._trained.isdisjoint(map(id, parameters)):
            self._next_step()

    def _next_step(self) -> None:
        """Turn verification on or off until the next optimizer step, forward and backward."""
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
        """Return each site's counts since the counters of this protection were last reset."""
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
        """Return the reason to report for a layer without counts."""
        if self._interception is None:
            return native.MISSING
        new = compiled.graphs_compiled() != self._graphs_before
        if new or any(module._compiled_call_impl is not None for module in self._paths):
            return "not run yet, or compiled code counts it under the name of another module"
        return "not run yet"

    def reset_counters(self) -> None:
        """Set the counts of calls, rows and suspect rows to zero."""
        rows = [] if self._interception is None else self._interception.counters()
        self._counters_before = {row["site"]: row for row in rows}
        self._false_alarms_before = self._policy.false_alarms

    def remove(self) -> None:
        """Remove the protection from the model; a second call does nothing."""
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

    This needs the native core; without it nothing is verified, and ``report()`` says so.

    Until ``remove()`` is called, each ``mm``, ``addmm``, ``bmm`` and ``baddbmm`` of this process is
    checked after it ran: signed row sums of the output are compared with checksums, within the
    ``rounding`` threshold. Fused attention is checked tile by tile, before a tile is used. A
    suspect row is computed again by the same kernel; if it differs it is replaced bit for bit and a
    ``gemm_fault`` event is recorded. Checksums of parameters are cached until these change.

    ``torch.compile`` may be applied before or after, without graph breaks: code compiled before is
    compiled again, and Inductor keeps its fusions. Blocks compiled one by one get one graph
    each, so set ``torch._dynamo.config.recompile_limit`` above the number of blocks.

    Args:
        model: Any module. Results keep their bits, except those of ``scaled_dot_product_attention``
            where torch would use its fused CPU kernel: there holdfast's kernel runs, forward and
            backward, with at most twice the rounding error (``abft/attention/README.md``). Two
            protected runs with the same inputs have the same bits.
        verify: False names the model's matmuls without verifying or counting them, so that faults
            can be injected into an unprotected run.
        correction: How a fault in the products of this model is handled (see ``Protection`` for
            modules of several protections and products outside of modules). ``recompute`` computes
            the product again and replaces the wrong rows bit for bit. ``checksum`` rebuilds the one
            wrong element of a row from the row's checksums, to within the threshold; rows with
            several wrong elements are recomputed. ``detect`` changes nothing and raises (or fails
            the step of a ``Guard``).
        frequency: Share of optimizer steps whose products are verified, 0 to 1; by default
            ``protect.frequency`` of the config file, else 1.

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
        ValueError: ``correction`` is none of the three, or ``frequency`` is not from 0 to 1.
        UncorrectableFault: Raised later, by a product whose fault persists in recomputation (a
            ``Guard`` defers it to the end of the step).

    Source: Huang and Abraham for the checksums; ATTNChecker, section 4.2, for correction by
    checksums. The random signs and the threshold are this project's (``thresholds.rounding``).
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
    """Return the path of each module, without the prefixes that DDP and torch.compile add."""
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
    """Return which of ``METHODS`` verifies an op, given the op's name in site names."""
    checksums, sections, tiles = METHODS
    if op.startswith("sdpa"):
        return tiles
    return sections if op.split(".")[0] in SECTIONS else checksums


def _static(module: nn.Module, path: str, idle: str) -> SiteCoverage | None:
    """Return the coverage entry of a module whose matmuls did not run yet; None if it has none."""
    for kind, reason in NOT_COVERED_MODULES.items():
        if isinstance(module, kind):
            return SiteCoverage(path, False, reason)
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None  # nn.MultiheadAttention multiplies by this layer's weight itself
    if isinstance(module, nn.Linear | nn.MultiheadAttention):
        tensors = (*module.parameters(), *module.buffers())
        device = tensors[0].device.type if tensors else "cpu"
        reason = idle if device == "cpu" else f"on {device}: verified on CPU only so far"
        return SiteCoverage(path, False, reason)
    return None
