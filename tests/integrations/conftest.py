"""Small models: threads would only wait; nothing is downloaded; a framework may be missing."""

import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

# What each file imports beside holdfast. The frameworks are an extra.
NEEDED = {
    "test_accelerate": ("accelerate",),
    "test_data_position": ("datasets", "torchdata"),
    "test_lightning": ("lightning", "torchdata"),
    "test_torchtitan": ("torchtitan",),
    "test_transformers_attention": ("transformers",),
    "test_transformers_ranks": ("transformers",),
    "test_transformers_trainer": ("transformers",),
    "test_trl": ("trl",),
}


class _OfFramework(pytest.Module):
    """A file of tests that is skipped, with the reason, where its framework is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        for package in NEEDED[self.path.stem]:
            reason = f"{package} is not installed: pip install 'torch-holdfast[integrations]'"
            pytest.importorskip(package, reason=reason)
        return super().collect()


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if module_path.stem not in NEEDED:
        return None
    return _OfFramework.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """Frameworks collect garbage when they begin to train: let it not look at all modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _offline(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
