"""The record of every changed slot, and its exact undo."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from npu_autopatch import holders

_ABSENT = object()


def held_by(owner: Any) -> Any:
    """The names and values of an owner: its namespace, or itself where it is a registry."""
    return owner if isinstance(owner, dict) else vars(owner)


def _put(owner: Any, attribute: str, value: Any) -> None:
    if value is _ABSENT:
        owner.pop(attribute) if isinstance(owner, dict) else delattr(owner, attribute)
    elif isinstance(owner, dict):
        owner[attribute] = value
    else:
        setattr(owner, attribute, value)


@dataclass
class Slot:
    """One attribute of a class or module, or entry of a registry, that holds a replacement.

    `original` is the raw old value as it stood in the owner's namespace, or a mark that the owner had none of
    its own (it inherited one). `site` and `kernel` name what it serves, empty for what is no site. `holders` are
    the activations that want the replacement in place. `held` counts who holds a module's original function beside
    the module; `captures` are the places among these that get the replacement, too, so that instances which are
    given the function can be pickled by its name.
    """

    owner: Any
    attribute: str
    original: Any
    replacement: Any
    site: str
    holders: set[object] = field(default_factory=set)
    kernel: str = ""
    held: int = 0
    captures: list[tuple[list[Any], int]] = field(default_factory=list)

    def capture(self) -> None:
        """Put the replacement where classes of the module, and their instances, have captured the original."""
        self.captures = holders.captures(self.owner, self.original)
        for place, index in self.captures:
            place[index] = self.replacement
        self.held -= len(self.captures)
        if self.captures and self.held > 0:
            for space, name in holders.in_instances(self.original):
                space[name] = self.replacement
                self.held -= 1

    def restore(self) -> Any:
        """Put the old value back; the foreign value found instead of our replacement, or None."""
        current = held_by(self.owner).get(self.attribute, _ABSENT)
        ours = any(current is known for known in (self.replacement, self.original, _ABSENT))
        foreign = None if ours else current
        if current is self.replacement:
            _put(self.owner, self.attribute, self.original)
        del current  # the count is of what others hold
        for place, index in self.captures:
            if place[index] is self.replacement:
                place[index] = self.original
        if self.site and isinstance(self.owner, ModuleType) and sys.getrefcount(self.replacement) > holders.ALONE:
            self._take_back()
        return foreign

    def exchange(self, replacement: Any) -> None:
        """Put another replacement where this one stands now."""
        if held_by(self.owner).get(self.attribute, _ABSENT) is not self.replacement:
            return
        _put(self.owner, self.attribute, replacement)
        for place, index in self.captures:
            if place[index] is self.replacement:
                place[index] = replacement
        for space, name in holders.in_instances(self.replacement) if self.captures else ():
            space[name] = replacement
        self.replacement = replacement

    def _take_back(self) -> None:
        """Give the original to whoever got the replacement while it was in place."""
        for module, name in holders.importers(self.replacement):
            setattr(module, name, self.original)
        for space, name in holders.in_instances(self.replacement) if self.captures else ():
            space[name] = self.original


class Ledger:
    """All slots in the order they were changed.

    `changing` is held while slots are set or put back, never while a site is probed: probing may import. Whoever
    probed compares `changes` under it, the number of slots set or put back so far.
    """

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self.changing = threading.Lock()
        self.changes = 0
        self._wrap: Callable[[str, str, Any], Any] | None = None

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots))

    def wrapping(
        self, wrap: Callable[[str, str, Any], Any] | None, unwrap: Callable[[Any], Any]
    ) -> Callable[[str, str, Any], Any] | None:
        """From now on replacements of sites stand wrapped by `wrap`, or bare if None; what wrapped them before."""
        with self.changing:
            earlier, self._wrap = self._wrap, wrap
            for slot in self._slots:
                if slot.site:
                    bare = unwrap(slot.replacement)
                    slot.exchange(bare if wrap is None else wrap(slot.site, slot.kernel, bare))
            self.changes += 1
        return earlier

    def find(self, owner: Any, attribute: str) -> Slot | None:
        """The slot of `owner` whose replacement is in place now."""
        current = held_by(owner).get(attribute, _ABSENT)
        for slot in self._slots:
            if slot.owner is owner and slot.attribute == attribute and slot.replacement is current:
                return slot
        return None

    def apply(
        self,
        owner: Any,
        attribute: str,
        replacement: Any,
        site: str,
        holder: object,
        kernel: str = "",
        held: int = 0,
    ) -> Slot:
        """Set the slot and record what it held.

        What a module has imported from a patched one is recorded as the original that it stands for.
        """
        current = held_by(owner).get(attribute, _ABSENT)
        original = next((slot.original for slot in self._slots if slot.replacement is current), current)
        if self._wrap is not None and site:
            replacement = self._wrap(site, kernel, replacement)
        slot = Slot(owner, attribute, original, replacement, site, {holder}, kernel, held)
        _put(owner, attribute, replacement)
        self._slots.append(slot)
        self.changes += 1
        if held:
            slot.capture()
        return slot

    def release(self, holder: object) -> list[tuple[Slot, Any]]:
        """Undo, last first, what only `holder` still wanted; the slots found under a foreign value, with it."""
        foreign = []
        with self.changing:
            for slot in reversed(self._slots):
                slot.holders.discard(holder)
                if not slot.holders and (found := slot.restore()) is not None:
                    foreign.append((slot, found))
            kept = [slot for slot in self._slots if slot.holders]
            self.changes += len(self._slots) - len(kept)
            self._slots = kept
        return foreign

    def roll_back(self, slots: list[Slot]) -> None:
        """Undo just these, last first."""
        for slot in reversed(slots):
            slot.restore()
            self._slots.remove(slot)
            self.changes += 1
