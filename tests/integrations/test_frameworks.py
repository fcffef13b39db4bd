"""What an adapter says if its framework is missing, or is another version."""

import pytest

from holdfast import ConfigError
from holdfast.integrations.adapter import require


def test_a_missing_framework_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ImportError, match=r"needs no_such_framework 1\.2 .*pip install 'no_such"):
        require("no_such_framework", "1.2")


def test_an_untested_version_is_refused() -> None:
    require("rich", "15")
    with pytest.raises(ConfigError, match=r"rich 15\.0\.0 is installed.* tested with 1: pip"):
        require("rich", "1")
