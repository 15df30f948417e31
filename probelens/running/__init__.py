"""Many runs of one model: collecting activations, sweeping interventions.

Public as ``pl.collect``. Every primitive that intervenes describes its conditions and leaves them to ``sweep``.
"""
