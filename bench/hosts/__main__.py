"""`python -m bench.hosts`."""

import sys

from bench.hosts.run import main

if __name__ == "__main__":
    sys.exit(main())
