"""`coverage --diff OLD.json`: what appeared, vanished, changed, and when that ends with 1."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from npu_autopatch.cli import coverage, main
from npu_autopatch.cli.coverage_report import Coverage
from npu_autopatch.reporting import Row

QWEN3, GLM4 = (f"transformers.models.{family}.modeling_{family}" for family in ("qwen3", "glm4"))
NORM = Row(QWEN3, "qwen3.Qwen3RMSNorm", "rms_norm", "round_then_mul", "patched")
MLP = Row(QWEN3, "qwen3.Qwen3MLP", "swiglu", "separate", "patched")
REFUSED = Row(QWEN3, "qwen3.Qwen3LayerNorm", "rms_norm", "", "refused", "it subtracts the mean: a layer norm")
GLM = Row(GLM4, "glm4.Glm4RMSNorm", "rms_norm", "fp32_mul", "patched")


def _whole(rows: list[Row], version: str, **changes: object) -> dict[str, object]:
    settings = {"backend": "emulate", "kernels": ["rms_norm", "swiglu"]}
    return {"sites": list(map(asdict, rows)), "versions": {"transformers": version}, "settings": settings, **changes}


@pytest.fixture
def diff(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., object]:
    """Exit code and stdout of `coverage --diff`; both sweeps are given, and the code of the transformers now."""

    def run(
        old: list[Row],
        new: list[Row],
        *arguments: str,
        then: str = "5.0.0",
        now: str = "5.24.0",
        code: str = "",
        not_imported: tuple[str, ...] = (),
        **changes: object,
    ) -> tuple[int, str]:
        for family in ("qwen3", "glm4"):
            file = tmp_path / "models" / family / f"modeling_{family}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(code)
        (tmp_path / "old.json").write_text(json.dumps(_whole(old, then, **changes)))
        missing = [{"module": name, "reason": "ModuleNotFoundError: No module named 'timm'"} for name in not_imported]
        found = Coverage(_whole(new, now), missing, "emulate", "as asked for")
        monkeypatch.setattr(coverage, "_package", lambda: tmp_path)
        monkeypatch.setattr(coverage, "sweep", lambda *_: found)
        monkeypatch.setenv("COLUMNS", "80")
        exit_code = main(["coverage", "--diff", str(tmp_path / "old.json"), *arguments])
        return exit_code, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ([NORM, MLP], [NORM, replace(MLP, state="refused", variant="", reason="its forward fails")], 1),
        ([NORM, MLP], [NORM, replace(MLP, state="failed", reason="Traceback\nKeyError: 3")], 1),
        ([NORM, MLP], [NORM, replace(MLP, variant="fused")], 0),
        ([NORM, REFUSED], [NORM, replace(REFUSED, reason="other words")], 0),
        ([NORM, REFUSED], [NORM, replace(REFUSED, state="patched", variant="one_plus", reason="")], 0),
        ([NORM, replace(REFUSED, state="foreign")], [NORM, REFUSED], 0),
        ([NORM], [NORM, REFUSED], 0),
        ([NORM, MLP], [NORM], 0),
        ([NORM, MLP], [NORM, MLP], 0),
    ],
)
def test_a_site_that_was_patched_and_no_longer_is_ends_with_1(
    diff: Callable[..., object], then: list[Row], now: list[Row], expected: int
) -> None:
    for arguments in ((), ("--json",), ("--markdown",)):
        assert diff(then, now, *arguments)[0] == expected
    code, out = diff(then, now)
    assert ("No longer patched 1\n  qwen3.Qwen3MLP" in out) == bool(code)


@pytest.mark.parametrize(
    ("now", "code", "not_imported", "fate", "expected"),
    [
        ("5.0.0", "class Qwen3MLP(nn.Module):\n", (), "still there, but not taken for a site", 1),
        ("5.24.0", "class Qwen3MLP(nn.Module):\n", (), "still there, but not taken for a site", 0),
        ("5.0.0", "class Qwen3MLPs:\n", (), "gone", 0),
        ("5.0.0", "class Qwen3MLP(nn.Module):\n", (QWEN3,), "its module was not imported", 0),
    ],
)
def test_what_vanished_from_the_same_transformers_although_it_is_there_ends_with_1(
    diff: Callable[..., object], now: str, code: str, not_imported: tuple[str, ...], fate: str, expected: int
) -> None:
    seen = diff([GLM, MLP], [GLM], now=now, code=code, not_imported=not_imported)
    assert seen[0] == expected and f"swiglu, was patched (separate): {fate}" in " ".join(seen[1].split())


def test_a_module_that_is_gone_is_said(diff: Callable[..., object]) -> None:
    other = replace(NORM, module="transformers.models.open_llama.modeling_open_llama")
    assert "was patched (round_then_mul): its module is gone" in " ".join(diff([other, MLP], [MLP])[1].split())


OLD = [NORM, MLP, REFUSED, replace(GLM, name="glm4.Glm4OldRMSNorm")]
NEW = [replace(NORM, variant="one_plus"), replace(MLP, state="refused", reason="it [clamps]"), REFUSED, GLM]


def test_the_table_holds_each_change_and_the_totals_in_80_columns(diff: Callable[..., object]) -> None:
    _, out = diff(OLD, NEW, "--refused", "--sites")
    lines = [line.split() for line in out.splitlines()]
    assert max(map(len, out.splitlines())) <= 80 and "transformers 5.0.0 -> 5.24.0" in out
    for total in ("rms_norm 2 -> 2 1 -> 1 1 1 1", "swiglu 1 -> 0 0 -> 1 - - 1", "total 3 -> 2 1 -> 2 1 1 2"):
        assert total.split() in lines
    said = " ".join(out.split())
    assert "qwen3.Qwen3MLP swiglu refused: separate; it [clamps] (was patched: separate)" in said
    assert "qwen3.Qwen3RMSNorm rms_norm patched: round_then_mul -> one_plus" in said
    assert "Appeared 1" in said and "glm4 1 patched Glm4RMSNorm rms_norm patched: fp32_mul" in said
    assert "Vanished 1 glm4.Glm4OldRMSNorm rms_norm, was patched (fp32_mul): gone" in said
    assert "Qwen3LayerNorm" not in said  # nothing changed


def test_without_a_change_it_says_so(diff: Callable[..., object]) -> None:
    code, out = diff(OLD, OLD)
    assert code == 0 and out.rstrip().endswith("no site differs")


def test_json_holds_each_change_with_both_sides(diff: Callable[..., object]) -> None:
    whole = json.loads(diff(OLD, NEW, "--json")[1])
    names = {kind: [change["name"] for change in whole[kind]] for kind in ("lost", "changed", "appeared", "vanished")}
    assert names == {
        "lost": ["qwen3.Qwen3MLP"],
        "changed": ["qwen3.Qwen3MLP", "qwen3.Qwen3RMSNorm"],
        "appeared": ["glm4.Glm4RMSNorm"],
        "vanished": ["glm4.Glm4OldRMSNorm"],
    }
    changed = whole["changed"][1]
    assert (changed["old"]["variant"], changed["new"]["variant"]) == ("round_then_mul", "one_plus")
    assert whole["vanished"][0]["new"] is None and whole["vanished"][0]["fate"] == "gone"
    assert [whole[side]["versions"]["transformers"] for side in ("old", "new")] == ["5.0.0", "5.24.0"]
    assert {"kernel": "swiglu", "state": "refused", "sites": 1} in whole["totals"]["new"]


def test_markdown_holds_each_change(diff: Callable[..., object]) -> None:
    tokens = MarkdownIt().enable("table").parse(diff(OLD, NEW, "--markdown", "--sites")[1])
    text = [
        "".join(child.content for child in token.children or ()).strip() for token in tokens if token.type == "inline"
    ]
    assert [text[n - 1] for n, token in enumerate(text) if token == "change"] == ["site"] * 3
    for name, words in (
        ("qwen3.Qwen3MLP", "swiglu refused: separate; it [clamps] (was patched: separate)"),
        ("qwen3.Qwen3RMSNorm", "rms_norm patched: round_then_mul -> one_plus"),
        ("glm4.Glm4OldRMSNorm", "rms_norm, was patched (fp32_mul): gone"),
    ):
        assert text[text.index(name) + 1] == words
    assert text[text.index("glm4.Glm4RMSNorm") :][:4] == ["glm4.Glm4RMSNorm", "rms_norm", "patched", "fp32_mul"]


def test_only_what_was_asked_for_now_is_compared(diff: Callable[..., object]) -> None:
    code, out = diff([NORM, GLM], [NORM], "--family", "qwen*", then="5.24.0", code="class Glm4RMSNorm:\n")
    assert code == 0 and "no site differs" in out and "families: * then, qwen* now" in out
    rope = replace(NORM, name="qwen3.apply_rotary_pos_emb", kernel="rope")
    _, out = diff([NORM, rope], [NORM], settings={"backend": "npu", "kernels": ["rms_norm", "rope"]})
    assert "no site differs" in out
    said = " ".join(out.split())
    assert "backend: npu then, emulate now" in said
    assert "kernels: rms_norm,rope then, rms_norm,swiglu now" in said


def test_bad_input_is_one_sentence(command: Callable[..., object], tmp_path: Path) -> None:
    asked = "npu-autopatch coverage --json"
    command("coverage", "--diff", "none.json").refused("none.json", asked)
    command("coverage", "--diff", "").refused(asked)
    for content in (
        "{",
        "[]",
        {},
        _whole([NORM], "5", versions=3),
        _whole([NORM], "5", not_imported=[{"module": "m"}]),
    ):
        (tmp_path / "bad.json").write_text(content if isinstance(content, str) else json.dumps(content))
        command("coverage", "--diff", "bad.json").refused("bad.json", asked)
        command("coverage", "--markdown", "bad.json").refused("bad.json", asked)
    (tmp_path / "good.json").write_text(json.dumps(_whole([NORM], "5")))
    command("coverage", "--diff", "good.json", "--markdown", "good.json").refused("--diff", "--markdown")
    command("coverage", "--json", "--markdown").refused("--json", "--markdown")
