"""Bracket depth of real Python code."""
