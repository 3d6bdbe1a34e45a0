"""`ops` tells the operators of torch_npu: as registered, from its files, or from our own table."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_autopatch import emulator
from npu_autopatch.cli import ops_table, ops_wheel
from npu_autopatch.kernels import REGISTRY

from .conftest import PROJECT, WITH_TWO_DEVICES, WITHOUT_CANN

TABLE = ops_table.table()

DOCUMENTATION = '''
import torch_npu

raise SystemExit("this file is read, and never run")
_add_torch_npu_docstr(
    "npu_rms_norm",
    """
torch_npu.npu_rms_norm(self, gamma)
功能描述
Normalises, [says] the wheel.
""",
)
_add_torch_npu_docstr("npu_of_tomorrow", "功能描述 a gizmo")
'''
SCHEMAS = """\
backend: NPU
custom:
- func: npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)
  op_api: all_version
- dispatch:
    CompositeExplicitAutograd: x
  func: npu_of_tomorrow(Tensor self, *, int[2] sizes=[1, 2]) -> Tensor
- func: npu_of_tomorrow.out(Tensor self, *, Tensor(a!) out) -> Tensor(a!)
- func: npu_swiglu(Tensor self, int dim=-1, int of_tomorrow=0) -> Tensor
supported:
- func: abs(Tensor self) -> Tensor
"""


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def without_cann(torch_npu: Callable[[str], Path]) -> Path:
    """A folder with a torch_npu that has the files of the real one, and cannot be imported."""
    folder = torch_npu(WITHOUT_CANN)
    schemas = folder / "torch_npu" / "csrc" / "aten"
    schemas.mkdir(parents=True)
    (schemas / "npu_native_functions_by_codegen.yaml").write_text(SCHEMAS)
    (folder / "torch_npu" / "_op_plugin_docs.py").write_text(DOCUMENTATION)
    return folder


def test_without_torch_npu_our_table_is_shown_as_a_snapshot(command: Callable[..., Any]) -> None:
    done = command("ops", "show", "npu_grouped_matmul")
    assert (done.code, done.err) == (0, "") and done.columns <= 80
    words = flat(done.out)
    assert "torch_npu is not installed: this is our own table, a snapshot of torch_npu 2.1.0.post8 to 2.14.0" in words
    assert "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None" in words
    assert "npu_grouped_matmul.List(" in words and "(from our table)" in words
    assert "gradient no (from our table)" in words and "rows past the last group are uninitialised" in words
    assert "output_dtype is int?=None, was ScalarType?=None" in words
    assert "used by kernel moe:" in words and "emulated by the backend emulate" in words
    assert "Documentation" not in done.out


def test_the_list_names_every_operator_of_the_table_once(command: Callable[..., Any]) -> None:
    done = command("ops", "list")
    assert (done.code, done.err) == (0, "") and done.columns <= 80
    named = [line.split()[0] for line in done.out.splitlines() if line.startswith("  ") and line[2] != " "]
    assert sorted(named) == sorted({name.partition(".")[0] for name in TABLE.entries})
    assert "Used by a kernel 16" in done.out and "rms_norm: RMS norm; gradient" in done.out
    assert "Others" not in done.out


def test_what_cannot_be_imported_is_read_as_text(command: Callable[..., Any], without_cann: Path) -> None:
    done = command("ops", "show", "npu_rms_norm", folders=(without_cann,))
    assert (done.code, done.err) == (0, "") and done.columns <= 80
    words = flat(done.out)
    assert "torch_npu 2.13.0 cannot be imported here (ImportError: libhccl.so: cannot open" in words
    assert "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)" in words
    assert "(from the files of torch_npu)" in words and "gradient yes (from our table): of x" in words
    assert "any train we know" not in words
    assert "Normalises, [says] the wheel." in done.out and "功能描述" in done.out
    plain = command("ops", "show", "npu_rms_norm", folders=(without_cann,), PYTHONIOENCODING="ascii")
    assert (plain.code, plain.err) == (0, "") and "????" in plain.out

    found = json.loads(command("ops", "list", "--json", folders=(without_cann,)).out)
    assert found["torch_npu"] == "2.13.0" and "libhccl.so" in found["not_imported"]
    ops = {op["name"]: op for op in found["ops"]}
    assert {name for name, op in ops.items() if op["installed"]} == {"npu_rms_norm", "npu_of_tomorrow", "npu_swiglu"}
    assert "abs" not in ops and not ops["npu_geglu"]["installed"]
    tomorrow = ops["npu_of_tomorrow"]
    assert [len(tomorrow["signatures"]), tomorrow["differentiable"], tomorrow["documented"]] == [2, None, True]
    assert tomorrow["signatures"][0] == "npu_of_tomorrow(Tensor input, *, int[2] sizes=[1, 2]) -> Tensor"


def test_a_signature_we_do_not_know_is_said_to_be_one(command: Callable[..., Any], without_cann: Path) -> None:
    shown = flat(command("ops", "show", "npu_swiglu", folders=(without_cann,)).out)
    assert "npu_swiglu is not as in any train we know" in shown


def test_what_is_registered_comes_before_our_table(
    command: Callable[..., Any], torch_npu: Callable[[str], Path]
) -> None:
    code = WITH_TWO_DEVICES.replace('library.impl("npu_swiglu", lambda *_: None, "AutogradPrivateUse1")\n', "")
    folder = torch_npu(code + "print('a torch_npu may print')\n")
    found = json.loads(command("ops", "list", "--json", folders=(folder,)).out)
    ops = {op["name"]: op for op in found["ops"]}
    assert found["not_imported"] is None
    assert {name for name, op in ops.items() if op["installed"]} == {
        "npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_grouped_matmul", "npu_moe_token_permute",
        "npu_moe_token_unpermute",
    }  # fmt: skip
    assert ops["npu_rms_norm"]["signatures"] == [
        "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)"
    ]
    for name, differentiable in (("npu_rms_norm", True), ("npu_swiglu", False)):
        assert ops[name]["differentiable"] is differentiable and ops[name]["differentiable_from"] == "registration"

    shown = command("ops", "show", "npu_geglu", folders=(folder,))
    assert shown.code == 0 and "torch_npu 2.13.0 has no such operator" in flat(shown.out)


def test_a_gradient_is_told_of_an_op_that_has_overloads_only(
    command: Callable[..., Any], torch_npu: Callable[[str], Path]
) -> None:
    code = (
        WITH_TWO_DEVICES
        + """
