"""Benchmarks against the peers: ``probelens bench``.

Each file but ``command``, ``harness``, ``table``, ``shapes`` and ``growth`` holds rows of the table. A row runs probelens
and its peers on the same work in one process, in turn, and compares what they return.
"""
