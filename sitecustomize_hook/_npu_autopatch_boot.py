"""Start-up: test NPU_AUTOPATCH, and if it is on put one finder on `sys.meta_path`.

Called by `npu_autopatch-init.pth` (Python up to 3.14), `npu_autopatch-init.start` (PEP 829) and the `sitecustomize.py`
of `npu-autopatch run`: in every interpreter of the environment, and more than once (a virtual environment runs `.pth`
lines twice). So nothing is imported at module level, nothing is written to stdout, and no error ends the interpreter.
The syntax is one that Python 2 can read, because an old interpreter may inherit our PYTHONPATH.

Off in isolated mode (`python -I`), which asks for no influence from the environment. `python -S` never comes here.
`python -E` and `-s` change nothing: NPU_AUTOPATCH is not one of Python's own variables.
"""

OFF_VALUES = ("", "0", "false", "off", "no")

_started = False


def init():
    """Install the finder if NPU_AUTOPATCH is on; once a process, with at most one line on stderr if that fails."""
    global _started
    import os
    import sys

    if _started or os.environ.get("NPU_AUTOPATCH", "").strip().lower() in OFF_VALUES:
        return
    if sys.version_info < (3, 10) or sys.flags.isolated:
        return
    _started = True
    try:
        from npu_autopatch.finder import install_from_environment

        install_from_environment()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit out of a .pth line is fatal to the interpreter
        _report(os, sys, error)


def _report(os, sys, error):
    try:
        reason = " ".join((type(error).__name__ + ": " + str(error)).split())[:300]
        line = "npu_autopatch: not started, transformers runs unpatched: " + reason
        line += " (reinstall npu-autopatch, or unset NPU_AUTOPATCH)\n"
        # Past the buffer: what it cannot get rid of (a full disk) makes the interpreter's exit code 120.
        os.write(sys.stderr.fileno(), line.encode("utf-8", "backslashreplace"))
    except Exception:  # stderr is None, closed or full: nobody to tell
        pass
