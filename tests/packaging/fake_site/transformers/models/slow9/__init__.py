"""Is half-way through its own import while another thread imports its modeling module."""

import time


def _wait_for_the_other_thread():
    import __main__

    __main__.slow9_started.set()
    time.sleep(0.3)


_wait_for_the_other_thread()
import xml.dom.minidom  # noqa: E402, F401 (some import, while this module's lock is held)

from transformers.models.slow9.modeling_slow9 import Slow9RMSNorm  # noqa: E402, F401
