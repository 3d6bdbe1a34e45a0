"""Other tools that hook start-up or imports act as they do without us, and we beside them, in any order."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from programs import emulated
from virtual_environment import VirtualEnvironment

QWEN9 = "transformers.models.qwen9.modeling_qwen9"
TOOLS = ("coverage", "autowrapt", "beartype", "typeguard", "opentelemetry-distro", "opentelemetry-instrumentation")

# Says that it ran, and whether norms are fused, in a file that any launcher can start.
PROGRAM = """\
import sys
sys.path.insert(0, {site_packages!r})
from observing import *
print("fused", fused(family("qwen9").Qwen9RMSNorm), finders())
"""


@pytest.fixture(scope="module")
def with_tools(with_models: VirtualEnvironment, tmp_path_factory: pytest.TempPathFactory) -> VirtualEnvironment:
    """Models, and tools with hooks of their own, among them a patch of the same model by an autowrapt entry point."""
    environment = with_models.copy(tmp_path_factory.mktemp("with_tools") / "venv")
    environment.pip("install", *TOOLS)
    environment.write("qwen9_tool.py", "def hook(module):\n    print('autowrapt', module.__name__)\n")
    environment.write("qwen9_tool-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: qwen9-tool\nVersion: 1\n")
    environment.write("qwen9_tool-1.dist-info/entry_points.txt", f"[qwen9.hooks]\n{QWEN9} = qwen9_tool:hook\n")
    return environment


@pytest.mark.parametrize("first", ["wrapt's finder in front", "ours in front"])
def test_a_wrapt_post_import_hook_on_the_same_model(with_models: VirtualEnvironment, first: str) -> None:
    program = f"""\
    import importlib.machinery, sys, wrapt
    called = []
    wrapt.register_post_import_hook(lambda module: called.append(module.__name__), "{QWEN9}")
    if "{first}" == "ours in front":
        ours = next(f for f in sys.meta_path if type(f).__name__ == "ModelingFinder")
        sys.meta_path.remove(ours), sys.meta_path.insert(0, ours)
    print(type(sys.meta_path[0]).__name__)
    model = family("qwen9")
    print(called, fused(model.Qwen9RMSNorm), len(states()))
    print(type(model.__loader__) is type(model.__spec__.loader) is importlib.machinery.SourceFileLoader)
    """
    front = "ModelingFinder" if first == "ours in front" else "ImportHookFinder"
    emulated(with_models, program).said(f"{front}\n['{QWEN9}'] 1 1\nTrue\n")


def test_a_wrapt_wrapper_on_a_norm_is_another_patch_and_left_alone(with_models: VirtualEnvironment) -> None:
    program = f"""\
    import sys, wrapt
    called = []

    def wrapper(wrapped, instance, args, kwargs):
        called.append(1)
        return wrapped(*args, **kwargs)

    @wrapt.when_imported("{QWEN9}")
    def patch(module):
        wrapt.wrap_function_wrapper(module, "Qwen9RMSNorm.forward", wrapper)

    model = family("qwen9")
    count = fused(model.Qwen9RMSNorm)
    print(len(called), count, states())
    """
    done = emulated(with_models, program)
    assert (done.code, done.err) == (0, "")
    # Whoever came second wraps or respects the first; either way the tool's wrapper is called once a call.
    assert done.out in ("1 0 {'qwen9.Qwen9RMSNorm': 'foreign'}\n", "1 1 {'qwen9.Qwen9RMSNorm': 'patched'}\n")


def test_pytests_assertion_rewriting_of_tests_and_of_models(with_models: VirtualEnvironment, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\npytest.register_assert_rewrite('transformers.models.qwen9')\n"
    )
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""\
        from observing import *
        from _pytest.assertion.rewrite import AssertionRewritingHook
        def test_fused():
            model = family("qwen9")
            assert isinstance(model.__loader__, AssertionRewritingHook)
            assert fused(model.Qwen9RMSNorm) == 1
        def test_rewriting():
            left, right = [1, 2], [1, 3]
            assert left == right
        """)
    )
    done = with_models.python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path, NPU_AUTOPATCH_BACKEND="emulate"
    )
    assert "1 failed, 1 passed" in done.out, done
    assert "At index 1 diff: 2 != 3" in done.out  # which only a rewritten assert says


