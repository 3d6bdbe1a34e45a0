"""The `sitecustomize` that `npu-autopatch run` puts on PYTHONPATH: starts the package, then steps aside.

Every interpreter that inherits the PYTHONPATH runs this file, also one of another version and one the package is not
installed for: there it only steps aside. The folder leaves `sys.path` for good and the name leaves `sys.modules`, so
that the next `sitecustomize` is found, named and reported as if this one had never been there. PYTHONPATH itself
stays, for child processes.
"""

import os
import sys


def _start():
    try:
        import _npu_autopatch_boot
    except ImportError:
        return
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _report(error)
    else:
        _npu_autopatch_boot.init()


def _report(error):
    try:
        line = "npu_autopatch: not started, transformers runs unpatched: " + " ".join(repr(error).split())[:300] + "\n"
        os.write(sys.stderr.fileno(), line.encode("utf-8", "backslashreplace"))
    except Exception:  # stderr is None, closed or full: nobody to tell
        pass


_start()

_folder = os.path.dirname(__file__)
sys.path[:] = [entry for entry in sys.path if entry != _folder]
_self = sys.modules.pop(__name__)  # in a name, because Python 2 clears the globals of a module nobody refers to

# Without a sitecustomize of the user's this raises the ImportError that Python itself passes over in silence.
__import__(__name__)
