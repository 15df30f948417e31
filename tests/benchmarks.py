"""The benchmarks in full, kept in ``benchmarks.json``: ``cd tests && python -m benchmarks``, options as of ``probelens bench``."""

import sys

from probelens.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--size", "full", "--out", "benchmarks.json", *sys.argv[1:]]))