def test_typeguard_on_the_same_model(with_tools: VirtualEnvironment) -> None:
    program = """\
    import typeguard
    typeguard.install_import_hook(["transformers.models.qwen9"])
    import json.tool
    model = family("qwen9")
    print(type(model.__loader__).__name__, fused(model.Qwen9RMSNorm))
    """
    emulated(with_tools, program).said("TypeguardLoader 1\n")


def test_beartype_on_the_same_model(with_tools: VirtualEnvironment) -> None:
    program = """\
    from beartype.claw import beartype_package
    beartype_package("transformers.models.qwen9")
    model = family("qwen9")
    print("Beartype" in type(model.__loader__).__name__, fused(model.Qwen9RMSNorm))
    """
    emulated(with_tools, program).said("True 1\n")


@pytest.fixture
def program(with_tools: VirtualEnvironment, tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(site_packages=str(with_tools.site_packages)))
    return path


def test_autowrapt(with_tools: VirtualEnvironment, program: Path) -> None:
    done = with_tools.python(
        program, AUTOWRAPT_BOOTSTRAP="qwen9.hooks", NPU_AUTOPATCH_BACKEND="emulate", NPU_AUTOPATCH_LOG="warning"
    )
    done.said(f"autowrapt {QWEN9}\nfused 1 1\n")


def test_coverage_as_command_and_at_start_up(with_tools: VirtualEnvironment, program: Path, tmp_path: Path) -> None:
    settings = {"NPU_AUTOPATCH_BACKEND": "emulate", "NPU_AUTOPATCH_LOG": "warning"}
    config = tmp_path / "coveragerc"
    config.write_text(f"[run]\ndata_file = {tmp_path / 'data'}\nsource_pkgs = transformers\n")
    by_command = with_tools.python("-m", "coverage", "run", f"--rcfile={config}", program, **settings)
    by_command.said("fused 1 1\n")
    (tmp_path / "data").unlink()
    at_start = with_tools.python(program, COVERAGE_PROCESS_START=str(config), **settings)
    assert (at_start.code, at_start.out) == (0, "fused 1 1\n")
    assert "modeling_qwen9.py" in with_tools.python("-m", "coverage", "report", f"--rcfile={config}", on=None).out


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_opentelemetry_instrument_and_run(
    with_tools: VirtualEnvironment, program: Path, order: str, tmp_path: Path
) -> None:
    program.write_text(
        program.read_text() + "print('opentelemetry.instrumentation.auto_instrumentation' in sys.modules)"
    )
    run = '-c "import sys; from npu_autopatch.cli.run import run; sys.exit(run(sys.argv[1:]))"'
    instrument = tmp_path / "instrument.py"  # what the command opentelemetry-instrument is
    instrument.write_text("from opentelemetry.instrumentation.auto_instrumentation import run; run()\n")
    if order == "inside":
        command = f"python {instrument} python {run} {program}"
    else:
        command = f"python {run} {instrument} python {program}"
    done = with_tools.shell(
        command,
        NPU_AUTOPATCH_BACKEND="emulate",
        OTEL_TRACES_EXPORTER="none",
        OTEL_METRICS_EXPORTER="none",
        OTEL_LOGS_EXPORTER="none",
        NPU_AUTOPATCH_LOG="warning",
    )
    assert (done.code, done.out.splitlines()) == (0, ["fused 1 1", "True"]), done


def test_everything_at_once(with_tools: VirtualEnvironment, program: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('sitecustomize')\n")
    config = tmp_path / "coveragerc"
    config.write_text(f"[run]\ndata_file = {tmp_path / 'data'}\n")
    done = with_tools.python(
        "-c",
        "import sys; from npu_autopatch.cli.run import run; sys.exit(run(sys.argv[1:]))",
        program,
        PYTHONPATH=str(tmp_path),
        AUTOWRAPT_BOOTSTRAP="qwen9.hooks",
        COVERAGE_PROCESS_START=str(config),
        NPU_AUTOPATCH_BACKEND="emulate",
        NPU_AUTOPATCH_LOG="warning",
    )
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == ["sitecustomize", "sitecustomize", f"autowrapt {QWEN9}", "fused 1 1"]
    assert (tmp_path / "data").exists()
