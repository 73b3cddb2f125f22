"""python -m bench: `fusedtp bench cpu` in a checkout."""

import sys

from .cpu import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
