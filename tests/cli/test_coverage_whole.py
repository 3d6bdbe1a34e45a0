"""`coverage` over the whole of the installed transformers, and docs/coverage.md, which shows the same."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from npu_autopatch.cli import coverage, coverage_markdown, main
from npu_autopatch.cli.coverage_report import Coverage, kernels_in

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "docs" / "coverage.md").read_text(encoding="utf-8")
VERSIONS = ("5.24.0", "5.0.0", "4.57.6")


@pytest.fixture(scope="module")
def swept() -> Coverage:
    """In a child process: nothing is imported or patched here."""
    return coverage.sweep(coverage._modules("*"), "all", "emulate")


@pytest.fixture
def run(
    swept: Coverage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Exit code and stdout of `coverage` after that sweep."""
    monkeypatch.setattr(coverage, "sweep", lambda *_: swept)
    return lambda *arguments: (main(["coverage", *arguments]), capsys.readouterr().out)


def test_everything_as_json(run: Callable[..., tuple[int, str]]) -> None:
    code, out = run("--json")
    whole = json.loads(out)
    assert code == 0 and whole["settings"]["backend"] == "emulate"
    assert len(whole["sites"]) == sum(whole["summary"].values())
    assert whole["summary"]["failed"] == 0
    assert whole["summary"]["patched"] > 300
    assert all(site["reason"] for site in whole["sites"] if site["state"] == "refused")
    for missing in whole["not_imported"]:
        assert missing["module"].startswith("transformers.models.") and re.match(r"\w+: ", missing["reason"])
    modules = {site["module"] for site in whole["sites"]}
    assert not modules & {missing["module"] for missing in whole["not_imported"]}


def test_nothing_differs_from_itself_and_one_planted_refusal_is_found(
    run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    file = tmp_path / "old.json"
    whole = json.loads(run("--json")[1])
    file.write_text(json.dumps(whole))
    code, out = run("--diff", str(file))
    assert code == 0 and "no site differs" in out
    refused = next(site for site in whole["sites"] if site["state"] == "refused")
    refused.update(state="patched", variant="half", reason="")
    file.write_text(json.dumps(whole))
    code, out = run("--diff", str(file), "--json")
    assert code == 1 and [change["name"] for change in json.loads(out)["lost"]] == [refused["name"]]


def test_the_page_on_coverage_has_the_three_versions() -> None:
    assert PAGE.startswith(coverage_markdown.HEAD)
    assert tuple(re.findall(r"^## transformers (\S+)$", PAGE, re.MULTILINE)) == VERSIONS


@pytest.mark.skipif(transformers.__version__ not in VERSIONS, reason="docs/coverage.md shows other versions")
def test_the_page_on_coverage_is_what_is_found(swept: Coverage) -> None:
    written = _part(PAGE, swept.transformers)
    found = _plain(coverage_markdown.part(swept, sites=False))
    stale = list(difflib.unified_diff(written.splitlines(), found.splitlines(), "docs/coverage.md", "now", n=0))
    assert not stale, "\n".join(["docs/coverage.md is stale: make coverage-docs", *stale])
    total = " | ".join(coverage_markdown.total(swept, kernels_in(swept.rows)))
    assert f"| {total} |" in PAGE, f"docs/coverage.md lacks the total {total}: make coverage-docs"


def _part(page: str, version: str) -> str:
    after = page.partition(f"## transformers {version}\n")[2]
    return _plain(f"## transformers {version}\n" + re.split(r"^(?=## )", after, maxsplit=1, flags=re.MULTILINE)[0])


def _plain(text: str) -> str:
    """Without what an error says, which differs between versions of Python; a missing module is kept."""
    return re.sub(r"\b(?!ModuleNotFound)(\w+Error): [^;|]*", r"\1 ", text).strip()
