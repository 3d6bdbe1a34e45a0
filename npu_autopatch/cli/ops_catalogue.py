"""The ops of this machine: what torch_npu registers, else what its files say, beside our own table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npu_autopatch.cli import ops_registered, ops_wheel
from npu_autopatch.cli.ops_table import Entry, Table, table
from npu_autopatch.cli.terminal import progress

REGISTRATION, FILES, TABLE = "registration", "files of torch_npu", "table of npu_autopatch"


@dataclass(frozen=True)
class Op:
    """One op. `installed` and `differentiable` are None where that cannot be told; each fact has its source.

    `entries` are those of our table, one an overload.
    """

    name: str
    installed: bool | None
    signatures: list[str]
    signatures_from: str
    differentiable: bool | None
    differentiable_from: str
    documentation: str
    entries: list[Entry]

    @property
    def used_by(self) -> list[str]:
        return list(dict.fromkeys(kernel for entry in self.entries for kernel in entry.used_by))


@dataclass(frozen=True)
class Catalogue:
    """The ops by name. `version` of torch_npu, empty without one; `missing` says why it has not been imported."""

    version: str
    missing: str
    table: Table
    ops: dict[str, Op]


def catalogue(environ: Mapping[str, str]) -> Catalogue:
    """Find out everything; imports torch_npu, if it is installed, in a child."""
    known = table()
    wheel = ops_wheel.read()
    if wheel is None:
        nothing = ops_wheel.Wheel("")
        return Catalogue("", "torch_npu is not installed", known, _merged(known, nothing, {}))
    with progress() as bar:
        bar.add_task("torch_npu", total=None)
        found = ops_registered.ask(environ)
    return Catalogue(wheel.version, found["missing"], known, _merged(known, wheel, found["ops"]))


def _merged(known: Table, wheel: ops_wheel.Wheel, registered: dict[str, dict[str, Any]]) -> dict[str, Op]:
    entries: dict[str, list[Entry]] = {}
    for name, entry in known.entries.items():
        entries.setdefault(name.partition(".")[0], []).append(entry)
    installed = registered or wheel.signatures
    train = known.train(wheel.version) or list(known.trains)[-1]
    ops = {}
    documented = () if installed else wheel.documentation
    for name in sorted({*installed, *documented, *entries}, key=lambda name: (name.lstrip("_"), name)):
        ours = entries.get(name, [])
        gradients = [entry.differentiable_since for entry in ours]
        differentiable = any(since is not None and since <= train for since in gradients) if ours else None
        gradient_from = TABLE if ours else ""
        if name in installed:
            signatures, signatures_from = wheel.signatures.get(name, []), FILES
            if name in registered:
                signatures, signatures_from = registered[name]["signatures"], REGISTRATION
                if registered[name]["differentiable"] is not None:
                    differentiable, gradient_from = registered[name]["differentiable"], REGISTRATION
        else:
            signatures, signatures_from = [entry.signature for entry in ours], TABLE
        ops[name] = Op(
            name,
            name in installed if installed else None,
            signatures,
            signatures_from,
            differentiable,
            gradient_from,
            wheel.documentation.get(name, ""),
            ours,
        )
    return ops
