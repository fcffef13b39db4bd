"""What the native core and Python both know: one order, one value, and no configuration hidden."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import holdfast
from holdfast import native

if native.core is None:
    pytest.skip("the native core is not built", allow_module_level=True)

TABLES = native.core.tables()
ROOT = Path(holdfast.__file__).parent


def _changed(table: object) -> object:
    """The same table in another order, or another number."""
    return table[::-1] if isinstance(table, tuple) else table + 1  # type: ignore[operator]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_differs_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native.agree(name, TABLES[name])
    other = SimpleNamespace(tables=lambda: TABLES | {name: _changed(TABLES[name])})
    monkeypatch.setattr(native, "core", other)
    with pytest.raises(ImportError, match=name):
        native.agree(name, TABLES[name])


def test_a_core_that_lacks_a_table_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "core", SimpleNamespace(tables=dict))
    with pytest.raises(ImportError, match="stages"):
        native.agree("stages", ("checksum",))


def test_every_table_of_the_core_has_an_owner_in_python() -> None:
    owned = [
        name
        for path in ROOT.rglob("*.py")
        for name in re.findall(r'native\.agree\("(\w+)"|^agree\("(\w+)"', path.read_text(), re.M)
    ]
    assert sorted("".join(pair) for pair in owned) == sorted(TABLES)


UNCONFIGURED = """
import torch
import holdfast.nn, holdfast.protection
from holdfast import native
from holdfast.abft.gemm import cpu, interception, op
from holdfast.abft.thresholds.chains import longest_chain
from torch._subclasses.fake_tensor import FakeTensorMode

assert not native.core.configured(), "an import configured the core"
try:
    torch.ops.holdfast.encode_rows(torch.ones(2, 2))
except RuntimeError as error:
    assert "no constants" in str(error), error
else:
    raise AssertionError("the core judged products without its constants")
assert longest_chain.cache_info().currsize == 0
a = torch.randn(4, 4)
with FakeTensorMode() as mode:  # the first use may be a trace
    holdfast.matmul(mode.from_tensor(a), mode.from_tensor(a))
assert torch.equal(holdfast.matmul(a, a), a @ a)
assert native.core.configured()
"""


def test_importing_configures_nothing_and_the_first_use_does() -> None:
    subprocess.run([sys.executable, "-c", UNCONFIGURED], check=True, timeout=100)
