"""`python -m fusedtp` is the `fusedtp` command."""

import sys

from fusedtp.cli import main

if __name__ == "__main__":
    sys.exit(main())