for op in ("npu_one.Tensor", "npu_one.Scalar", "npu_other.Tensor"):
    library.define(f"{op}(Tensor self{', int n' if 'Scalar' in op else ''}) -> Tensor")
    library.impl(op, lambda *_: None, "AutogradPrivateUse1") if op == "npu_one.Scalar" else None
"""
    )
    folder = torch_npu(code)
    ops = {op["name"]: op for op in json.loads(command("ops", "list", "--json", folders=(folder,)).out)["ops"]}
    for name, differentiable in (("npu_one", True), ("npu_other", False)):
        assert (ops[name]["differentiable"], ops[name]["differentiable_from"]) == (differentiable, "registration")
    assert "gradient unknown" not in command("ops", "list", folders=(folder,)).out


def test_the_gradient_of_an_older_torch_npu_is_that_of_its_train() -> None:
    permute = TABLE.entries["npu_moe_token_permute"]
    assert (permute.since, permute.differentiable_since) == ("2025-07", "2025-10")
    assert (TABLE.train("2.6.0"), TABLE.train("2.13.0+git1"), TABLE.train("3.0")) == ("2025-07", "2026-10", "")


@pytest.mark.parametrize("spelled", ["rms_norm", "torch_npu.npu_rms_norm", "torch.ops.npu.npu_rms_norm.default"])
def test_a_name_is_found_as_code_spells_it(command: Callable[..., Any], spelled: str) -> None:
    found = json.loads(command("ops", "show", spelled, "--json").out)
    assert (found["name"], found["torch_npu"], found["installed"]) == ("npu_rms_norm", None, None)
    assert found["known"][0]["used_by"] == ["rms_norm"] and found["documentation"] == ""


def test_an_unknown_name_is_one_sentence_with_close_ones(command: Callable[..., Any]) -> None:
    command("ops", "show", "npu_groupd_matmul").refused("'npu_groupd_matmul'", "npu_grouped_matmul")
    command("ops", "show", "xyzzy").refused("'xyzzy'", "npu-autopatch ops list")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), ("list|show|search",)),
        (("lst",), ("'lst'", "list", "show", "search")),
        (("show",), ("NAME",)),
        (("list", "--jso"), ("'--jso'", "--json")),
        (("search",), ("WORD",)),
        (("search", " "), ("word",)),
    ],
)
def test_bad_input_names_the_valid_choices(
    command: Callable[..., Any], arguments: tuple[str, ...], named: tuple[str, ...]
) -> None:
    command("ops", *arguments).refused(*named)


def test_a_search_wants_all_words_and_puts_names_first(command: Callable[..., Any], without_cann: Path) -> None:
    found = json.loads(command("ops", "search", "Softmax", "gating", "--json").out)
    names = [op["name"] for op in found["ops"]]
    assert names[:2] == ["npu_moe_gating_top_k_softmax", "npu_moe_gating_top_k_softmax_v2"]
    assert "npu_moe_gating_top_k" in names[2:] and "npu_swiglu" not in names

    documented = command("ops", "search", "GIZMO", folders=(without_cann,))
    assert "npu_of_tomorrow" in documented.out and "1 of 102 operators have gizmo" in documented.out
    nothing = command("ops", "search", "xyzzy")
    assert (nothing.code, nothing.err) == (0, "") and "0 of 101 operators have xyzzy" in nothing.out


@pytest.mark.parametrize("action", ["list", "show", "search"])
def test_each_action_has_a_help_with_an_example(command: Callable[..., Any], action: str) -> None:
    done = command("ops", action, "--help")
    assert (done.code, done.err) == (0, "") and done.columns <= 80
    assert f"example: npu-autopatch ops {action}" in done.out and "--json" in done.out


def test_files_that_are_not_there_or_no_code_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise ImportError")
    (tmp_path / "torch_npu" / "_op_plugin_docs.py").write_text("no python at all")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    found = ops_wheel.read()
    assert found is not None and not found.signatures and not found.documentation


def calls() -> Iterator[tuple[str, str, int, list[str]]]:
    """Of each call of an op in `npu_autopatch.ops`: the module, the op, and the arguments passed."""
    for file in sorted((PROJECT / "npu_autopatch" / "ops").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="detect"), args=[ast.Constant(value=op), ast.Tuple() as names]):
                    yield file.stem, op, 0, list(ast.literal_eval(names))
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=op), attr="default")):
                    yield file.stem, op, len(node.args), [str(keyword.arg) for keyword in node.keywords]
                case ast.Attribute(value=ast.Attribute(attr="npu"), attr=op) if op.startswith("npu_"):
                    yield file.stem, op, 0, []


def uses() -> dict[str, set[str]]:
    """The kernels that import each module of `npu_autopatch.ops`, by the module's name."""
    found: dict[str, set[str]] = {}
    for kernel, module in REGISTRY.items():
        place = PROJECT / Path(*module.split("."))
        for file in [*place.rglob("*.py"), *place.parent.glob(f"{place.name}.py")]:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("npu_autopatch.ops"):
                    last = str(node.module).removeprefix("npu_autopatch.ops").lstrip(".")
                    for name in [last] if last else [alias.name for alias in node.names]:
                        found.setdefault(name, set()).add(kernel)
    return found


