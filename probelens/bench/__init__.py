"""Benchmarks against the peers: ``probelens bench``.

``rows`` lists the rows of the table; each file but ``command``, ``harness``, ``table``, ``shapes`` and ``growth`` holds the work of some. A row runs probelens
and its peers on the same work in one process, in turn, and compares what they return.
"""
