"""Who wants what patched, and for how long: the environment, `enable`, and each `patched` block."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import traceback
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch

from npu_autopatch import finder, foreign, holders, remote_code
from npu_autopatch.kernels import REGISTRY, load
from npu_autopatch.ledger import Ledger
from npu_autopatch.patcher import PatchError, patch_module
from npu_autopatch.reporting import FOREIGN, PATCHED, Report, Row
from npu_autopatch.settings import Settings, SettingsError, is_strict
from npu_autopatch.tracing import Trace, unfollowed

log = logging.getLogger("npu_autopatch")


class Activation:
    """One wish to have sites patched. `contains`: its errors are reported, not raised into the program."""

    def __init__(self, settings: Settings, contains: bool = False) -> None:
        self.settings = settings
        self.contains = contains
        self.kernels = [load(name) for name in settings.kernels]
        self.seen: dict[str, list[weakref.ref[type]]] = {}
        self.rows: dict[_Key, Row] = {}


_Key = tuple[str, str, str]  # module, site, kernel
_active: list[Activation] = []
_lasting: list[Activation] = []  # those of the environment and of enable(), which disable() ends
_ledger = Ledger()
_ended: dict[_Key, Row] = {}  # what became of the sites of activations that are over
_half_loaded: list[ModuleType] = []
_last_settings: Settings | None = None


def enable(kernels: str | Iterable[str] = "all", skip: str | Iterable[str] = (), backend: str = "npu") -> None:
    """Patch every modeling module, loaded and to come, until `disable`.

    `kernels` and `skip` are as in the environment, or lists. `backend` is ``npu``, or ``emulate`` to fuse CPU tensors,
    and those of the meta device, too. Raises `SettingsError`, and whatever goes wrong in patching.
    """
    _lasting.append(_begin(Activation(Settings.of(REGISTRY, kernels, skip, backend))))


def disable() -> None:
    """Put back what the environment and `enable` have changed."""
    finder.from_environment = False
    while _lasting:
        _end(_lasting.pop())
    if not _active:
        finder.remove()
        remote_code.unwrap()


@contextmanager
def patched(
    kernels: str | Iterable[str] = "all", skip: str | Iterable[str] = (), backend: str = "npu"
) -> Iterator[Report]:
    """Patch as `enable` does, and restore exactly on exit. Gives the report as it is on entry."""
    activation = _begin(Activation(Settings.of(REGISTRY, kernels, skip, backend)))
    try:
        _finish_half_loaded()
        told = [_OnEntry(list(_now().values()), _described(activation.settings))]
        kept = weakref.ref(told[0])
        yield told.pop()
        if (on_entry := kept()) is not None:  # it may be read later
            _ = on_entry.sites
    finally:
        _end(activation)


class _OnEntry(Report):
    """A report that asks for live instances and other holders when it is first read: most blocks' never is."""

    def __init__(self, rows: list[Row], settings: dict[str, object]) -> None:
        self._rows, self.settings = rows, settings

    def __getattr__(self, name: str) -> Any:
        if name == "sites":
            self.sites = _with_others(self._rows)
        elif name == "versions":
            self.versions = _versions()
        else:
            raise AttributeError(name)
        return vars(self)[name]


@contextmanager
def trace() -> Iterator[Trace]:
    """Count what the calls of patched sites do: fused, or run by the original, and which condition decided so.

    Costs much while it lasts, and nothing before and after. Compiled code is not counted.
    """
    _reset_dynamo()
    watch = Trace()
    earlier = _ledger.wrapping(watch.traced, unfollowed)
    try:
        yield watch
    finally:
        _ledger.wrapping(earlier, unfollowed)
        _reset_dynamo()


def report() -> Report:
    """What happened to every site so far, in this process."""
    _finish_half_loaded()
    settings = _active[-1].settings if _active else _last_settings
    return Report(_with_others(_so_far()), _described(settings), _versions())


