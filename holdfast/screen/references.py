"""Stored references: the right digest of every workload, bound to what its bits depend on."""

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
    """The digests of one kind of unit.

    Args:
        settings: what they hold for, as ``unit_settings`` gives it.
        units: how many units agreed on them; created_utc: ISO 8601.
        digests: by workload and input.
    """

    settings: dict[str, str]
    units: int
    created_utc: str
    digests: dict[str, str]


def unit_settings(unit: Unit, scale: str) -> dict[str, str]:
    """All that the bits of this process's results depend on, besides the inputs.

    Two workers with equal settings run the same kernels; the torch version, the processor's model,
    instruction sets and caches, the number of threads and the kernels of holdfast are part of it.

    Not covered: libraries preloaded or swapped under the same torch version.
    """
    ours = {"holdfast": __version__, "kernels": str(KERNELS), "scale": scale}
    ours["native"] = native.core.simd_name() if native.core is not None else "none"
    settings = {**ours, **numeric_settings(device_of(unit.device))}
    if unit.core is not None:
        settings |= {"caches": cache_sizes(unit.core), "instructions": _instructions()}
    return settings


def _instructions() -> str:
    """The vector instruction sets that the processor has, as a digest of their names."""
    try:
        listing = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", listing, re.MULTILINE)
    names = sorted(filter(_INSTRUCTIONS.fullmatch, flags[1].split())) if flags else []
    return state_digest(names)[:16]


def reference_path(settings: Mapping[str, str]) -> Path:
    """Where the user's reference for these settings is kept."""
    key = state_digest(dict(sorted(settings.items())))[:16]
    return cache_dir() / f"screen-{settings['device']}-{key}.json"


def make_reference(settings: Mapping[str, str], units: int, digests: dict[str, str]) -> Reference:
    """The reference that a healthy screening gives."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Reference(dict(settings), units, created, digests)


def check_storable(path: Path) -> None:
    """See that a reference may be written there; raises ConfigError if not."""
    json_store.check_replaceable(path, FORMAT, WHAT)


def save_references(references: Mapping[str, Reference], path: Path) -> None:
    """Write references by kind of unit, replacing an older file in one step.

    Raises:
        ConfigError: the file cannot be written, with the reason.
    """
    content = {kind: asdict(reference) for kind, reference in references.items()}
    json_store.write_document(path, FORMAT, SCHEMA, "references", content)


def load_references(path: Path) -> dict[str, Reference]:
    """The references in a file, whatever settings they hold for.

    Raises:
        ConfigError: the file cannot be read, is damaged, or has another schema version.
    """
    content = json_store.read_document(path, FORMAT, SCHEMA, "references", what=WHAT, again=AGAIN)
    return {kind: Reference(**stored) for kind, stored in content.items()}


def digests_for(
    stored: Mapping[str, Reference], settings: Mapping[str, Mapping[str, str]], path: Path
) -> dict[str, dict[str, str]]:
    """The stored digests of each kind of unit that is there.

    Args:
        settings: by kind, of the units at hand.

    Raises:
        ConfigError: the file has nothing for a kind, or it holds for other settings: each is named
            with its stored and its present value.
    """
    found = {}
    for kind, present in settings.items():
        if kind not in stored:
            held = ", ".join(stored) or "nothing"
            raise ConfigError(f"{path} holds references of {held}, not of {kind}; {AGAIN}")
        if differing := differences(stored[kind].settings, present):
            raise ConfigError(
                f"{path} was stored under other settings, so its digests prove nothing here: "
                f"{differing}; {AGAIN}"
            )
        found[kind] = stored[kind].digests
    return found


def cached(
    settings: Mapping[str, Mapping[str, str]],
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The user's own references of these settings, by kind, and what is to be said of the rest."""
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
