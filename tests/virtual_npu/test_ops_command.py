"""`ops` on the real wheel: with torch_npu imported over the stand-in for CANN, and read as text without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npu_autopatch.cli import ops_table, ops_wheel
from npu_autopatch.ops.capability import detect

PROJECT = Path(__file__).resolve().parents[2]
CANN = f"import sys; sys.path.append({str(PROJECT)!r})\nfrom tests.virtual_npu.cann_library import load; load()\n"
TABLE = ops_table.table()


@pytest.fixture
def command(tmp_path):
    """Run `npu-autopatch ops`, with or without CANN; its stdout."""
    (tmp_path / "sitecustomize.py").write_text(CANN)

    def run(*arguments, cann):
        path = [PROJECT, tmp_path] if cann else [PROJECT]
        done = subprocess.run(
            [sys.executable, "-m", "npu_autopatch.cli", "ops", *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "COLUMNS": "80"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def flat(text):
    return " ".join(text.split())


def test_a_grouped_product_is_shown_as_registered(command):
    shown = flat(command("show", "npu_grouped_matmul", cann=True))
    assert "torch_npu 2.13.0: signatures and gradients as registered, documentation from its files" in shown
    assert "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None" in shown
    assert "npu_grouped_matmul.List(" in shown and "(as registered)" in shown
    assert "gradient no (as registered)" in shown and "used by kernel moe:" in shown
    assert "Documentation of torch_npu 2.13.0" in shown and "y_{i}=x_{i}" in shown
    assert "any train we know" not in shown


def test_of_every_operator_it_is_known_whether_there_is_a_gradient(command):
    ops = json.loads(command("list", "--json", cann=True))["ops"]
    assert {op["differentiable"] for op in ops if op["installed"]} == {True, False}


def test_without_cann_the_same_is_read_from_the_files_and_said_to_be(command):
    shown = flat(command("show", "npu_grouped_matmul", cann=False))
    assert "torch_npu 2.13.0 cannot be imported here (ImportError: libhccl.so" in shown
    assert "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None" in shown
    assert "(from the files of torch_npu)" in shown and "gradient no (from our table)" in shown
    assert "Documentation of torch_npu 2.13.0" in shown and "y_{i}=x_{i}" in shown


def test_both_readings_tell_the_same_operators_and_gradients(command):
    registered, read = (json.loads(command("list", "--json", cann=cann)) for cann in (True, False))
    assert registered["not_imported"] is None and "libhccl.so" in read["not_imported"]
    there, text = ({op["name"]: op for op in found["ops"] if op["installed"]} for found in (registered, read))
    # what torch_npu registers by hand stands in no file: its graphs' printing and scopes
    assert set(text) < set(there) and not {name for name in set(there) - set(text) if name.startswith("npu_")}
    assert len(text) > 350 and sum(op["documented"] for op in text.values()) > 200
    for name, op in text.items():
        arguments, theirs = (
            {tuple(ops_table.arguments(signature)) for signature in found["signatures"] if ".out(" not in signature}
            for found in (op, there[name])
        )
        assert arguments == theirs, name
        if op["known"]:
            assert op["differentiable"] is there[name]["differentiable"], name


def test_the_table_is_what_the_wheel_registers():
    for name, entry in TABLE.entries.items():
        op, _, overload = name.partition(".")
        registered = {s.overload_name: s for s in torch._C._jit_get_schemas_for_operator(f"npu::{op}")}
        assert entry.knows(str(registered[overload]).removeprefix("npu::")), name
        newest = torch._C.parse_schema(entry.signature)
        ours, theirs = ([(a.name, str(a.type)) for a in s.arguments] for s in (newest, registered[overload]))
        assert ours == theirs, name
        if not overload:
            assert detect(op, ()).differentiable is (entry.differentiable_since is not None), name


def test_every_documented_operator_has_its_text():
    wheel = ops_wheel.read()
    texts = (len(wheel.documentation[name]) for name in ("npu_rms_norm", "npu_swiglu", "npu_rotary_mul"))
    assert min(texts) > 300 and wheel.version.startswith("2.13.0")
