"""`python -m bench.keras`."""

import sys

from bench.keras.run import main

if __name__ == "__main__":
    sys.exit(main())
