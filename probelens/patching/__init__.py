"""Is it sufficient? Activations put in from another run."""
