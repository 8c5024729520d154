"""`python -m bench.torch`."""

import sys

from bench.torch.run import main

if __name__ == "__main__":
    sys.exit(main())
