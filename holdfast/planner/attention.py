"""The sizes and costs of one attention: six GEMMs in three protection sections."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from holdfast.errors import ConfigError
from holdfast.planner.checks import at_least, at_least_0

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "S_AS": ("Q", "K", "AS"),
    "S_CL": ("V", "CL"),
    "S_O": ("O",),
}
GEMMS = tuple(gemm for gemms in SECTIONS.values() for gemm in gemms)

# Layers, width and heads of the models of ATTNChecker's Table 3, in their smallest published size.
MODELS: Mapping[str, tuple[int, int, int]] = {
    "bert-base": (12, 768, 12),
    "gpt2": (12, 768, 12),
    "gpt-neo": (12, 768, 12),
    "roberta": (12, 768, 12),
}

# ATTNChecker, section 5.3: the time of all checks, as a share of attention's and of the step's.
PUBLISHED_ATTENTION_OVERHEAD = 0.11
PUBLISHED_STEP_OVERHEAD = 0.07


@dataclass(frozen=True)
class AttentionSize:
    """The sizes of one execution of self-attention (one layer, forward).

    Args:
        batch: Number of sequences.
        length: Number of tokens of each sequence.
        width: Width of the model.
        heads: Number of query heads.
        kv_heads: Number of heads of keys and values, 0 for as many as queries have.
        head_size: Elements of one head, 0 for width / heads.

    Raises:
        ConfigError: A size is not positive, ``heads`` does not divide ``width``, or ``kv_heads``
            does not divide ``heads``.
    """

    batch: int
    length: int
    width: int
    heads: int
    kv_heads: int = 0
    head_size: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "length", "width", "heads"):
            at_least(name, getattr(self, name), 1)
        for name in ("kv_heads", "head_size"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be positive, or 0: derived")
        if not self.head_size and self.width % self.heads:
            raise ConfigError(
                f"width = {self.width} is no multiple of heads = {self.heads}; give head_size"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(
                f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}"
            )
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_size", self.head_size or self.width // self.heads)

    @classmethod
    def of_model(cls, model: str, batch: int, length: int) -> Self:
        """Return the sizes of the attention of one of ``MODELS``."""
        _, width, heads = MODELS[model]
        return cls(batch, length, width, heads)

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole batch."""
        return self.batch * self.length

    @property
    def query_width(self) -> int:
        """Number of columns of Q and CL."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Number of columns of K and V."""
        return self.kv_heads * self.head_size

    @property
    def scores(self) -> int:
        """Number of elements of AS and of AP."""
        return self.batch * self.heads * self.length**2


def gemm_flops(size: AttentionSize) -> dict[str, int]:
    """Return the flops of each GEMM, ``2 M N K``: a multiply-add counts as two."""
    projected = 2 * size.tokens * size.width
    attended = 2 * size.scores * size.head_size
    return {
        "Q": projected * size.query_width,
        "K": projected * size.kv_width,
        "AS": attended,
        "V": projected * size.kv_width,
        "CL": attended,
        "O": projected * size.query_width,
    }


def check_reads(size: AttentionSize) -> dict[str, int]:
    """Return the number of matrix elements that checking each section reads.

    Encoding reads X, Wv and AP. Carrying checksums through a GEMM reads its other operand (Wq and
    Wk; K and Q; X; V and AP; Wo). The check itself reads AS, CL or O once for both row and column
    sums. S_O encodes nothing, because CL's checksums exist already. A matrix counts once for each
    use.
    """
    x, scores = size.tokens * size.width, size.scores
    q, kv = size.tokens * size.query_width, size.tokens * size.kv_width
    w_q, w_kv = size.width * size.query_width, size.width * size.kv_width
    return {
        "S_AS": x + w_q + w_kv + kv + q + scores,
        "S_CL": w_kv + scores + x + kv + scores + q,
        "S_O": w_q + x,
    }


@dataclass(frozen=True)
class CheckCosts:
    """The costs of checking one execution of attention, all in the same unit.

    Args:
        sections: Cost of the full check of each section; 0 if it is free.
        attention: Cost of the unprotected execution; 0 if it is unknown.
        step: Cost of a training step divided by the number of executions in it; 0 if it is
            unknown.

    Raises:
        ConfigError: A section is missing or unknown, or a cost is negative or not finite.
    """

    sections: Mapping[str, float]
    attention: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        if set(self.sections) != set(SECTIONS):
            raise ConfigError(f"costs of {sorted(self.sections)}: give those of {sorted(SECTIONS)}")
        for name, cost in {**self.sections, "attention": self.attention, "step": self.step}.items():
            at_least_0(f"cost of {name}", cost)

    @property
    def total(self) -> float:
        """Cost of checking all sections."""
        return sum(self.sections.values())


def parse_costs(document: object) -> CheckCosts:
    """Read measured costs in seconds from JSON: ``{"S_AS": …, "S_CL": …, "S_O": …}``.

    The entries ``"attention"`` and ``"step"`` (see ``CheckCosts``) are optional.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"costs are {document!r}: give {{section: seconds}}")
    for name, value in document.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"cost of {name} = {value!r} is no number of seconds")
    rest = {name: cost for name, cost in document.items() if name not in ("attention", "step")}
    return CheckCosts(rest, document.get("attention", 0.0), document.get("step", 0.0))


def modelled_costs(
    size: AttentionSize,
    attention_overhead: float = PUBLISHED_ATTENTION_OVERHEAD,
    step_overhead: float = PUBLISHED_STEP_OVERHEAD,
) -> CheckCosts:
    """Estimate costs that were not measured, in executions of the unprotected attention.

    The overhead of all checks is ATTNChecker's (11 % of attention, 7 % of the training step,
    section 5.3). It is divided among the sections in proportion to ``check_reads``, because checks
    are bound by memory bandwidth.
    """
    reads = check_reads(size)
    unit = attention_overhead / sum(reads.values())
    sections = {name: count * unit for name, count in reads.items()}
    return CheckCosts(sections, 1.0, attention_overhead / step_overhead)
