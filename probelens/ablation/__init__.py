"""Is it needed? Subspaces and components taken out, with controls and refitted probes.

Public as ``pl.ablate``, ``pl.erase`` (LEACE and INLP to chance), ``pl.ablate_component``, ``pl.ablate_convolution``,
``pl.dose_response`` and ``pl.length_transfer``, each in the file of its name.
"""
