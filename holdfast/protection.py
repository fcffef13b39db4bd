"""``protect(model)``: verify every matmul of a model, report what is covered, and undo it."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from holdfast import config, native, sites
from holdfast.abft import counters, ledger, policy
from holdfast.abft.conv.interception import every_call
from holdfast.abft.counters import Counters
from holdfast.abft.coverage import (
    METHODS,
    NOT_COVERED_MODULES,
    PRODUCTS_OF_TORCH,
    CoverageReport,
    SiteCoverage,
    coverage,
    module_of,
    order,
    static,
)
from holdfast.abft.gemm import compiled, row_tolerances
from holdfast.abft.gemm.devices import (
    CPU,
    allow_reduced_precision,
    intercept,
    is_verified,
    keep_full_precision,
)
from holdfast.abft.gemm.interception import interception
from holdfast.abft.gemm.modules import identifier
from holdfast.abft.gemm.other_devices import OtherDevices
from holdfast.abft.policy import Collected, Policy, collecting
from holdfast.abft.sampling import Passes, Sampler
from holdfast.abft.step_share import Measurement, StepShare
from holdfast.abft.thresholds import Threshold
from holdfast.errors import ConfigError
from holdfast.nn import FrozenEmbeddingBag, Int8EmbeddingBag, Int8Linear
from holdfast.sites import SiteTuple

__all__ = [
    "METHODS",
    "Collected",
    "CoverageReport",
    "Protection",
    "SiteCoverage",
    "collecting",
    "protect",
]

_logger = logging.getLogger("holdfast.protection")

# Modules without products of their own, which get no hooks to save time.
_WITHOUT_PRODUCTS = frozenset(
    {
        *(nn.Identity, nn.Flatten, nn.Dropout, nn.Embedding, nn.LayerNorm),
        *(nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid),
        *(nn.Tanh, nn.Softmax, Int8EmbeddingBag, FrozenEmbeddingBag, Int8Linear),
    }
)


def _may_multiply(module: nn.Module, root: nn.Module) -> bool:
    """Return whether a module needs hooks, because it or its modules may compute products.

    A Sequential computes none itself, and needs hooks only around modules that do: blocks that are
    compiled one by one share a graph, and only the hooks tell whose products are computed. The root
    always needs them, since modules in it may be replaced later.
    """
    if type(module) is nn.Sequential and module is not root:
        return any(_may_multiply(each, root) for each in module)
    return type(module) not in _WITHOUT_PRODUCTS


def _unprotected(*_: int) -> None:
    """Do nothing, as the hook of a copied or unpickled module, which is not protected."""


class _Frame:
    """Module hook that pushes or pops the module on the interception's stack of running modules."""

    def __init__(self, act: Callable[..., None], *of: int) -> None:
        self._act, self._of = act, of  # no keyword arguments, which pybind11 takes longer to match

    def __call__(self, *_: object) -> None:
        # Compiled code skips this hook, as its products are named when the graph is compiled.
        if not torch.compiler.is_compiling():
            self._act(*self._of)

    @property
    def __name__(self) -> str:
        # torch.jit.script asks for it. Others must still find that a hook has none.
        raise AttributeError(
            "torch.jit.script cannot take a protected model, as TorchScript takes no hooks: call "
            "Protection.remove() first, or use torch.compile, under which products stay verified"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _Frame, (_unprotected, *self._of)


def is_protected(module: nn.Module) -> bool:
    """Return whether the products that a module calls itself are those of a protected model."""
    return any(isinstance(hook, _Frame) for hook in module._forward_pre_hooks.values())


@contextmanager
def as_called(module: nn.Module) -> Iterator[None]:
    """Count the products of the context as those that a module calls itself."""
    with ExitStack() as stack:
        for hook in (h for h in module._forward_hooks.values() if isinstance(h, _Frame)):
            stack.callback(hook)
        for hook in (h for h in module._forward_pre_hooks.values() if isinstance(h, _Frame)):
            hook()
        yield


class _Interception:
    """The hooks and settings with which one protection intercepts torch's products.

    Args:
        modules: Modules of the model and their numbers in ``sites.module_names``.
        weights: Tensors whose checksums are cached until the tensor changes.
        frequency: Share of passes to verify; None to verify nothing.
    """

    def __init__(
        self,
        modules: dict[nn.Module, int],
        weights: list[nn.Parameter],
        frequency: float | None,
    ) -> None:
        self._shared = interception()
        self._verifying = False
        self.forget = self._shared.forget
        self.sampler: Sampler | None = None
        with ExitStack() as undo:
            for device in {weight.device for weight in weights} - {torch.device(CPU)}:
                intercept(device)
            keep_full_precision()
            undo.callback(allow_reduced_precision)
            self._scope = self._shared.open_scope()
            undo.callback(self._shared.close_scope, self._scope)
            if compiled.install():
                self._shared.reset_counters()
                counters.reset()
            undo.callback(compiled.uninstall)
            undo.callback(self._shared.unwatch, self._shared.watch(weights))
            undo.callback(self.verify, False)
            if frequency is not None and frequency < 1:
                self.sampler = Sampler(self._shared, frequency, self.verify)
                undo.callback(self.sampler.close)
            elif frequency is not None:
                self.verify(True)
            root = next(iter(modules))
            for module, number in modules.items():
                if _may_multiply(module, root):
                    for hook in self._enter_and_leave(module, number):
                        undo.callback(hook.remove)
            self.close = undo.pop_all().close

    def _enter_and_leave(
        self, module: nn.Module, number: int
    ) -> Iterator[torch.utils.hooks.RemovableHandle]:
        enter = _Frame(self._shared.push_module, number, self._scope)
        leave = _Frame(self._shared.pop_module, number)
        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave, always_call=True)
        if self.sampler is not None:
            yield from self.sampler.hook(module, number)

    def verify(self, wanted: bool) -> None:
        """Turn verification of the products of all threads on or off."""
        self._shared.change_process_depth(int(wanted) - int(self._verifying))
        self._verifying = wanted

    def counters(self) -> list[Counters]:
        """Return the counters of every site of the process."""
        return [*self._shared.counters(), *counters.counters()]


