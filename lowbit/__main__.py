"""`python -m lowbit`: the command line."""

import sys

from lowbit.cli import main

if __name__ == "__main__":
    sys.exit(main())
