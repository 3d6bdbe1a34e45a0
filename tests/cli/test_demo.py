"""`demo` trains twice and compares; what it accepts, and what it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_autopatch.cli import demo
from npu_autopatch.cli.demo import LIMIT, Run, judge
from npu_autopatch.cli.plot import plot

SITES = [{"module": "m", "name": "qwen3.Qwen3RMSNorm", "kernel": "rms_norm", "variant": "v", "state": "patched"}]


def test_both_trainings_agree_and_fused_ops_ran_in_the_second(command: Callable[..., object]) -> None:
    done = command("demo", "--steps", "3", "--backend", "emulate", "--json")
    assert done.code == 0, done
    found = json.loads(done.out)
    assert len(found["without"]["losses"]) == len(found["with"]["losses"]) == 3
    assert found["without"]["losses"][2] < found["without"]["losses"][0]
    assert found["largest_difference"] <= 1e-5 and found["problems"] == []
    assert "npu::npu_rms_norm" not in found["without"]["ops"]
    # three layers of four norms, and the last one; each with its backward
    assert found["with"]["ops"]["npu::npu_rms_norm"] == found["with"]["ops"]["npu::npu_rms_norm_backward"] == 13
    assert ("qwen3.Qwen3RMSNorm", "patched") in [(site["name"], site["state"]) for site in found["with"]["sites"]]


def test_the_screen_shows_curves_figures_and_sites_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    without, fused = Run([5.0, 4.0, 3.0], {}, 1.0), Run([5.0, 4.0, 3.00001], {"npu::npu_rms_norm": 13}, 2.0, SITES)
    demo._print("emulate", without, fused, judge(without, fused))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for words in ("5.000000", "3.000010", "largest difference 1.0e-05", "qwen3.Qwen3RMSNorm", "npu::npu_rms_norm 13"):
        assert words in out


@pytest.mark.parametrize(
    ("fused", "problem"),
    [
        (Run([5.0, 4.0], {}, 1.0, SITES), "no fused op ran"),
        (Run([5.0, 4.0], {"npu::attention": 3}, 1.0, SITES), "no fused op ran"),
        (Run([5.0, 4.0], {"npu::npu_rms_norm": 13}, 1.0, []), "no site was patched"),
        (Run([5.0, 4.0 + 2 * LIMIT], {"npu::npu_rms_norm": 13}, 1.0, SITES), "the losses differ by 2.0e-03"),
        (Run([5.0, float("nan")], {"npu::npu_rms_norm": 13}, 1.0, SITES), "the losses differ by nan"),
        (Run([5.0], {"npu::npu_rms_norm": 13}, 1.0, SITES), "2 and 1 steps"),
    ],
)
def test_a_comparison_that_shows_nothing_fails(fused: Run, problem: str) -> None:
    (said,) = judge(Run([5.0, 4.0], {"npu::attention": 3}, 1.0), fused)
    assert problem in said


def test_without_accelerate_it_says_what_to_install(command: Callable[..., object], tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys; sys.modules['accelerate'] = None\n")
    command("demo", folders=(hidden,)).refused("accelerate", "pip install 'npu-autopatch[demo]'")


def test_the_script_is_a_users_script() -> None:
    text = Path(demo.__file__).with_name("demo_train.py").read_text()
    assert not [line for line in text.splitlines() if "import" in line and "npu" in line]


def test_a_text_is_found_without_any_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(demo.licence().read_bytes()) > 8000
    monkeypatch.setattr(demo, "files", lambda package: None)
    assert len(demo.licence().read_bytes()) > 8000


def test_curves_are_told_apart_without_colour() -> None:
    drawn = plot([3.0, 2.0, 1.0], [3.0, 2.0, 2.0], width=3, height=3).splitlines()
    assert [line.partition("|")[2] for line in drawn[:3]] == ["#", " #+", "  o"]
    assert plot([1.0], [1.0]) and plot([2.0, 2.0], [2.0])
