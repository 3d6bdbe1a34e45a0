"""`report FILE`: the table, its filters, and what is no report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_autopatch.reporting import Report, Row

LONG = "vibevoice_acoustic_tokenizer.VibeVoiceAcousticTokenizerFeedForwardRMSNorm"
ROWS = [
    Row("transformers.models.qwen3.modeling_qwen3", "qwen3.Qwen3RMSNorm", "rms_norm", "round_then_mul", "patched"),
    Row("m", LONG, "rms_norm", "one_plus", "patched"),
    Row("m", "gpt2.GPT2RMSNorm", "rms_norm", "", "refused", "its own forward takes no root of a mean, as [said] " * 4),
    Row("m", "glm4.Glm4MLP", "swiglu", "", "failed", "Traceback (most recent call last):\n  x\nKeyError: 'gate'\n"),
    Row("m", "llama.LlamaRMSNorm", "", "", "foreign", "replaced by liger.LigerRMSNorm"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    Report(ROWS, {"backend": "emulate"}, {"torch": "2.13.0"}).write(str(tmp_path / "report.json"))
    return tmp_path / "report.json"


def test_the_table_holds_every_site_and_reason_in_80_columns(command: Callable[..., object], file: Path) -> None:
    done = command("report", file)
    assert (done.code, done.err) == (0, "") and done.columns <= 80
    assert all(row.name in done.out and row.variant in done.out for row in ROWS)
    assert "KeyError: 'gate'" in done.out and "Traceback" not in done.out
    assert done.out.count("[said]") == 4
    assert "5 of 5 sites: 2 patched, 1 refused, 1 failed, 1 foreign" in done.out


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        (("--state", "patched"), {0, 1}),
        (("--kernel", "swiglu"), {3}),
        (("--site", "qwen3*,*MLP"), {0, 3}),
        (("--site", "glm?"), {3}),
        (("--state", "refused", "--kernel", "rms_norm"), {2}),
        (("--state", "skipped"), set()),
    ],
)
def test_filters_leave_the_sites_asked_for(
    command: Callable[..., object], file: Path, filters: tuple[str, ...], left: set[int]
) -> None:
    table, passed = command("report", file, *filters), command("report", file, *filters, "--json")
    assert {number for number, row in enumerate(ROWS) if row.name in table.out} == left
    content = json.loads(passed.out)
    assert [site["name"] for site in content["sites"]] == [row.name for n, row in enumerate(ROWS) if n in left]
    assert sum(content["summary"].values()) == len(left)
    assert (table.code, passed.code) == (0, 0)


def test_json_passes_the_whole_report_through(command: Callable[..., object], file: Path) -> None:
    whole = {**json.loads(file.read_text()), "not_imported": [{"module": "m", "reason": "r"}]}
    file.write_text(json.dumps(whole))
    assert json.loads(command("report", file, "--json").out) == whole


def test_an_unknown_kernel_is_one_sentence(command: Callable[..., object], file: Path) -> None:
    command("report", file, "--kernel", "rmsnorm").refused("'rmsnorm'", "rms_norm", "swiglu")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "{}", '{"sites": 3}', '{"sites": [{"name": "x"}]}', "\ud800", '{"sites": [null]}']
)
def test_what_is_no_report_is_one_sentence(command: Callable[..., object], tmp_path: Path, text: str) -> None:
    (tmp_path / "other").write_text(text, errors="surrogatepass")
    command("report", "other").refused("other", "NPU_AUTOPATCH_REPORT")


def test_a_folder_is_one_sentence(command: Callable[..., object], tmp_path: Path) -> None:
    command("report", tmp_path).refused("directory", "NPU_AUTOPATCH_REPORT")
