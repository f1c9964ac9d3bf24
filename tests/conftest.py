"""Settings for all tests: hypothesis draws the same examples in every run, and knows no deadline."""

import signal

from hypothesis import settings

# A shared two-core machine stalls for longer than any sensible deadline; a fixed seed makes failures repeat.
settings.register_profile("ckptkit", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ckptkit")

collect_ignore_glob = [
    "peers/*_jobs.py"
]  # programs that the peers' tests start in an environment of their own

# Under nohup or a background job SIGINT is ignored, and children inherit that: tests of Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
