"""What a sweep of the modeling modules found: made by `coverage`, or read from what an earlier one has written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from npu_autopatch.cli import report
from npu_autopatch.cli.terminal import CommandError
from npu_autopatch.kernels import REGISTRY
from npu_autopatch.reporting import Row

_EXPECTED = "give a file written by npu-autopatch coverage --json"


@dataclass
class Coverage:
    """The report over all modules, which could not be imported and why, the backend with its reason, the families."""

    report: dict[str, Any] = field(default_factory=dict)
    not_imported: list[dict[str, str]] = field(default_factory=list)
    backend: str = ""
    chosen: str = ""
    family: str = "*"

    @classmethod
    def read(cls, path: str) -> Coverage:
        """What `to_json` gave; a report of NPU_AUTOPATCH_REPORT will do. Raises `CommandError`."""
        content, _ = report.read(path, _EXPECTED)
        missing, settings = content.get("not_imported", []), content.get("settings", {})
        valid = isinstance(settings, dict) and isinstance(settings.get("kernels", []), list)
        valid = valid and isinstance(content.get("versions", {}), dict) and isinstance(missing, list)
        if not valid or not all(isinstance(one, dict) and {"module", "reason"} <= one.keys() for one in missing):
            raise CommandError(f"{path} is JSON, but no report: {_EXPECTED}")
        return cls(content, missing, str(settings.get("backend", "unknown")), "", str(content.get("family", "*")))

    @property
    def rows(self) -> list[Row]:
        return [Row(**site) for site in self.report["sites"]]

    @property
    def transformers(self) -> str:
        """Its version."""
        return str(self.report.get("versions", {}).get("transformers", "unknown"))

    @property
    def kernels(self) -> list[str]:
        """Those that were asked for."""
        return [str(name) for name in self.report.get("settings", {}).get("kernels", REGISTRY)]

    def to_json(self) -> str:
        """The report as of NPU_AUTOPATCH_REPORT, with ``"family"`` and ``"not_imported": [{"module", "reason"}]``."""
        return json.dumps({**self.report, "family": self.family, "not_imported": self.not_imported}, indent=1)


def family(row: Row) -> str:
    return row.name.partition(".")[0]


def detail(row: Row) -> str:
    """The variant, the reason or both; of a traceback, its last line."""
    return "; ".join(filter(None, (row.variant, *row.reason.strip().splitlines()[-1:])))


def kernels_in(rows: Iterable[Row]) -> list[str]:
    """In the order of the registry, and then those it does not have."""
    found = {row.kernel for row in rows}
    return [*(name for name in REGISTRY if name in found), *sorted(name for name in found if name not in REGISTRY)]
