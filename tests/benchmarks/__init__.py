"""Benchmarks against the peers: ``cd tests && python -m benchmarks``.

Each file but ``harness``, ``table``, ``shapes`` and ``growth`` holds rows of the table. A row runs probelens and its peers
on the same work in one process, in turn, and compares what they return.
"""
