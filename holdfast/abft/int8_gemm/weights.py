"""An int8 weight, packed once with its checksums, which can be verified and repaired."""

import threading
from collections.abc import Callable

import torch

from holdfast import native
from holdfast.abft.int8_gemm.encoding import (
    ENCODINGS,
    PADDING,
    check_extents,
    column_sums,
    from_digits,
    largest_accumulator,
    modular_column,
    row_sums,
    signed_digits,
)
from holdfast.abft.int8_gemm.operands import (
    Twice,
    as_call,
    check_bias,
    check_call,
    check_scale,
    check_weight,
    check_zero_point,
    padded,
)
from holdfast.abft.int8_gemm.reference import ReferenceInt8Gemm, Scales
from holdfast.abft.int8_gemm.weight_repair import Healed, Mended, mend, parts_of
from holdfast.abft.registry import Implementation, Operator
from holdfast.digest.tensors import tensor_digest, tensors_digest
from holdfast.errors import ConfigError

__all__ = ["Healed", "Int8Weights", "Mended"]


class Int8Weights:
    """The weight of a quantised linear layer, ready to multiply.

    ``y = (A − za)(W − zw)ᵀ · a_scale · scale + bias``

    Args:
        weight: W, int8 [N, K] as ``nn.Linear`` has it; K ≤ 65,793, or 33,025 with zero points, and
            N ≤ 65,536.
        scale: of W, fp32, one element or N; finite and positive.
        zero_point: of W, integers from −128 to 127, one or N; 0 by default.
        bias: fp32 [N]; finite.
        relu: whether the output is clamped at 0.
        encoding: ``digits``, exact and correcting, or ``mod127``, as the DLRM paper has it.
        implementation: ``native`` (FBGEMM) or ``reference`` (plain torch); by default the first
            that serves the weight's device.

    Guarantees: see ``int8_linear``. Memory beside the packed weight: with ``digits`` one byte per
    input and digit, two or three for the sums and up to five for the weighted ones, one more for
    zero points, and 16 bytes per output; with ``mod127`` the packed check column.

    Threads: any number may multiply at once. Healing is serialised, and writes what is true over
    what changed: a product that reads a mixture contradicts its check and is computed again.

    Raises:
        ConfigError: an extent that int32 accumulators or the checks cannot hold, with the limit; or
            an implementation that is unavailable.
        ValueError, TypeError: a tensor does not fit, with what would.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor | float,
        zero_point: torch.Tensor | int = 0,
        *,
        bias: torch.Tensor | None = None,
        relu: bool = False,
        encoding: str = "digits",
        implementation: str | None = None,
    ) -> None:
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding = {encoding!r}: give one of {', '.join(ENCODINGS)}")
        check_weight(weight)
        self.columns, self.inner = weight.shape
        self.encoding, self.relu, self.device = encoding, bool(relu), weight.device
        self._implementation = INT8_GEMM.select(weight.device.type, name=implementation)
        with torch.inference_mode(False):  # else nothing could ever be written to it again
            self.zero_point = check_zero_point(zero_point, self.columns, self.device)
            check_extents(self.inner, self.columns, shifted=self.zero_point is not None)
            self._scale = Twice(check_scale(scale, self.columns, self.device), self.columns)
            self.scale = self._scale.given
            self.bias = check_bias(bias, self.columns, self.device)
            self._pack(weight.detach().T.contiguous())

    def _pack(self, b: torch.Tensor) -> None:
        self._lock = threading.Lock()
        self.history = (0, 0)  # how often weights and checks were mended
        zero, bias = self.zero_point, self.bias
        self._zero = None if zero is None else Twice(zero, self.columns)
        self._bias = Twice(torch.zeros_like(self.scale[:1]) if bias is None else bias, self.columns)
        sums, weighted = row_sums(b)
        self.of_columns = column_sums(b)
        self._column_sums = padded(self.of_columns[0].int())
        if self.encoding == "digits":
            self.checks, self.weighted = signed_digits(sums), signed_digits(weighted)
        else:
            self.checks = self.weighted = b.new_zeros((0, self.inner))
            self.of_columns = self.of_columns[:, :0]
            b = torch.cat([b, modular_column(sums)], 1)
        self._digits = self._padded_digits(self.checks)
        self.checks = self._digits[:, : self.inner]
        self._ones = b.new_ones((1, self._digits.shape[1]))
        self.gemm = self._make(b)
        self.native = not isinstance(self.gemm, ReferenceInt8Gemm)
        self._digests = self._digest()
        self._last: tuple[tuple[float, int, float, int], Scales] | None = None

    def _padded_digits(self, digits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(digits, (0, PADDING + -self.inner % PADDING))

    def _make(self, b: torch.Tensor) -> ReferenceInt8Gemm:
        return self._implementation(
            b,
            self.columns,
            self.encoding == "mod127",
            self._digits,
            self._ones,
            self._column_sums,
            self._scale.padded,
            None if self._zero is None else self._zero.padded,
            self._bias.padded,
            self.relu,
        )

    def _digest(self) -> tuple[str, str, str]:
        checks = tensors_digest([self._digits, self.weighted, self.of_columns])
        return (
            tensor_digest(self.gemm.buffer),
            checks,
            tensors_digest([self._ones, self._column_sums]),
        )

    def scales(
        self, a_scale: float, a_zero_point: int, out_scale: float, out_zero_point: int
    ) -> Scales:
        """Prepare what a call scales by; kept until another is asked for.

        Raises:
            ValueError: a scale is not finite and positive, or overflows fp32 with the others, or a
                zero point is not from 0 to 255.
        """
        last = self._last
        if last is not None and last[0] == (a_scale, a_zero_point, out_scale, out_zero_point):
            return last[1]
        key = as_call(a_scale, a_zero_point, out_scale, out_zero_point)
        accumulator = largest_accumulator(self.inner, shifted=self.zero_point is not None)
        check_call(*key, weight_scale=float(self.scale.max()), accumulator=accumulator)
        made = self.gemm.scales(*key)
        if key[2] and not bool(made.scale.isfinite().all() and made.addend.isfinite().all()):
            raise ValueError(
                f"out_scale = {out_scale} is too small: a_scale · scale / out_scale or bias / "
                "out_scale overflows fp32; calibrate the output"
            )
        self._last = key, made
        return made

    def matrix(self) -> torch.Tensor:
        """Copy B = Wᵀ as it is in memory now, int8 [K, N]."""
        return self.gemm.unpack()[:, : self.columns]

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Read S and W, int64 [K] each, from the digits."""
        return from_digits(self.checks), from_digits(self.weighted)

    def intact(self) -> bool:
        """Return whether all that a product reads is as it was made.

        That is the packed weight, its checks and its scaling: scale, zero point and bias,
        Σ_k B[k, j], and the scales of the latest call.
        """
        if self._digest() != self._digests or not all(each.intact() for each in self.twice()):
            return False
        if self._last is None:
            return True
        call, made = self._last
        return all(
            torch.equal(now.view(torch.int32), then.view(torch.int32))
            for now, then in zip(parts_of(made), parts_of(self.gemm.scales(*call)), strict=True)
        )

    def twice(self) -> list[Twice]:
        """List what is kept twice."""
        return [each for each in (self._scale, self._zero, self._bias) if each is not None]

    def heal(self) -> list[Healed] | None:
        """Set right what changed; return the weights that were, none if only other parts were.

        One changed weight for each input is located by the residuals of its row's sum and weighted
        sum; damaged checks are made anew of an intact weight, scale, zero point and bias of their
        second copy. The result must have the fingerprint that was taken at packing, else nothing
        is changed.

        Returns:
            None if it cannot be healed.
        """
        mended = self.mend()
        return None if mended is None else mended.weights

    def mend(self, column: int | None = None) -> Mended | None:
        """Heal, and return which parts were set right (see ``weight_repair.mend``)."""
        return mend(self, column)

    def weight(self) -> torch.Tensor:
        """Copy W, int8 [N, K].

        Raises:
            ConfigError: it is damaged beyond healing.
        """
        if not self.intact() and self.heal() is None:
            raise ConfigError("the packed weight is damaged beyond healing: load it again")
        return self.matrix().T.contiguous()

    def __reduce__(self) -> tuple[object, ...]:
        state = (self.weight(), self.scale, self.zero_point, self.bias, self.relu, self.encoding)
        return _restored, state


def _restored(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    bias: torch.Tensor | None,
    relu: bool,
    encoding: str,
) -> Int8Weights:
    zero = 0 if zero_point is None else zero_point
    return Int8Weights(weight, scale, zero, bias=bias, relu=relu, encoding=encoding)


def _needs_fbgemm() -> str:
    if native.core is None:
        return native.MISSING
    return "" if native.core.int8_available() else "this processor has no FBGEMM kernels"


def _triton() -> type[ReferenceInt8Gemm]:
    from holdfast.abft.int8_gemm.cuda import TritonInt8Gemm

    return TritonInt8Gemm


# The native class has the interface of the reference.
INT8_GEMM: Operator[Callable[..., ReferenceInt8Gemm]] = Operator(
    "int8_gemm",
    [
        Implementation("native", lambda: native.required().Int8Gemm, missing=_needs_fbgemm),
        Implementation("triton", _triton, ("cuda",), enabled=False),
        Implementation("reference", lambda: ReferenceInt8Gemm, ("cpu", "cuda")),
    ],
)
