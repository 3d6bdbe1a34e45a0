"""The ledger: every slot comes back as it was, by identity, in any order, and never over a foreign value."""

from __future__ import annotations

import types

import pytest

from npu_autopatch.ledger import Ledger


def replacement(self=None):  # type: ignore[no-untyped-def]
    return "replaced"


class Base:
    def method(self) -> str:
        return "base"


def _owners() -> dict[str, tuple[object, str]]:
    class Owner(Base):
        def own(self) -> str:
            return "own"

        @staticmethod
        def static() -> str:
            return "static"

        @classmethod
        def of_class(cls) -> str:
            return "class"

        @property
        def attribute(self) -> str:
            return "property"

    module = types.ModuleType("some_module")
    module.function = lambda: "function"  # type: ignore[attr-defined]
    return {
        "method": (Owner, "own"),
        "inherited method": (Owner, "method"),
        "static method": (Owner, "static"),
        "class method": (Owner, "of_class"),
        "property": (Owner, "attribute"),
        "module function": (module, "function"),
        "instance of its class's method": (Owner(), "own"),
    }


@pytest.mark.parametrize("kind", _owners())
def test_undo_restores_the_identity_of_a(kind: str) -> None:
    owner, attribute = _owners()[kind]
    before = dict(vars(owner))
    ledger = Ledger()
    ledger.apply(owner, attribute, replacement, "", "a")
    assert vars(owner)[attribute] is replacement
    assert ledger.release("a") == []
    assert dict(vars(owner)) == before
    assert all(vars(owner)[name] is value for name, value in before.items())
    assert list(ledger) == []


def test_an_inherited_slot_is_deleted_again() -> None:
    owner, attribute = _owners()["inherited method"]
    ledger = Ledger()
    ledger.apply(owner, attribute, replacement, "", "a")
    ledger.release("a")
    assert attribute not in vars(owner)
    assert owner().method() == "base"  # type: ignore[operator]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_shared_slot_stays_until_the_last_holder_leaves(order: str) -> None:
    owner, attribute = _owners()["method"]
    original = vars(owner)[attribute]
    ledger = Ledger()
    slot = ledger.apply(owner, attribute, replacement, "", "a")
    assert ledger.find(owner, attribute) is slot
    slot.holders.add("b")
    ledger.release(order[0])
    assert vars(owner)[attribute] is replacement
    ledger.release(order[1])
    assert vars(owner)[attribute] is original


def test_a_later_foreign_value_is_left_alone_and_told() -> None:
    owner, attribute = _owners()["method"]
    ledger = Ledger()
    slot = ledger.apply(owner, attribute, replacement, "", "a")

    def foreign(self: object) -> str:
        return "foreign"

    setattr(owner, attribute, foreign)
    assert ledger.find(owner, attribute) is None
    assert ledger.release("a") == [(slot, foreign)]
    assert vars(owner)[attribute] is foreign


def test_a_slot_others_have_put_back_is_no_foreign_value() -> None:
    owner, attribute = _owners()["method"]
    original = vars(owner)[attribute]
    ledger = Ledger()
    ledger.apply(owner, attribute, replacement, "", "a")
    setattr(owner, attribute, original)
    assert ledger.release("a") == []
    assert vars(owner)[attribute] is original


def test_a_slot_others_have_deleted_stays_deleted() -> None:
    owner, attribute = _owners()["inherited method"]
    ledger = Ledger()
    ledger.apply(owner, attribute, replacement, "", "a")
    delattr(owner, attribute)
    assert ledger.release("a") == []
    assert attribute not in vars(owner)


def test_roll_back_undoes_only_what_it_is_given() -> None:
    owner, _ = _owners()["method"]
    before = dict(vars(owner))
    ledger = Ledger()
    kept = ledger.apply(owner, "own", replacement, "", "a")
    undone = [ledger.apply(owner, name, replacement, "", "a") for name in ("method", "static")]
    ledger.roll_back(undone)
    assert dict(vars(owner)) == {**before, "own": replacement}
    assert list(ledger) == [kept]