def _now() -> dict[_Key, Row]:
    """What each site is: as the latest of the active ones has found it, who sees what those before have patched."""
    return {key: row for activation in list(_active) for key, row in list(activation.rows.items())}


def _so_far() -> list[Row]:
    return list({**_ended, **_now()}.values())


def _with_others(rows: list[Row]) -> list[Row]:
    """The rows, and what is not reached: instances with a forward of their own, and holders of a function."""
    slots = {slot.owner: slot for slot in _ledger if slot.site and isinstance(slot.owner, type)}
    of_classes = {(row.name, row.kernel): row for row in rows}
    for cls, homes in foreign.instances_with_own_forward(slots).items():
        row = of_classes.get((slots[cls].site, slots[cls].kernel))
        if row is None:  # patched since
            continue
        for home, count in homes.items():
            have = "instances have" if count > 1 else "instance has"
            words = f"{count} live {have} a forward of its own, from {home}"
            rows.append(Row(row.module, f"{row.name} (instance)", row.kernel, "", FOREIGN, words))
    return _with_holders(rows)


def _with_holders(rows: list[Row]) -> list[Row]:
    """The rows, those of functions with the names of others that hold the original and are not reached."""
    slots = {(slot.owner.__name__, slot.site, slot.kernel): slot for slot in _ledger if slot.held > 0}
    names = holders.names([(slot.original, slot.held) for slot in slots.values()])
    told = []
    for row in rows:
        slot = slots.get((row.module, row.name, row.kernel))
        others = names[slot.original] if slot is not None and row.state == PATCHED else []
        told.append(replace(row, reason=f"not reached where it is held by {', '.join(others)}") if others else row)
    return told


def module_loaded(module: ModuleType) -> None:
    """A watched module was executed: patch it for everyone active. What the loader and remote code call."""
    if finder.from_environment and not _lasting:
        _begin_from_environment()
    _finish_half_loaded()
    for activation in list(_active):
        _patch(module, activation)


