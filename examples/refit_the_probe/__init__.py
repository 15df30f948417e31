"""The experiments of arXiv 2606.00926 ("Refit the probe"): its first version, and its own correction."""
