"""Is it sufficient, and is it used? Activations put in from another run.

Public as ``pl.patch`` and ``pl.patch_plan``, ``pl.attribute`` (the first-order estimate), ``pl.patch_sites`` (ten readings
of "the final layer") and ``pl.interchange`` (only a subspace's part).
"""
