"""`coverage --markdown`: one or several versions, family by family, and each refused site with its reason."""

from __future__ import annotations

from markdown_it import MarkdownIt

from npu_autopatch.cli.coverage_markdown import document
from npu_autopatch.cli.coverage_report import Coverage
from npu_autopatch.reporting import Report, Row

NASTY = "it [clamps] | by *two*, as `x` <y> and _z_ of __index__ \\ says"
ROWS = [
    Row("m", "qwen3.Qwen3RMSNorm", "rms_norm", "round_then_mul", "patched"),
    Row("m", "qwen3.Qwen3QNorm", "rms_norm", "round_then_mul", "patched"),
    Row("m", "qwen3.Qwen3ZeroNorm", "rms_norm", "one_plus", "patched"),
    Row("m", "qwen3.Qwen3MLP", "swiglu", "", "refused", NASTY),
    Row("m", "glm4.Glm4MLP", "swiglu", "", "refused", NASTY),
    Row("m", "gpt2.GPT2MLP", "swiglu", "", "failed", "Traceback (most recent call last):\n  x\nKeyError: 'gate'\n"),
]


def _coverage(version: str, rows: list[Row]) -> Coverage:
    report = Report(rows, {"backend": "emulate"}, {"transformers": version})
    return Coverage({"sites": [vars(row) for row in rows], "versions": report.versions, "settings": report.settings})


def _tables(text: str) -> dict[str, list[list[str]]]:
    """By the last heading: the cells as a reader sees them, line by line."""
    tables: dict[str, list[list[str]]] = {}
    heading, before = "", ""
    for token in MarkdownIt().enable("table").parse(text):
        if before == "heading_open":
            heading = token.content
        elif token.type == "tr_open":
            tables.setdefault(heading, []).append([])
        elif token.type == "inline" and before in ("td_open", "th_open"):
            tables[heading][-1].append("".join(child.content for child in token.children or ()))
        before = token.type
    return tables


def test_families_show_variants_and_how_many_sites_are_not_patched() -> None:
    families = _tables(document([_coverage("5.24.0", ROWS)], sites=False))["transformers 5.24.0"]
    assert families == [
        ["family", "rms_norm", "swiglu"],
        ["glm4", "", "+1"],
        ["gpt2", "", "+1"],
        ["qwen3", "2 round_then_mul; one_plus", "+1"],
    ]


def test_every_other_site_has_its_reason_word_for_word() -> None:
    tables = _tables(document([_coverage("5.24.0", ROWS)], sites=False))
    assert tables["Refused"][1:] == [["swiglu", NASTY, "glm4.Glm4MLP, qwen3.Qwen3MLP"]]
    assert tables["Failed"][1:] == [["swiglu", "KeyError: 'gate'", "gpt2.GPT2MLP"]]


def test_sites_are_listed_one_by_one_if_asked_for() -> None:
    sites = _tables(document([_coverage("5.24.0", ROWS)], sites=True))["Sites"]
    assert [line[0] for line in sites[1:]] == sorted(row.name for row in ROWS)
    assert ["qwen3.Qwen3RMSNorm", "rms_norm", "patched", "round_then_mul"] in sites
    assert ["glm4.Glm4MLP", "swiglu", "refused", NASTY] in sites


def test_totals_have_a_line_for_each_version() -> None:
    older = _coverage("4.57.6", [row for row in ROWS if row.state == "patched"])
    text = document([_coverage("5.24.0", ROWS), older], sites=False)
    assert _tables(text)["Totals"] == [
        ["transformers", "families", "rms_norm", "swiglu", "patched", "not patched"],
        ["5.24.0", "3", "3", "0 +3", "3", "3"],
        ["4.57.6", "1", "3", "0", "3", "0"],
    ]
    assert text.index("## transformers 5.24.0") < text.index("## transformers 4.57.6")


def test_what_could_not_be_imported_is_named() -> None:
    coverage = _coverage("5.24.0", ROWS)
    coverage.not_imported = [{"module": "transformers.models.m.modeling_m", "reason": "ModuleNotFoundError: _x_"}]
    missing = _tables(document([coverage], sites=False))["Not imported"]
    assert missing[1:] == [["transformers.models.m.modeling_m", "ModuleNotFoundError: _x_"]]
