"""One loaded module in: its sites, their proofs, the patches; rolled back whole if anything goes wrong."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from npu_autopatch import foreign, holders
from npu_autopatch.kernels import probing
from npu_autopatch.kernels.base import Kernel, Match, Site, site_name
from npu_autopatch.ledger import Ledger, Slot
from npu_autopatch.reporting import FAILED, FOREIGN, PATCHED, REFUSED, SKIPPED, Row
from npu_autopatch.settings import Settings


class PatchError(RuntimeError):
    """A module that could not be patched and was rolled back; `rows` tell what had been found of it."""

    def __init__(self, module: str, rows: list[Row]) -> None:
        super().__init__(f"{module} was not patched and is as it was")
        self.rows = rows


def patch_module(
    module: ModuleType, kernels: Iterable[Kernel], settings: Settings, ledger: Ledger, holder: object
) -> list[Row]:
    """Patch the sites of `module` for `holder` and say what happened to each.

    Raises `PatchError`, with the cause and after undoing what was done to this module.
    """
    rows: list[Row] = []
    planned: list[tuple[Site, str, Any]] = []
    site: Site | None = None
    kernel_name = ""
    try:
        while True:
            rows.clear()
            planned.clear()
            changes = ledger.changes
            try:
                with probing.undisturbed():
                    for kernel in kernels:
                        kernel_name, site, missing = kernel.name, None, kernel.missing()
                        # all found before any is decided on: an unfinished search would count as a holder
                        for site in list(_sites(module, kernel, ledger)):
                            row, replacement = _decide(site, kernel, missing, settings, ledger)
                            rows.append(row)
                            if replacement is not None:
                                planned.append((site, kernel_name, replacement))
            except Exception:
                if ledger.changes == changes:
                    raise
                continue  # what went wrong may be that another thread's patch was taken for the original
            rows += _replaced_classes(module)
            with ledger.changing:
                if ledger.changes == changes:  # or else another thread's patches may have been taken for the original
                    _apply(planned, ledger, holder)
                    return rows
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a class that is probed may try to end the process
        raise PatchError(module.__name__, _failed(module, rows, site, kernel_name)) from error


def _sites(module: ModuleType, kernel: Kernel, ledger: Ledger) -> Iterator[Site]:
    """What `kernel` finds in `module`, and what it has patched there: that need not look like a site any more."""
    found = []
    for site in kernel.find(module):
        found.append((site.owner, site.attribute))
        yield site
    own = [value for value in list(vars(module).values()) if getattr(value, "__module__", "") == module.__name__]
    for slot in ledger:
        here = any(owner is slot.owner for owner in (module, *own))
        if here and slot.kernel == kernel.name and (slot.owner, slot.attribute) not in found:
            yield Site(module.__name__, slot.site, slot.owner, slot.attribute)


def _decide(site: Site, kernel: Kernel, missing: str, settings: Settings, ledger: Ledger) -> tuple[Row, Any]:
    """The row of a site, and its slot or what goes into it, with the count of other holders; None if nothing does."""

    def row(state: str, reason: str = "", variant: str = "") -> Row:
        return Row(site.module, site.name, kernel.name, variant, state, reason)

    pattern = settings.skips(site.name)
    slot = ledger.find(site.owner, site.attribute)
    if slot is not None:  # for another holder, who alone keeps it if this one skips it
        return row(PATCHED, variant=slot.replacement.__npu_autopatch__), None if pattern else slot
    if pattern:
        return row(SKIPPED, f"by the pattern {pattern} of NPU_AUTOPATCH_SKIP or skip="), None
    if who := foreign.of(site.owner, site.attribute):
        return row(FOREIGN, f"already patched by {who}"), None
    if missing:
        return row(REFUSED, missing), None
    held = holders.count(site.owner, site.attribute) if isinstance(site.owner, ModuleType) else 0
    outcome = kernel.prove(site, ("npu", "cpu", "meta") if settings.backend == "emulate" else ("npu",))
    if not isinstance(outcome, Match):
        return row(REFUSED, outcome.reason), None
    outcome.replacement.__npu_autopatch__ = outcome.variant  # type: ignore[attr-defined]
    return row(PATCHED, variant=outcome.variant), (outcome.replacement, held)


def _apply(planned: list[tuple[Site, str, Any]], ledger: Ledger, holder: object) -> None:
    done: list[Slot] = []
    try:
        for site, kernel, planned_for_it in planned:
            if isinstance(planned_for_it, Slot):
                planned_for_it.holders.add(holder)
            else:
                replacement, held = planned_for_it
                done.append(ledger.apply(site.owner, site.attribute, replacement, site.name, holder, kernel, held))
    except BaseException:
        ledger.roll_back(done)
        raise


def _replaced_classes(module: ModuleType) -> list[Row]:
    rows = []
    for name, cls in foreign.replaced_classes(module).items():
        words = f"the class here is {cls.__module__}.{cls.__name__}, of another package"
        rows.append(Row(module.__name__, site_name(module.__name__, name), "", "", FOREIGN, words))
    return rows


def _failed(module: ModuleType, rows: list[Row], site: Site | None, kernel: str) -> list[Row]:
    """What was patched, and the site at fault, become failed."""
    reason = traceback.format_exc()
    name = site.name if site is not None else site_name(module.__name__, "")
    at_fault = Row(module.__name__, name, kernel, "", FAILED, reason)
    undone = f"rolled back with its module, because of {name}"
    others = [Row(r.module, r.name, r.kernel, r.variant, FAILED, undone) if r.state == PATCHED else r for r in rows]
    return [*(row for row in others if row.name != name), at_fault]
