"""Settings for all tests: hypothesis draws the same examples in every run, and knows no deadline."""

from hypothesis import settings

# A shared two-core machine stalls for longer than any sensible deadline; a fixed seed makes failures repeat.
settings.register_profile("ckptkit", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ckptkit")
