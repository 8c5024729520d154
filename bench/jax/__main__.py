"""`python -m bench.jax`."""

import sys

from bench.jax.run import main

if __name__ == "__main__":
    sys.exit(main())
