"""128-bit digests of bytes that mix in every position, in one pass at memory speed; no torch.

``README.md`` describes the algorithm and the changes that it detects. Digests of tensors are in
``holdfast.digest.tensors``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.digest.reference import Hasher, copy_each, signed_sums
else:
    try:
        from holdfast import _digest
        from holdfast._digest import Hasher, copy_each

        # An older build lacks it.
        signed_sums = getattr(_digest, "signed_sums", None)
    except ImportError:  # built with HOLDFAST_PURE_PYTHON=1
        from holdfast.digest.reference import Hasher, copy_each, signed_sums

__all__ = ["Hasher", "copy_each", "digest", "hexdigest", "signed_sums"]


def digest(data: Any) -> bytes:
    """Compute the digest of a contiguous buffer, 16 bytes.

    Raises:
        ValueError: The buffer is not contiguous.
    """
    hasher = Hasher()
    hasher.update(data)
    return hasher.digest()


def hexdigest(data: Any) -> str:
    """Compute the digest of a contiguous buffer as 32 hex digits.

    Example:
        >>> hexdigest(b"abc")
        'ac140492246a900abb39c17292532ac3'
    """
    return digest(data).hex()
