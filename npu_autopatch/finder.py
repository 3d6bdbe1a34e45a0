"""The `sys.meta_path` finder: which modules to watch, and the hand-off to the loader.

Imported at interpreter start, so it imports nothing that is not loaded by then. It walks the other finders
itself: wrapt's post-import hooks have no wildcards, and importlib.util.find_spec would import the parent while
the interpreter holds a module lock, which can deadlock.
"""

from __future__ import annotations

import sys
from _thread import get_ident

REMOTE_CODE = "transformers_modules."
REMOTE_CODE_LOADER = "transformers.dynamic_module_utils"


def watched(name: str) -> bool:
    """Whether the module `name` may hold sites, or is what loads remote code."""
    if not name.startswith("transformers"):
        return False
    if name.startswith("transformers.models."):
        leaf = name.rpartition(".")[2]
        torch_model = leaf.startswith("modeling_") and not leaf.startswith(("modeling_tf_", "modeling_flax_"))
        return torch_model and not name.startswith("transformers.models.auto.")
    return name == REMOTE_CODE_LOADER or name.startswith(REMOTE_CODE)


class ModelingFinder:
    """Finds a watched module with the other finders, and has its loader tell us when it is executed."""

    def __init__(self) -> None:
        self._searching: set[tuple[int, str]] = set()

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        """The spec the other finders give, with our loader around theirs; None for all we do not watch."""
        if sys.meta_path and sys.meta_path[0] is not self:
            self._come_to_the_front()
        # written out before the call: this line runs for every import of the process
        if not fullname.startswith("transformers") or not watched(fullname):
            return None
        key = (get_ident(), fullname)
        if key in self._searching:  # a finder that asks sys.meta_path in turn
            return None
        self._searching.add(key)
        try:
            spec = self._ask_the_others(fullname, path, target)  # type: ignore[no-untyped-call]
        finally:
            self._searching.discard(key)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec  # not found, a namespace package or a legacy loader: none of our business
        try:
            from npu_autopatch.loader import announce

            announce(spec)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit among them
            remove()
            complain(f"off: {fullname} cannot be watched: {type(error).__name__}: {error}")
        return spec

    def _come_to_the_front(self) -> None:
        """Past finders that came later and would find a watched module with a loader of their own, unasked of us."""
        if self in sys.meta_path:
            # In before out, so that other threads miss nothing. Whoever iterates goes on with our old neighbour.
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
            del sys.meta_path[sys.meta_path.index(self, 1)]  # type: ignore[arg-type]

    def _ask_the_others(self, fullname, path, target):  # type: ignore[no-untyped-def]
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


def install() -> None:
    """Put the one finder in front of the others."""
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]


def remove() -> None:
    """Take the finder away again."""
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]


def install_from_environment() -> None:
    """What the boot calls: watch, and read the settings when the first watched module is loaded."""
    global from_environment
    from_environment = True
    install()


def complain(line: str) -> None:
    """One line on stderr, where there is one."""
    try:  # noqa: SIM105 (contextlib may not be loaded yet)
        sys.stderr.write(f"npu_autopatch: {' '.join(line.split())}\n")
    except Exception:  # stderr is None, closed or full: nobody to tell
        pass


finder = ModelingFinder()
from_environment = False
