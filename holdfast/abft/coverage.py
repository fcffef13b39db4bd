"""The coverage of a protection: every matmul site, how it is verified, and what is not covered."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from holdfast import sites
from holdfast.abft.attention.op import SECTIONS
from holdfast.abft.counters import Counters
from holdfast.abft.step_share import StepShare

# Modules whose products do not go through aten's mm, addmm, bmm or baddbmm.
NOT_COVERED_MODULES: dict[type[nn.Module], str] = {
    nn.RNNBase: "the fused recurrent kernels do not call mm",
    nn.Bilinear: "the trilinear product is a reduction, not a matmul",
    nn.EmbeddingBag: "while it trains; holdfast.nn.Int8EmbeddingBag checks a frozen one",
}

# Name, in the report, for all of torch's own products where none can be intercepted.
PRODUCTS_OF_TORCH = "(every mm, addmm, bmm, baddbmm and fused attention)"

# How a site is verified: each output row after the product (abft/gemm), each output row at the end
# of a protection section of attention, or each tile before it is used (abft/attention), or sums
# over a convolution's results (abft/conv).
METHODS = ("row checksums", "sections", "fused tiles", "signed sums")


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
    frequency: float = 1.0  # share of passes whose products are to be verified
    passes: int = 0  # passes of the model that were seen, if the share is below 1
    verified_passes: int = 0  # passes of these that were verified
    step: StepShare | None = None  # of the step that ``Protection.measure`` ran last
    threshold: str = "rounding"  # name of the threshold of row checks; tiles have ``rounding``
    convolutions: float = 1.0  # share of the calls of each convolution that are checked

    @property
    def verified_share(self) -> float:
        """Share of passes that were verified, as counted; 1 if no choice was made."""
        return self.verified_passes / self.passes if self.passes else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON-ready values."""
        return asdict(self)

    def _share(self) -> str:
        asked = f"asked for: {self.frequency:.4g}"
        if not self.passes:
            return f"no pass of the model was seen yet ({asked})"
        return (
            f"verified in {self.verified_passes} of {self.passes} passes, a share of "
            f"{self.verified_share:.4g} ({asked})"
        )

    def __str__(self) -> str:
        covered = [site for site in self.sites if site.covered]
        methods = Counter(site.method for site in covered)
        sums = methods[METHODS[-1]]
        by = ", ".join(f"{methods[name]} by {name}" for name in METHODS if methods[name])
        other = self.threshold != "rounding" and methods[METHODS[-1]]
        tiles = ", rounding in fused tiles" if other else ""
        width = max([len(site.site) for site in self.sites], default=4)
        lines = [
            f"{len(covered)} of {len(self.sites)} matmul sites covered{f': {by}' if by else ''} "
            f"(signed checksums, {self.threshold} threshold{tiles}, {self.backend} core); suspect "
            f"rows cleared by a second opinion: {self.false_alarms}",
            *([self._share()] if self.frequency < 1 else []),
            *([str(self.step)] if self.step is not None else []),
            *([f"convolutions: a share of {self.convolutions:.4g} of calls"] if sums else []),
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


def module_of(site: str) -> str:
    """Return the path of the module in the name of a site."""
    return site.split("/", 1)[0]


def order(site: str) -> tuple[list[tuple[int, str]], str]:
    """Return a key that sorts sites by the paths of their modules, numbers by their value."""
    parts = module_of(site).split(".")
    return [(int(p), "") if p.isdigit() else (-1, p) for p in parts], site


def coverage(counter: Counters) -> SiteCoverage:
    """Return the coverage of a site that ran, by its counters."""
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
    checksums, sections, tiles, sums = METHODS
    if op == "convolution":
        return sums
    if op.startswith("sdpa"):
        return tiles
    return sections if op.split(".")[0] in SECTIONS else checksums


def static(
    module: nn.Module, path: str, idle: str, verified: Callable[[str], bool]
) -> SiteCoverage | None:
    """Return the coverage entry of a module whose matmuls did not run yet; None if it has none.

    Args:
        module: The module.
        path: Its name in the model.
        idle: Reason to report for products that did not run yet.
        verified: Says whether products on a type of device are verified.
    """
    for kind, reason in NOT_COVERED_MODULES.items():
        if isinstance(module, kind):
            return SiteCoverage(path, False, reason)
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None  # nn.MultiheadAttention multiplies by this layer's weight itself
    convolution = isinstance(module, nn.modules.conv._ConvNd)
    if convolution or isinstance(module, nn.Linear | nn.MultiheadAttention):
        tensors = (*module.parameters(), *module.buffers())
        device = tensors[0].device.type if tensors else "cpu"
        checked = device == "cpu" if convolution else verified(device)
        reason = idle if checked else unverified_device(device)
        return SiteCoverage(path, False, reason)
    return None


def unverified_device(device: str, op: str = "") -> str:
    """Return the reason to report for a product on a device where it is not verified."""
    if device == "cuda" and "attention" in op:
        return (
            "on cuda: a row checksum cannot invert a softmax; protect(model, attention='fused') "
            "runs kernels that check themselves"
        )
    return f"on {device}: holdfast has no check for it there"
