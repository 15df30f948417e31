"""Is it readable, needed, sufficient, used? The four questions in one call.

Public as ``pl.profile`` and ``pl.Profile``.
"""

from probelens.profiling.profile import profile as profile
from probelens.profiling.result import Profile as Profile