_owners = Counter[int]()  # protections of each parameter, by ``id()``


_owning = threading.RLock()
_living: "WeakValueDictionary[int, Protection]" = WeakValueDictionary()  # by ``id()``, oldest first


def _own(parameters: Collection[int], change: int) -> None:
    with _owning:
        for each in parameters:
            _owners[each] += change
            if not _owners[each]:
                del _owners[each]


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
        strict: bool = False,
        attention: str | None = None,
        threshold: str | Threshold = "rounding",
        convolutions: float | None = None,
    ) -> None:
        begin_attention = _attention(attention)
        self._threshold = row_tolerances.chosen(threshold, model.parameters())
        self.frequency = config.value("protect.frequency", frequency, 1.0)
        convolved = config.value("protect.convolutions", convolutions, policy.CONVOLUTIONS)
        for name, given in (("frequency", self.frequency), ("convolutions", convolved)):
            if not isinstance(given, int | float) or not 0 <= given <= 1:
                raise ValueError(f"{name} = {given!r} must be between 0 (never) and 1 (always)")
        self._policy = Policy(correction, strict, convolved)
        self.model = model
        _refuse_scripted(model)
        self._paths = dict(_names(model))
        structure = _structure(model)
        self._numbers = {
            module: identifier(module, f"{structure}/{path}")
            for module, path in self._paths.items()
        }
        for module, number in self._numbers.items():
            sites.module_names[number] = self._paths[module]
        self._trained = {id(parameter) for parameter in model.parameters()}
        self._interception: _Interception | None = None
        self._share: StepShare | None = None
        with ExitStack() as undo:  # if anything fails, the model and the process are as before
            if native.core is not None:
                share = self.frequency if verify else None
                self._interception = _Interception(self._numbers, [*model.parameters()], share)
                undo.callback(self._interception.close)
            undo.callback(begin_attention())
            self._elsewhere = OtherDevices(model, self._paths)
            undo.callback(self._elsewhere.close)
            _own(self._trained, 1)
            undo.callback(_own, self._trained, -1)
            undo.callback(register_optimizer_step_pre_hook(self._about_to_step).remove)
            undo.callback(register_optimizer_step_post_hook(self._stepped).remove)
            if verify:
                undo.callback(row_tolerances.put_in_force(self._threshold))
                policy.put_in_force(self._policy, self._numbers.values())
                undo.callback(policy.retire, self._policy, self._numbers.values())
            self._active, self._final_counters = True, list[Counters]()
            self._graphs_before = compiled.graphs_compiled()
            self.reset_counters()
            _living[id(self)] = self
            undo.callback(_living.pop, id(self), None)
            self._undo = undo.pop_all()

    def check(self) -> None:
        """Check what devices found in the model's products since this was last done.

        An optimizer does it before it applies gradients to the model, and a ``Guard`` with each
        pass. Call it before results are used that no optimizer is applied to, as in inference. It
        waits for the device. Products on CPU are judged as they are computed.

        Raises:
            UncorrectableFault: A product on a device was wrong.
        """
        ledger.settle_unread(self._concerned)

    def _concerned(self, module: int) -> bool:
        return module == 0 or module in self._numbers.values()

    def _about_to_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._concerned_by(optimizer):
            claimed = frozenset(self._numbers.values())
            ledger.claim(self, lambda: claimed)
            self.check()

    def _concerned_by(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has parameters of the model, or some of no protected one.

        The latter are inputs that are trained, or layers added since the model was protected.
        """
        if not ledger.devices():
            return False
        given = [id(p) for group in optimizer.param_groups for p in group["params"]]
        return not self._trained.isdisjoint(given) or not all(each in _owners for each in given)

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._interception is None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            # Fused optimizers write parameters without incrementing the version counter.
            self._interception.forget(parameter)
        sampler = self._interception.sampler
        if sampler is not None and not self._trained.isdisjoint(map(id, parameters)):
            sampler.stepped(optimizer)
        if self._concerned_by(optimizer):  # products of the step itself, or of its closure
            ledger.settle_unread(self._concerned, replays=False)

    def refresh(self, parameter: nn.Parameter | None = None) -> None:
        """Drop what is cached for a parameter, so that its next product computes it anew.

        Call it after an edit of a weight that autograd does not see, through ``.data`` or NumPy.
        After edits under ``torch.no_grad()`` and steps of optimizers it is not needed.

        Args:
            parameter: A parameter of the model; None for all of them.

        Raises:
            ConfigError: The parameter is not one of the model.
        """
        parameters = list(self.model.parameters())
        if parameter is not None:
            if all(parameter is not each for each in parameters):
                raise ConfigError(
                    f"refresh: a tensor of shape {tuple(parameter.shape)} is no parameter of "
                    f"{type(self.model).__name__}: give one of model.parameters(), or nothing "
                    "for all of them"
                )
            parameters = [parameter]
        if self._interception is not None:
            for each in parameters:
                self._interception.forget(each)

    def report(self) -> CoverageReport:
        """List every matmul site seen since ``protect``, and what cannot be covered.

        Sites are found as the model runs: before its first forward and backward pass a linear
        layer is listed as not run yet.
        """
        ours = {*self._numbers.values(), 0}
        rows = [coverage(counter) for counter in self._counters() if counter["site"][0] in ours]
        rows += [
            SiteCoverage(sites.site_name(site), False, reason)
            for site, reason in compiled.uncovered(self._counted()).items()
            if site[0] in ours
        ]
        rows += self._elsewhere.sites(listed={row.reason for row in rows})
        seen = {module_of(row.site) for row in rows}
        idle = (
            static(module, path, self._idle(), is_verified) for module, path in self._paths.items()
        )
        rows += [row for row in idle if row and row.site not in seen]
        if self._interception is None:
            rows.append(SiteCoverage(PRODUCTS_OF_TORCH, False, native.MISSING))
        rows = sorted(rows, key=lambda row: order(row.site))
        core = "no native" if self._interception is None else "native"
        alarms = self._policy.false_alarms - self._false_alarms_before
        passes = self._passes()
        seen_before, verified_before = self._passes_before
        return CoverageReport(
            core,
            rows,
            alarms,
            self.frequency,
            passes.seen - seen_before,
            passes.verified - verified_before,
            self._share,
            self._threshold.name,
            self._policy.convolutions,
        )

    def measure(self, step: Callable[[], object]) -> StepShare:
        """Run a step of training, and measure which share of it is verified.

        Counted is each operator that runs below autograd: its FLOPs, as torch's FLOP counter has
        them (products, convolutions and attention), and the bytes that it reads and writes. It is
        verified if its result was compared with checksums; of convolutions the share counts that
        other steps check (``convolutions`` of ``protect``). ``report`` names the shares from then
        on. The step takes longer than others but computes the same; it may be a forward pass, or
        forward, backward and the optimizer's step.

        Not covered: what a compiled graph computes, which runs without single operators, and what
        is checked by other means (state at rest, updates of an optimizer, replay of a step). On
        devices whose checks are queued no operator counts as verified.

        Args:
            step: a function without arguments.
        """
        with every_call(), Measurement(self._calls, self._policy.convolutions) as measurement:
            step()
        self._share = measurement.share()
        return self._share

    def _calls(self) -> int:
        """Return how many calls of operators were verified so far."""
        rows = [] if self._interception is None else self._interception.counters()
        return sum(row["calls"] for row in rows)

    def _passes(self) -> Passes:
        sampler = None if self._interception is None else self._interception.sampler
        return Passes() if sampler is None else sampler.passes

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

    def _counted(self) -> set[SiteTuple]:
        """Return the sites of this process that were counted at any time."""
        everyone = [] if self._interception is None else self._interception.counters()
        return {row["site"] for row in everyone}

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
        self._passes_before = self._passes().seen, self._passes().verified

    def remove(self) -> None:
        """Remove the protection from the model; a second call does nothing.

        Raises:
            UncorrectableFault: As ``check`` does, once the protection is removed.
        """
        if not self._active:
            return
        self._final_counters, self._active = self._counters(), False
        with self._undo:
            self.check()

    def __enter__(self) -> "Protection":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error that ends the block is not replaced by one about results that nobody uses.
        with nullcontext() if kind is None else collecting():
            self.remove()


def coverage_of(model: nn.Module) -> CoverageReport | None:
    """Report the latest protection in force that any module of a model has; None without one."""
    modules = {*model.modules()}
    found = [each for each in _living.values() if not modules.isdisjoint(each._paths)]
    return found[-1].report() if found else None


def _attention(kernels: str | None) -> Callable[[], Callable[[], None]]:
    """Return what begins to intercept attention on CUDA, and returns what ends that.

    Raises:
        ConfigError: No such kernels are known, or they cannot be used here.
    """
    if kernels is None:
        return lambda: lambda: None
    if kernels != "fused":
        raise ConfigError(
            f"protect: attention is {kernels!r}: give 'fused' for holdfast's kernels on CUDA, "
            "which check themselves, or None for torch's, which are not verified"
        )
    native.required()
    try:
        from holdfast.abft.attention import interception
    except ImportError as error:
        raise ConfigError(f"protect: attention='fused' cannot be used: {error}") from error
    return interception.install


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
    strict: bool = False,
    attention: str | None = None,
    threshold: str | Threshold = "rounding",
    convolutions: float | None = None,
) -> Protection:
    """Verify every matmul that the model runs on CPU or CUDA, forward and backward, or compiled.

    Of convolutions on CPU a share of the calls is verified.

    This needs the native core; without it nothing is verified, and ``report()`` says so.

    Until ``remove()`` is called, each ``mm``, ``addmm``, ``bmm`` and ``baddbmm`` of this process is
    checked after it ran: signed row sums of the output are compared with checksums, within a
    threshold for rounding errors. Fused attention is checked tile by tile, before a tile is used. A
    suspect row is computed again by the same kernel; if it differs it is replaced bit for bit and a
    ``gemm_fault`` event is recorded. Checksums of parameters are cached until these change.

    On CUDA, which needs Triton too, the check of a product is queued behind it and nothing waits
    for its verdict: a ``Guard`` reads it with the loss and repeats the step, and without one an
    optimizer refuses to apply the gradients (see ``check`` for inference). Meanwhile torch's
    reduced-precision reductions in fp16 and bf16 are off. ``docs/gpu.md`` says more.

    ``torch.compile`` may be applied before or after, without graph breaks: code compiled before is
    compiled again, and Inductor keeps its fusions and finds its graphs in its cache after a restart
    (the cache of AOTAutograd is off meanwhile). Blocks compiled one by one get one graph
    each, so set ``torch._dynamo.config.recompile_limit`` above the number of blocks.

    Args:
        model: Any module. Results keep their bits, except those of ``scaled_dot_product_attention``
            where torch would use its fused CPU kernel: there holdfast's kernel runs, forward and
            backward, with rounding errors of the same size (``docs/fault_model.md``). Two protected
            runs with the same inputs have the same bits.
        verify: False names the model's matmuls without verifying or counting them, so that faults
            can be injected into an unprotected run.
        correction: How a fault in the products of this model is handled (see ``Protection`` for
            modules of several protections and products outside of modules). ``recompute`` computes
            the product again and replaces the wrong rows bit for bit. ``checksum`` rebuilds the one
            wrong element of a row from the row's checksums, to within the threshold; rows with
            several wrong elements are recomputed. ``detect`` changes nothing and raises (or fails
            the step of a ``Guard``).
        frequency: Share of passes whose products are verified, 0 to 1; by default
            ``protect.frequency`` of the config file, else 1. Each protection decides for its own
            model: by the step's number within a ``Guard``, else by counting the outermost calls of
            the model, those in training and in evaluation mode apart. A backward pass, and a
            forward that activation checkpointing recomputes, take the decision of the original
            forward; products between two passes, that of the latest pass of their thread. Below 1,
            threads without a pass of a protected model verify nothing. A model compiled as a whole
            is sampled by rounds of its optimizers. ``report()`` says the share that was verified.
        strict: True raises if a check itself fails, for want of memory for example. By default
            training goes on: the event ``check_failed`` names the product, ``report()`` lists it as
            not covered, and a ``Guard`` repeats the step if the product was suspect.
        attention: ``fused`` runs holdfast's Triton kernels for every
            ``scaled_dot_product_attention`` of this process on CUDA, forward and backward, until
            ``remove()``: they check each tile and compute it again if it is suspect, and change the
            results' last bits. With dropout, in fp64, and where else ``report()`` says so, torch's
            kernels run. None leaves all of it to torch's kernels, which are not verified on CUDA.
        threshold: Name of the threshold of row checks, for all products of this process on CPU:
            ``rounding``, ``analytic``, ``norm``, ``sea``, ``aabft`` or ``vabft``, or an object of
            ``holdfast.thresholds``. ``vabft`` reads the profile that ``holdfast calibrate`` keeps
            for the present settings. All but ``rounding`` cost passes over both operands of each
            product. No threshold is asked where another bound belongs to the check: tiles of fused
            attention and products on CUDA (``rounding`` is built into their kernels), rows of a
            softmax (their sum is one), int8 products (exact) and embedding bags (their own bound);
            nor by ``correction="checksum"`` to locate an element (``rounding``).
        convolutions: Share of the calls of each convolution on CPU, forward and of each gradient,
            that are checked; by default ``protect.convolutions`` of the config file, else 1/8. The
            first call of each is checked, and in steps that a ``Guard`` audits all are.

    Returns:
        The protection: ``report()``, ``check()``, ``refresh()``, ``remove()``.

    Guarantees: a fault in one output row that moves the row's signed sum by more than twice its
    threshold is found and repaired; healthy results are never altered. Not covered (and listed by
    ``report()``): convolutions on other devices than CPU, dot products, products that Inductor
    computes by kernels of its own (single dot products, frozen weights), sparse, integer, scaled
    8-bit, quantized and complex products; products on other devices than CPU and CUDA, and
    operators of other packages, both listed as the first forward pass computes them or a compiled
    graph holds them; and, beyond any checksum, what is already wrong in the operands.
    Graphs that another thread or another compiler than Inductor made are covered, but their
    products are named ``(outside)`` or after the module around.

    Raises:
        TypeError: ``model`` is not a module.
        ConfigError: A module is TorchScript (scripted or traced), or ``attention`` is unknown or
            cannot be used, as Triton or the native core is missing; or ``threshold`` is unknown,
            needs a profile that is missing or of other settings, is for another device than that of
            a parameter, or differs from that of another protection. Nothing was changed.
        ValueError: ``correction`` is none of the three, or ``frequency`` or ``convolutions`` is not
            from 0 to 1.
        UncorrectableFault: Raised later, by a product whose fault persists in recomputation (a
            ``Guard`` defers it to the end of the step); on CUDA by the optimizer's step, ``check``
            or ``remove`` after a wrong product.
        HoldfastError: Raised later, with ``strict``, if a check fails.

    Source: Huang and Abraham for the checksums; ATTNChecker, section 4.2, for correction by
    checksums. The random signs and ``rounding`` are this project's (``thresholds.rounding``); the
    classes of the other thresholds name their papers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"protect needs a torch.nn.Module, got {type(model).__name__}")
    protection = Protection(
        model,
        verify=verify,
        correction=correction,
        frequency=frequency,
        strict=strict,
        attention=attention,
        threshold=threshold,
        convolutions=convolutions,
    )
    _log_start(protection, verify, correction)
    return protection


def _log_start(protection: Protection, verify: bool, correction: str) -> None:
    share = f"verified in a share of {protection.frequency:g} of passes, correction {correction}"
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


def _structure(model: nn.Module) -> str:
    """Return a name that models of other modules or other shapes do not have."""
    types = [(path, type(module).__qualname__) for module, path in _names(model)]
    shapes = [(name, tuple(tensor.shape)) for name, tensor in model.named_parameters()]
    return f"{types} {shapes}"


def _path(name: str) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts).removeprefix("module.")


def _refuse_scripted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction):
            raise ConfigError(
                f"protect: {name or 'the model'} is a {type(module).__name__}, and TorchScript "
                "takes no hooks, so that its products could not be named: protect the module "
                "that it was scripted or traced from (for speed use torch.compile)"
            )
