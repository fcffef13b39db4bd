"""Run the loops, healthy and struck, and say how each run ended.

    python -m holdfast_lab.zoo.ranks [--loops ddp,fsdp] [--seeds 1-3] [--json FILE]

The exit code is 0 if every run ended with the bits of the calm one.
"""

import sys

from holdfast_lab.zoo.ranks.campaign import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
