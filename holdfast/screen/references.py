"""Stored references: the right digests of all workloads and the settings for which they hold."""

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from holdfast import json_store, native
from holdfast.abft.thresholds.profile import cache_dir, differences
from holdfast.abft.thresholds.settings import device_of, numeric_settings
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.screen.job import KERNELS
from holdfast.screen.units import Unit, cache_sizes
from holdfast.version import __version__

FORMAT = "holdfast-screen-reference"
SCHEMA = 1
WHAT = "reference of a screening"
AGAIN = "store it again with: holdfast screen --store FILE"
_INSTRUCTIONS = re.compile(r"(avx|amx|fma|f16c|sse|asimd|sve|bf16|fp16|neon)\w*")


@dataclass(frozen=True)
class Reference:
    """The right digests of one kind of unit by workload and input, on which several units agreed.

    They hold for ``settings``, as ``unit_settings`` returns them. ``created_utc`` is in ISO 8601.
    """

    settings: dict[str, str]
    units: int
    digests: dict[str, str]
    created_utc: str = field(
        default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    )


def unit_settings(unit: Unit, scale: str) -> dict[str, str]:
    """Return everything besides the inputs that the bits of this process's results depend on.

    Two workers with equal settings run the same kernels. The settings contain the versions of torch
    and holdfast, the processor's model, instruction sets and caches, and the number of threads. Not
    covered: libraries preloaded or replaced under the same torch version.
    """
    ours = {"holdfast": __version__, "kernels": str(KERNELS), "scale": scale}
    ours["native"] = native.core.simd_name() if native.core is not None else "none"
    settings = {**ours, **numeric_settings(device_of(unit.device))}
    if unit.core is not None:
        caches = " ".join(cache_sizes(unit.core)) or "unknown"
        settings |= {"caches": caches, "instructions": _instructions()}
    return settings


def _instructions() -> str:
    """Return a digest of the names of the processor's vector instruction sets."""
    try:
        listing = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", listing, re.MULTILINE)
    names = sorted(filter(_INSTRUCTIONS.fullmatch, flags[1].split())) if flags else []
    return state_digest(names)[:16]


def reference_path(settings: Mapping[str, str]) -> Path:
    """Return the file in the user's cache for the reference of these settings."""
    key = state_digest(dict(sorted(settings.items())))[:16]
    return cache_dir() / f"screen-{settings['device']}-{key}.json"


def check_storable(path: Path) -> None:
    """Raise ConfigError if a file cannot be written, or if it holds something else."""
    json_store.check_replaceable(path, FORMAT, WHAT)


def save_references(references: Mapping[str, Reference], path: Path) -> None:
    """Write references by kind of unit and replace an older file atomically."""
    content = {kind: asdict(reference) for kind, reference in references.items()}
    json_store.write_document(path, FORMAT, SCHEMA, "references", content)


def load_references(path: Path) -> dict[str, Reference]:
    """Read the references of a file, for whatever settings they hold."""
    content = json_store.read_document(path, FORMAT, SCHEMA, "references", what=WHAT, again=AGAIN)
    return {kind: Reference(**stored) for kind, stored in content.items()}


def digests_for(
    stored: Mapping[str, Reference], settings: Mapping[str, Mapping[str, str]], path: Path
) -> dict[str, dict[str, str]]:
    """Select the stored digests for the settings of each kind of unit of this machine.

    A kind without a reference, or with one for other settings, raises ConfigError; the message
    names each setting that differs with its stored and its present value.
    """
    found = {}
    for kind, present in settings.items():
        if kind not in stored:
            held = ", ".join(stored) or "nothing"
            raise ConfigError(f"{path} holds references of {held}, not of {kind}; {AGAIN}")
        if differing := differences(stored[kind].settings, present):
            raise ConfigError(
                f"{path} was stored under other settings, which can give other results: "
                f"{differing}; {AGAIN}"
            )
        found[kind] = stored[kind].digests
    return found


def cached(
    settings: Mapping[str, Mapping[str, str]],
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Read the references of these settings from the user's cache.

    They are returned as digests by kind, with a note for each file that cannot be used.
    """
    found: dict[str, dict[str, str]] = {}
    notes = []
    for kind, present in settings.items():
        path = reference_path(present)
        if not path.exists():
            continue
        try:
            found |= digests_for(load_references(path), {kind: present}, path)
        except ConfigError as error:
            notes.append(f"the reference is not used: {error}")
    return found, notes
