"""What an SMP computes on the memory of its slots: parities, chunk by chunk, and their digests.

NumPy and the code are imported when they are first needed: most SMPs never do.
"""


def accumulate(target: memoryview, source: bytes, coefficient: int) -> None:
    """target += coefficient · source in GF(2⁸); both of one length.

    Raises:
        ConfigError: ISA-L is missing and is needed.
    """
    import numpy as np

    from holdfast.snapshot import parity

    added = np.frombuffer(source, np.uint8)
    parity.accumulate(np.frombuffer(target, np.uint8), added, coefficient)


def digest(data: memoryview) -> bytes:
    """As ``shards.parity_digests``."""
    from holdfast import digest

    return digest.digest(data)