def _begin_from_environment() -> None:
    finder.from_environment = False
    try:
        settings = Settings.from_environment(REGISTRY)
        _log_to_stderr(settings)
        atexit.register(_at_exit, settings)
        if settings.trace:
            watch = Trace()
            _ledger.wrapping(watch.traced, unfollowed)
            atexit.register(_print_trace, watch)
        _lasting.append(_begin(Activation(settings, contains=not settings.strict)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a kernel that cannot be imported, SystemExit among them
        if is_strict():
            raise
        atexit.unregister(_at_exit)
        if not _active:  # an explicit block goes on
            finder.remove()
            remote_code.unwrap()
        kind = "" if isinstance(error, SettingsError) else f"{type(error).__name__}: "
        finder.complain(f"off: {kind}{error}")


def _begin(activation: Activation) -> Activation:
    global _last_settings
    settings = _last_settings = activation.settings
    for other in _active:
        if other.settings.backend != settings.backend:
            both = f"{settings.backend!r} cannot join {other.settings.backend!r}"
            raise SettingsError(f"backend {both}: call disable() first")
    if settings.backend == "emulate":
        from npu_autopatch import emulator
        from npu_autopatch.ops.capability import load_torch_npu

        load_torch_npu()  # a later import of it would end the process: its ops are defined only once
        emulator.install()
    _reset_dynamo()
    _active.append(activation)
    finder.install()
    try:
        for name, module in list(sys.modules.items()):
            if finder.watched(name) and isinstance(module, ModuleType):
                if getattr(module.__spec__, "_initializing", False):
                    _half_loaded.append(module)
                else:
                    _patch(module, activation)
    except BaseException:
        _end(activation)
        raise
    return activation


def _end(activation: Activation) -> None:
    _active.remove(activation)
    rows = activation.rows
    for slot, found in _ledger.release(activation):
        key = next((key for key in rows if slot.site and key[1:] == (slot.site, slot.kernel)), None)
        if key is not None:
            named = getattr(found, "__module__", None) or type(found).__module__
            passes_for_it = named == getattr(slot.original, "__module__", None)
            words = f"patched over by {foreign.home_of(found) if passes_for_it else named} and left alone"
            _note(Row(*key, rows[key].variant, FOREIGN, words), activation)
    for key, row in rows.items():
        _ended.pop(key, None)  # the latest comes last
        _ended[key] = replace(row, ended=True)
    if not _active and not finder.from_environment:
        finder.remove()
    _reset_dynamo()


def _patch(module: ModuleType, activation: Activation) -> None:
    """Patch `module` for `activation`, and keep what goes wrong from the program if it asked for nothing."""
    try:
        _patch_or_raise(module, activation)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if not activation.contains:
            raise
        cause = error.__cause__ or error
        words = traceback.format_exception_only(cause)[-1].strip()
        finder.complain(f"{error}: {words}" if cause is not error else f"{module.__name__} was not patched: {words}")


def _patch_or_raise(module: ModuleType, activation: Activation) -> None:
    if module.__name__ == finder.REMOTE_CODE_LOADER:
        remote_code.watch(_ledger, activation)
        return
    classes = [value for value in list(vars(module).values()) if isinstance(value, type)]
    known = activation.seen.get(module.__name__, ())
    if known and [ref() for ref in known] == classes:  # not executed again since
        return
    activation.seen[module.__name__] = [weakref.ref(cls) for cls in classes]
    _forget(module, activation)
    try:
        for row in patch_module(module, activation.kernels, activation.settings, _ledger, activation):
            _note(row, activation)
    except PatchError as error:
        for row in error.rows:
            _note(row, activation)
        raise


def _forget(module: ModuleType, activation: Activation) -> None:
    """Drop the rows about to be found again: a class may be gone since, or stand under another's name."""
    kernels = {"", *(kernel.name for kernel in activation.kernels)}
    for rows in (activation.rows, _ended):
        for key in [key for key in list(rows) if key[0] == module.__name__ and key[2] in kernels]:
            rows.pop(key, None)


def _note(row: Row, activation: Activation) -> None:
    activation.rows[row.module, row.name, row.kernel] = row
    detail = row.variant if row.state == PATCHED else row.reason
    log.debug("%s %s: %s", row.state, row.name, detail)


def _finish_half_loaded() -> None:
    """Modules that were being imported when an activation began have no loader of ours."""
    for module in list(_half_loaded):
        if not getattr(module.__spec__, "_initializing", False):
            _half_loaded.remove(module)
            for activation in list(_active):
                _patch(module, activation)


def _reset_dynamo() -> None:
    """Dynamo guards a nested module's class by identity, not its forward: compiled code would stay as it was."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _log_to_stderr(settings: Settings) -> None:
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("npu_autopatch: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(settings.log_level.upper())


def _at_exit(settings: Settings) -> None:
    try:
        if settings.report_path:
            final = report()
            final.write(settings.report_path)
        else:  # without asking for live instances and other holders, which takes a tenth of a second
            _finish_half_loaded()
            final = Report(_so_far(), _described(settings))
        log.info("%s", final.summary())
    except OSError as error:
        finder.complain(f"the report could not be written to {settings.report_path}: {error.strerror}")
    except Exception as error:  # the program has ended well
        finder.complain(f"no report: {type(error).__name__}: {error}")


def _print_trace(watch: Trace) -> None:
    with suppress(Exception):  # stderr is None, closed or full: nobody to tell
        sys.stderr.write(f"npu_autopatch: {watch}\n")


_PACKAGES = ("npu-autopatch", "transformers", "torch", "torch_npu", "wrapt")


def _versions() -> dict[str, str]:
    return {name: _version(name) for name in _PACKAGES}


@functools.cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _described(settings: Settings | None) -> dict[str, object]:
    if settings is None:
        return {}
    described = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(settings).items()}
    return {**described, "active": bool(_active)}
