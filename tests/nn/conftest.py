"""What the tests of the modules share."""

import sys
from pathlib import Path

# The module of cases beside the tests, whatever the import mode.
sys.path.append(str(Path(__file__).parent))
