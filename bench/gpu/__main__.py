"""``python -m bench.gpu``; see ``bench.gpu.sequence``."""

import sys

from bench.gpu.sequence import main

if __name__ == "__main__":
    sys.exit(main())
