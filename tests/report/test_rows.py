"""The report: every norm has a row, every row says what happened and why, for people and for programs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.qwen3_next import modeling_qwen3_next

import npu_autopatch
from npu_autopatch.kernels import load
from npu_autopatch.patcher import PatchError
from npu_autopatch.reporting import STATES, Report, Row

FAMILIES = (
    "llama",
    "t5",
    "mamba2",
    "cohere2",
    "gemma3n",
    "deepseek_v3",
    "glm4",
    "zamba2",
    "llama4",
    "olmo2",
    "idefics3",
    "qwen2",
)


def rows_of(module: Any, report: Any = None) -> dict[str, Row]:
    sites = (report or npu_autopatch.report()).sites
    return {row.name: row for row in sites if row.module == module.__name__ and not row.name.endswith("(instance)")}


@pytest.fixture(scope="module")
def patched() -> dict[str, tuple[dict[str, Row], dict[str, bool]]]:
    """The rows of each family, and of each whether something of ours stood there, from one patch of them all."""
    modules = {f: importlib.import_module(f"transformers.models.{f}.modeling_{f}") for f in FAMILIES}
    found = {}
    with npu_autopatch.patched(backend="emulate") as report:
        for family, module in modules.items():
            rows, ours = rows_of(module, report), {}
            for name in rows:
                thing = getattr(module, name.partition(".")[2])
                values = list(vars(thing).values()) if isinstance(thing, type) else [thing]
                ours[name] = any(hasattr(value, "__npu_autopatch__") for value in values)
            found[family] = rows, ours
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rms_norm_of_a_module_has_a_row(family: str, patched: Any) -> None:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    norms = {
        f"{family}.{cls.__name__}"
        for cls in own
        if issubclass(cls, torch.nn.Module)
        and "rmsnorm" in cls.__name__.lower().replace("_", "")
        and "forward" in vars(cls)
    }
    rows, ours = patched[family]
    assert rows
    assert norms - rows.keys() == set()
    for name, row in rows.items():
        assert row.kernel == "rms_norm" or name not in norms
        assert (row.state == "patched") == ours[name]
        assert (row.state == "patched") == bool(row.variant)
        # other tests hold functions they compare with
        assert (row.state == "patched") == (not row.reason or row.reason.startswith("not reached where"))
        assert row.state in ("patched", "refused")


def test_json_has_every_site_and_the_surroundings() -> None:
    with npu_autopatch.patched(backend="emulate", skip="gemma2"):
        whole = json.loads(npu_autopatch.report().to_json())
    assert {site["name"]: site["state"] for site in whole["sites"]}["gemma2.Gemma2RMSNorm"] == "skipped"
    assert whole.keys() == {"sites", "summary", "settings", "versions"}
    texts = {"module", "name", "kernel", "variant", "state", "reason"}
    assert all(site.keys() == {*texts, "ended"} for site in whole["sites"])
    assert all(isinstance(site[name], str) for site in whole["sites"] for name in texts)
    assert all(isinstance(site["ended"], bool) for site in whole["sites"])
    assert whole["summary"].keys() == {*STATES, "ended"}
    assert sum(whole["summary"].values()) == len(whole["sites"])
    assert whole["settings"] == {
        "kernels": list(whole["settings"]["kernels"]),
        "skip": ["gemma2"],
        "backend": "emulate",
        "strict": False,
        "trace": False,
        "report_path": "",
        "log_level": "info",
        "active": True,
    }
    assert "rms_norm" in whole["settings"]["kernels"]
    assert whole["versions"].keys() >= {"npu-autopatch", "transformers", "torch", "torch_npu", "wrapt"}
    assert (
        whole["versions"]["torch"] == torch.__version__.partition("+")[0]
        or whole["versions"]["torch"] == torch.__version__
    )


def test_a_skipped_site_names_the_pattern() -> None:
    with npu_autopatch.patched(backend="emulate", skip=["qwen3_next.*Gated", "gemma2"]):
        rows = rows_of(modeling_qwen3_next) | rows_of(modeling_gemma2)
        assert not hasattr(modeling_gemma2.Gemma2RMSNorm.forward, "__npu_autopatch__")
    states = {name: row.state for name, row in rows.items() if row.kernel == "rms_norm"}
    assert states == {
        "qwen3_next.Qwen3NextRMSNormGated": "skipped",
        "qwen3_next.Qwen3NextRMSNorm": "patched",
        "gemma2.Gemma2RMSNorm": "skipped",
    }
    assert "qwen3_next.*Gated" in rows["qwen3_next.Qwen3NextRMSNormGated"].reason
    assert "gemma2" in rows["gemma2.Gemma2RMSNorm"].reason


def llama(report: Any) -> tuple[dict[str, tuple[str, bool]], str]:
    """State and end of the sites of one family, by their kernels; and the summary."""
    rows = [row for row in report.sites if row.name.startswith("llama.") and "(instance)" not in row.name]
    return {row.kernel: (row.state, row.ended) for row in rows}, report.summary()


def test_a_block_tells_of_what_is_patched_now_and_the_report_of_what_ended_too() -> None:
    importlib.import_module("transformers.models.llama.modeling_llama")
    with npu_autopatch.patched("rms_norm", backend="emulate") as first:
        pass
    with npu_autopatch.patched("rope", backend="emulate", skip="gemma2") as second:
        during = npu_autopatch.report()
    after = npu_autopatch.report()
    assert llama(first)[0] == {"rms_norm": ("patched", False)}
    assert llama(second)[0] == {"rope": ("patched", False)} and "ended" not in llama(second)[1]
    both = {"rms_norm": ("patched", True), "rope": ("patched", False)}
    assert llama(during)[0].items() >= both.items() and f", {during.ended} ended" in during.summary()
    assert set(llama(after)[0].values()) == {("patched", True)} and llama(after)[0].keys() >= both.keys()
    assert after.summary().startswith("not active any more: ") and "rope" in after.summary()
    assert after.count("patched") == 0 < after.ended == len(after.sites)
    assert "rope patched, ended " in str(after) and "rope patched, ended" not in str(second)
    assert all(site["ended"] for site in json.loads(after.to_json())["sites"])


def test_what_an_outer_block_keeps_has_not_ended() -> None:
    importlib.import_module("transformers.models.llama.modeling_llama")
    outer = npu_autopatch.patched(["rms_norm", "swiglu"], backend="emulate", skip="*MLP")
    with outer:
        with npu_autopatch.patched(backend="emulate"):
            assert set(llama(npu_autopatch.report())[0].values()) == {("patched", False)}
        states = llama(npu_autopatch.report())[0]
    assert states == {"rms_norm": ("patched", False), "swiglu": ("skipped", False), "rope": ("patched", True)}


def test_what_disable_ends_is_still_in_the_report_at_exit(python: Any, tmp_path: Path) -> None:
    program = """
        from transformers.models.llama import modeling_llama
        import npu_autopatch
        npu_autopatch.disable()
    """
    settings = {"NPU_AUTOPATCH": "1", "NPU_AUTOPATCH_BACKEND": "emulate"}
    done = python(program, started=True, NPU_AUTOPATCH_REPORT="report.json", **settings)
    assert done.returncode == 0 and "npu_autopatch: not active any more: 3 sites patched (" in done.stderr, done
    sites = json.loads((tmp_path / "report.json").read_text())["sites"]
    found = {site["kernel"]: (site["state"], site["ended"]) for site in sites}
    assert found == dict.fromkeys(("rms_norm", "swiglu", "rope"), ("patched", True))


def test_a_model_without_rms_norms_is_left_alone_without_a_row(
    tiny_model: Any, tokens: Any, fused_calls: Any, capfd: Any
) -> None:
    def forwards() -> dict[str, Any]:
        return {name: getattr(value, "forward", value) for name, value in vars(modeling_gpt2).items()}

    before = forwards()
    model = tiny_model("GPT2")
    expected = model(tokens).logits
    capfd.readouterr()
    with npu_autopatch.patched(backend="emulate"):
        with fused_calls() as count:
            assert torch.equal(model(tokens).logits, expected)
        assert rows_of(modeling_gpt2) == {}
        assert forwards() == before
    assert count == {}
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def broken_at_the_third_site(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[bool], list[str]]:
    """A modeling module with four norms, the third of which the kernel fails to prove; whether; what it was asked."""
    module = importlib.import_module("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
    kernel = type(load("rms_norm"))
    prove, failing, order = kernel.prove, [True], []

    def fail_at_the_third(self: Any, site: Any, devices: Any) -> Any:
        if site.module == module.__name__:
            order.append(site.name)
            if failing[0] and len(order) == 3:
                raise ZeroDivisionError("of the kernel")
        return prove(self, site, devices)

    monkeypatch.setattr(kernel, "prove", fail_at_the_third)
    return module, failing, order


def test_a_kernel_that_fails_leaves_its_module_whole_and_raises_when_explicit(broken_at_the_third_site: Any) -> None:
    module, failing, order = broken_at_the_third_site
    before = {name: vars(cls)["forward"] for name, cls in vars(module).items() if "RMSNorm" in name}
    with pytest.raises(PatchError, match=r"modeling_qwen3_omni_moe was not patched and is as it was") as raised:
        npu_autopatch.enable(backend="emulate")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert len(order) == 3
    assert {name: vars(cls)["forward"] for name, cls in vars(module).items() if "RMSNorm" in name} == before
    rows = rows_of(module)
    assert [rows[name].state for name in order] == ["failed"] * 3
    assert "Traceback (most recent call last)" in rows[order[2]].reason
    assert rows[order[2]].reason.strip().endswith("ZeroDivisionError: of the kernel")
    assert rows[order[0]].reason == f"rolled back with its module, because of {order[2]}"
    assert not hasattr(modeling_gemma2.Gemma2RMSNorm.forward, "__npu_autopatch__")  # enable did not take place at all
    failing[0] = False
    with npu_autopatch.patched(backend="emulate"):
        rows = rows_of(module).values()
        assert [row.state for row in rows if row.kernel == "rms_norm"] == ["patched"] * 4


def test_the_table_fits_80_columns_and_keeps_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "its forward takes (hidden_states: Tensor, gate: Tensor, residual), not an input and at most a gate"
    rows = [
        Row("m", "qwen3_next.Qwen3NextRMSNormGated", "rms_norm", "gated_post_silu", "patched"),
        Row("m", "some_very_long_family.SomeVeryLongFamilyVisionRMSNorm", "rms_norm", "", "refused", reason),
        Row(
            "m",
            "x.Y",
            "rms_norm",
            "",
            "failed",
            "Traceback (most recent call last):\n  ...\nKeyError: '[bold]a[/bold]'\n",
        ),
        Row("m", "x.Z", "rms_norm", "", "skipped", "by the pattern [xy]* of NPU_AUTOPATCH_SKIP or skip="),
        Row("m", "x.F", "", "", "foreign", "already patched by liger_kernel.transformers.monkey_patch"),
    ]
    monkeypatch.setenv("COLUMNS", "80")
    text = str(Report(rows))
    assert max(map(len, text.splitlines())) <= 80
    squeezed = "".join(text.split())
    for state in STATES:
        assert state in text
    for word in ("gated_post_silu", "rms_norm", "KeyError: '[bold]a[/bold]'", "[xy]*"):
        assert "".join(word.split()) in squeezed
    assert "1 sites patched (rms_norm 1), 1 refused, 1 skipped, 1 failed, 1 foreign" in " ".join(text.split())


def test_str_is_the_table_and_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with npu_autopatch.patched(backend="emulate", skip="gemma2") as report:
        text = str(report)
    assert "qwen3_next.Qwen3NextRMSNorm" in text
    assert report.summary() in text
    assert "\x1b" not in text


def test_enabled_and_nothing_patched_is_a_line_of_its_own() -> None:
    enabled = {"backend": "npu"}
    nothing = "enabled, but nothing was patched: no site was found in the modeling modules imported so far"
    assert Report(settings=enabled).summary() == nothing
    assert Report().summary() == "not enabled: set NPU_AUTOPATCH=1, or call npu_autopatch.enable()"
    refused = [Row("m", f"x.N{i}", "rms_norm", "", "refused", "torch_npu is not installed") for i in range(3)]
    all_refused = "enabled, but nothing was patched: 3 of 3 sites torch_npu is not installed"
    assert Report(refused, enabled).summary() == all_refused
    assert "x.N0: torch_npu is not installed" in Report(refused[:1], enabled).summary()


def test_each_rank_of_a_launcher_writes_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)  # as torchrun sets it
        npu_autopatch.report().write(str(tmp_path / "report-{rank}.json"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report-0.json", "report-3.json"]


def test_the_report_file_is_whole_and_one_a_process(tmp_path: Path) -> None:
    import os

    report = Report([Row("m", "x.N", "rms_norm", "t5", "patched")])
    report.write(str(tmp_path / "report-{pid}.json"))
    (file,) = tmp_path.iterdir()
    assert file.name == f"report-{os.getpid()}.json"
    assert json.loads(file.read_text())["sites"][0]["name"] == "x.N"