def test_every_op_a_kernel_calls_is_in_the_table_with_that_kernel_and_those_arguments() -> None:
    kernels, called = uses(), set()
    for module, op, positional, keywords in calls():
        assert op in TABLE.entries, f"{op} is called in ops/{module}.py"
        takes = ops_table.arguments(TABLE.entries[op].signature)
        assert set(keywords) <= set(takes) and positional <= len(takes), op
        assert kernels.get(module, set()) <= set(TABLE.entries[op].used_by), op
        called.add(op)
    assert {"npu_rms_norm", "npu_swiglu", "npu_geglu", "npu_rotary_mul", "npu_grouped_matmul"} <= called
    # and nothing else is said to be used, but what runs beneath those and in their backward
    for name, entry in TABLE.entries.items():
        above = {name, name.lstrip("_"), entry.computes.removeprefix("The gradient of ").rstrip(".")} & called
        used = {kernel for op in above for kernel in TABLE.entries[op].used_by}
        assert set(entry.used_by) == used <= set(REGISTRY), name


def test_the_tables_schemas_are_those_of_the_emulator() -> None:
    assert {op.name for op in emulator.OPS} == {name for name, entry in TABLE.entries.items() if entry.emulated}
    for op in emulator.OPS:
        ours, theirs = (torch._C.parse_schema(s) for s in (TABLE.entries[op.name].signature, op.schema))
        assert [described(a) for a in ours.arguments] == [described(a) for a in theirs.arguments], op.name
        assert [str(r.type) for r in ours.returns] == [str(r.type) for r in theirs.returns], op.name


def described(argument: Any) -> tuple[object, ...]:
    return argument.name, str(argument.type), argument.kwarg_only, argument.default_value


def test_every_entry_is_whole_and_its_schemas_are_schemas() -> None:
    assert len(TABLE.entries) == 102
    for name, entry in TABLE.entries.items():
        assert entry.name == name and all((entry.brief, entry.computes, entry.gradient, entry.hardware, entry.use))
        assert set(entry.schemas) | {entry.differentiable_since or entry.since} <= set(TABLE.trains)
        assert list(entry.schemas) == sorted(entry.schemas)
        assert entry.differentiable_since is None or entry.differentiable_since >= entry.since
        assert all(change for _, change in entry.changes)
        for schema in filter(None, entry.schemas.values()):
            parsed = torch._C.parse_schema(schema)
            assert schema.partition("(")[0] == name
            assert list(ops_table.arguments(schema)) == [argument.name for argument in parsed.arguments]
            assert entry.knows(str(parsed))


def test_changes_tell_what_a_caller_must_know() -> None:
    changes = {name: dict(entry.changes) for name, entry in TABLE.entries.items()}
    assert changes["npu_rotary_mul"] == {"2025-07": "takes rotary_mode too", "2026-04": "takes rotate too"}
    assert changes["npu_apply_rotary_pos_emb"]["2026-07"] == "layout is str='BSND', was str='BSH'"
    assert changes["npu_fused_linear_online_max_sum"] == {"2026-01": "missing", "2026-10": "there again"}
    assert "gives (Tensor, Tensor, Tensor, Tensor, Tensor)" in changes["npu_fusion_attention_grad"]["2026-01"]
