"""Is it needed? Subspaces and components taken out, with controls and refitted probes."""
