"""What an adapter says if its framework is missing, or is another version."""

import runpy
import sys
from pathlib import Path

import pytest

from holdfast import ConfigError
from holdfast.integrations import adapter
from holdfast.integrations.adapter import require


def test_a_missing_framework_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ImportError, match=r"needs no_such_framework 1\.2 .*pip install 'no_such"):
        require("no_such_framework", "1.2")


@pytest.mark.parametrize("name", ["lightning", "torchtitan", "transformers"])
def test_an_adapter_without_its_framework_says_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(adapter.__file__).parent / name
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"needs {name} .*: pip install '{name}==") as raised:
        runpy.run_path(str(file))
    assert "\n" not in str(raised.value)


def test_an_untested_version_is_refused() -> None:
    require("rich", "15")
    with pytest.raises(ConfigError, match=r"rich 15\.0\.0 is installed.* tested with 1: pip"):
        require("rich", "1")
