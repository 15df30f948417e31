"""`paper-formal`: five architectures trained on formal tasks, everything measured on each."""
