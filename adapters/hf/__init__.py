"""What transformers' models share, and their adapters."""
