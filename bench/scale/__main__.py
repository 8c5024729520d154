"""`python -m bench.scale`."""

import sys

from bench.scale.run import main

if __name__ == "__main__":
    sys.exit(main())
