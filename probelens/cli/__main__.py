"""``python -m probelens.cli``: the same as the command ``probelens``."""

import sys

from probelens.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
