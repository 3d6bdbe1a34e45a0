"""One environment variable, and an unchanged training script runs on the fused kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

sizes = {"vocab_size": 61, "hidden_size": 42, "intermediate_size": 56, "num_hidden_layers": 2, "head_dim": 8}
torch.manual_seed(0)
model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_attention_heads=6, num_key_value_heads=2)).npu()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.arange(14).reshape(2, 7).npu()
for _ in range(2):
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
print(loss.item())
"""
# What a machine with an NPU has without a line of Python: a device that computes, and somebody who watches it.
DEVICE = f"""
import json, sys
sys.path.insert(0, {str(PROJECT)!r})
from tests.virtual_npu.activation import activate
activate()
from tests.virtual_npu.accounting import counted
with counted() as counts:
    exec(compile(open("train.py").read(), "train.py", "exec"), {{"__name__": "__main__"}})
print(json.dumps({{"norms": counts.launches["npu_rms_norm"], "all": counts.launches.total()}}))
"""


@pytest.fixture
def train(tmp_path):
    """Run the script in a fresh interpreter with these variables: its loss, its launches, and its report."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "device.py").write_text(DEVICE)
    hook = PROJECT / "sitecustomize_hook"

    def run(**variables):
        path = os.pathsep.join(str(folder) for folder in (hook / "chain", hook, PROJECT))
        report = tmp_path / "report.json"
        environment = {**os.environ, "PYTHONPATH": path, "NPU_AUTOPATCH_REPORT": str(report), **variables}
        command = [sys.executable, "-W", "ignore", "device.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        loss, launches = done.stdout.splitlines()[-2:]
        written = json.loads(report.read_text()) if report.exists() else None
        report.unlink(missing_ok=True)
        return float(loss), json.loads(launches), written

    return run


def test_the_variable_alone_fuses_every_norm_and_says_so(train):
    loss, launches, report = train(NPU_AUTOPATCH="rms_norm")
    want, original, nothing = train(NPU_AUTOPATCH="0")
    assert loss == pytest.approx(want, rel=1e-5)
    assert launches["norms"] == 2 * 13
    assert launches["all"] < original["all"]
    assert original["norms"] == 0
    assert nothing is None
    sites = {site["name"]: site["state"] for site in report["sites"]}
    assert sites["gemma3.Gemma3RMSNorm"] == "patched"
