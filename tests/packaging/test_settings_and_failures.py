"""What goes wrong once models load stays ours: their import succeeds, and the report and one line say what happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import emulated
from virtual_environment import VirtualEnvironment


def test_a_module_with_one_unpatchable_site_is_left_whole_and_the_next_is_patched(
    with_models: VirtualEnvironment,
) -> None:
    program = """\
    import json
    import transformers.models.five9.modeling_five9 as five
    originals = [vars(cls)["forward"].__module__ for cls in five.ALL]
    print(json.dumps([
        set(originals) == {five.__name__}, [fused(cls) for cls in five.ALL],
        fused(family("qwen9").Qwen9RMSNorm), states(),
    ]))
    """
    done = emulated(with_models, program)
    untouched, of_five, of_next, found = json.loads(done.out)
    assert done.code == 0
    assert untouched and of_five == [0, 0, 0, 0, 0] and of_next == 1
    assert {state for name, state in found.items() if name.startswith("five9.")} == {"failed"}
    assert found["qwen9.Qwen9RMSNorm"] == "patched"
    (line,) = done.err.splitlines()
    assert "five9" in line and "the third norm does not take another forward" in line


def test_strict_raises_into_the_program(with_models: VirtualEnvironment) -> None:
    done = emulated(with_models, "family('five9')", NPU_AUTOPATCH_STRICT="1")
    assert done.code == 1 and "the third norm does not take another forward" in done.err


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"on": "rms_nrom"}, "'rms_nrom'"),
        ({"NPU_AUTOPATCH_BACKEND": "gpu"}, "'gpu'"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_line_and_then_off(
    with_models: VirtualEnvironment, variables: dict[str, str], named: str
) -> None:
    done = emulated(with_models, "print(fused(family('qwen9').Qwen9RMSNorm), finders())", **variables)
    assert (done.code, done.out) == (0, "0 0\n")
    (line,) = done.err.splitlines()
    assert line.startswith("npu_autopatch: off") and named in line


def test_a_kernel_that_cannot_be_imported_does_not_stop_the_model(
    with_models: VirtualEnvironment, tmp_path: Path
) -> None:
    where = "import importlib.util as u; from npu_autopatch import kernels as k; print(u.find_spec({}).origin)"
    for module, error in (
        ("k.REGISTRY['rms_norm']", "raise RuntimeError('in two\nlines')"),
        ("'npu_autopatch.emulator'", "raise SystemExit(3)"),
    ):
        file = Path(with_models.python("-c", where.format(module), on=None).out.strip())
        broken = with_models.copy(tmp_path / file.parent.name)
        broken.write(str(file.relative_to(with_models.site_packages)), error)
        done = emulated(broken, "print(fused(family('qwen9').Qwen9RMSNorm))")
        assert (done.code, done.out, len(done.err.splitlines())) == (0, "0\n", 1), done


def test_without_an_npu_every_site_is_refused_with_a_reason_and_computes_the_same(
    with_models: VirtualEnvironment,
) -> None:
    program = """\
    import npu_autopatch, torch
    torch.manual_seed(0)
    instance = family("qwen9").Qwen9Model()
    print(instance(torch.randn(2, 3, 16)).tolist())
    print(fused(instance), [(row.state, bool(row.reason)) for row in npu_autopatch.report().sites])
    """
    on = emulated(with_models, program, NPU_AUTOPATCH_BACKEND="npu")
    off = emulated(with_models, program, on=None)
    assert (on.code, off.code) == (0, 0), (on, off)
    assert on.out.splitlines() == [off.out.splitlines()[0], "0 [('refused', True)]"]


def test_a_site_of_another_name_is_found_and_one_of_another_signature_is_left(with_models: VirtualEnvironment) -> None:
    program = """\
    import torch
    model = family("skew9")
    print(fused(model.Skew9Scale), fused(model.Skew9RMSNorm, torch.ones(2, 3, 16), torch.ones(16)), states())
    """
    done = emulated(with_models, program)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("1 1 ") and "'skew9.Skew9Scale': 'patched'" in done.out
    assert "'skew9.Skew9RMSNorm': 'patched'" not in done.out


def test_the_report_is_written_at_exit_even_of_a_program_that_fails(
    with_models: VirtualEnvironment, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    done = emulated(with_models, "family('qwen9'); raise SystemExit(4)", NPU_AUTOPATCH_REPORT=str(path))
    assert (done.code, done.out, done.err) == (4, "", "")
    assert [site["state"] for site in json.loads(path.read_text())["sites"]] == ["patched"]


def test_a_report_that_cannot_be_written_is_one_line(with_models: VirtualEnvironment, tmp_path: Path) -> None:
    done = emulated(with_models, "family('qwen9')", NPU_AUTOPATCH_REPORT=str(tmp_path / "no" / "report.json"))
    assert (done.code, done.out, len(done.err.splitlines())) == (0, "", 1)


def test_at_the_usual_level_a_patched_process_says_one_line_and_one_without_models_none(
    with_models: VirtualEnvironment,
) -> None:
    done = emulated(with_models, "family('qwen9')", NPU_AUTOPATCH_LOG="info")
    assert (done.code, done.out, len(done.err.splitlines())) == (0, "", 1)
    emulated(with_models, "import transformers", NPU_AUTOPATCH_LOG="info").said("")
