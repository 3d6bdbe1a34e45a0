"""Settings: what each spelling of a wish means, and the sentence a wrong one gets."""

from __future__ import annotations

from pathlib import Path

import pytest

import npu_autopatch
from npu_autopatch.settings import Settings, SettingsError

KNOWN = ("rms_norm", "swiglu", "moe")


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("1", KNOWN),
        ("true", KNOWN),
        ("On", KNOWN),
        ("all", KNOWN),
        ("rms_norm", ("rms_norm",)),
        ("moe,rms_norm", ("rms_norm", "moe")),
        (" moe , rms_norm ,", ("rms_norm", "moe")),
        ("rms_norm,rms_norm", ("rms_norm",)),
        ("all,-moe", ("rms_norm", "swiglu")),
        ("-moe", ("rms_norm", "swiglu")),
        ("-moe,all", ("rms_norm", "swiglu")),
        ("rms_norm,moe,-moe", ("rms_norm",)),
    ],
)
def test_environment_and_arguments_mean_the_same(asked: str, chosen: tuple[str, ...]) -> None:
    from_environment = Settings.from_environment(KNOWN, {"NPU_AUTOPATCH": asked})
    assert from_environment.kernels == chosen
    assert Settings.of(KNOWN, kernels=asked) == from_environment


def test_lists_mean_what_strings_mean() -> None:
    assert Settings.of(KNOWN, ["moe", "rms_norm"], ["qwen3", "glm4*"]) == Settings.of(
        KNOWN, "moe,rms_norm", "qwen3,glm4*"
    )
    assert Settings.of(KNOWN, (name for name in ("all", "-moe"))) == Settings.of(KNOWN, "all,-moe")


def test_every_variable_is_read() -> None:
    variables = {
        "NPU_AUTOPATCH": "moe",
        "NPU_AUTOPATCH_SKIP": "qwen3.Qwen3MLP, glm4*",
        "NPU_AUTOPATCH_BACKEND": "Emulate",
        "NPU_AUTOPATCH_STRICT": "1",
        "NPU_AUTOPATCH_REPORT": "/somewhere/report.json",
        "NPU_AUTOPATCH_LOG": "DEBUG",
    }
    read = Settings.from_environment(KNOWN, variables)
    assert read == Settings(("moe",), ("qwen3.Qwen3MLP", "glm4*"), "emulate", True, "/somewhere/report.json", "debug")


@pytest.mark.parametrize("off", ["", "0", "false", "no", "off"])
def test_strict_is_off_where_it_says_so(off: str) -> None:
    assert not Settings.from_environment(KNOWN, {"NPU_AUTOPATCH": "1", "NPU_AUTOPATCH_STRICT": off}).strict


def test_defaults_patch_everything_on_the_npu() -> None:
    assert Settings.of(KNOWN) == Settings.from_environment(KNOWN, {}) == Settings(KNOWN)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"kernels": "rmsnorm"}, ["'rmsnorm'", *KNOWN]),
        ({"kernels": "all,-ropes"}, ["'-ropes'", *KNOWN]),
        ({"kernels": "-all"}, ["-all", *KNOWN]),
        ({"kernels": "all,-rms_norm,-swiglu,-moe"}, ["all,-rms_norm,-swiglu,-moe", *KNOWN]),
        ({"kernels": ""}, [*KNOWN]),
        ({"kernels": []}, [*KNOWN]),
        ({"kernels": None}, ["None", "rms_norm"]),
        ({"kernels": 3}, ["3", "rms_norm"]),
        ({"kernels": [None]}, ["None", "rms_norm"]),
        ({"backend": "cuda"}, ["'cuda'", "npu", "emulate"]),
        ({"backend": None}, ["None", "npu", "emulate"]),
        ({"skip": "qwen3 Qwen3MLP"}, ["'qwen3 Qwen3MLP'", "qwen3.Qwen3MLP"]),
        ({"skip": "qwen3[ab"}, ["'qwen3[ab'"]),
        ({"skip": ["a/b"]}, ["'a/b'"]),
        ({"skip": None}, ["None", "qwen3.Qwen3MLP"]),
        ({"skip": "@none/skip.txt"}, ["'none/skip.txt'", "No such file", "a pattern in each line"]),
        ({"skip": f"@{__file__}"}, ["skip pattern"]),
        ({"skip": ["@skip.txt"]}, ["'@skip.txt'"]),
        ({"skip": "qwen[]"}, ["'qwen[]'"]),
        ({"log_level": "loud"}, ["'loud'", "debug", "info", "warning"]),
    ],
)
def test_a_wrong_setting_is_one_sentence_that_names_the_choices(arguments: dict[str, object], names: list[str]) -> None:
    with pytest.raises(SettingsError) as raised:
        Settings.of(KNOWN, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
    assert [name for name in names if name not in str(raised.value)] == []


def test_the_environment_is_named_where_it_is_wrong() -> None:
    with pytest.raises(SettingsError, match=r"NPU_AUTOPATCH variables.*'cuda'.*npu or emulate"):
        Settings.from_environment(KNOWN, {"NPU_AUTOPATCH": "1", "NPU_AUTOPATCH_BACKEND": "cuda"})


@pytest.mark.parametrize("call", [npu_autopatch.enable, lambda **wrong: npu_autopatch.patched(**wrong).__enter__()])
def test_the_public_calls_refuse_with_the_same_sentence(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SettingsError, match=r"kernel 'nope' is unknown: choose .*all.*rms_norm"):
        call(kernels="nope")
    with pytest.raises(SettingsError, match="backend 'cuda' is unknown: choose npu or emulate"):
        call(backend="cuda")
    assert npu_autopatch.report().settings.get("active", False) is False


@pytest.mark.parametrize(
    ("pattern", "skipped"),
    [
        ("qwen3.Qwen3RMSNorm", True),
        ("qwen3", True),
        ("qwen*", True),
        ("*.Qwen3RMSNorm", True),
        ("*RMSNorm", True),
        ("qwen[34].*", True),
        ("qwen?", True),
        ("*", True),
        ("Qwen3RMSNorm", False),
        ("qwen3.qwen3rmsnorm", False),
        ("qwen3_next", False),
        ("qwe", False),
        ("llama, qwen3", True),
        ("[q]wen3", True),
        ("[!q]wen3", False),
        ("qwen3[.]Qwen3RMSNorm", True),
    ],
)
def test_skip_patterns_are_over_sites_and_families(pattern: str, skipped: bool) -> None:
    settings = Settings.of(KNOWN, skip=pattern)
    assert bool(settings.skips("qwen3.Qwen3RMSNorm")) is skipped
    assert settings.skips("qwen3.Qwen3RMSNorm") in ("", *settings.skip)


def test_a_file_has_a_pattern_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "skip, all.txt"
    file.write_text("qwen3.Qwen3RMSNorm\n\n  glm4*\na[,]b\n")
    settings = Settings.from_environment(KNOWN, {"NPU_AUTOPATCH_SKIP": f" @{file}"})
    assert settings.skip == ("qwen3.Qwen3RMSNorm", "glm4*", "a[,]b")
    assert settings.skips("a,b.Norm") and not settings.skips("qwen3.Qwen3MLP")
