"""`python -m simpro_fast VERB ...` is `simpro-fast VERB ...`."""

import sys

from simpro_fast.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
