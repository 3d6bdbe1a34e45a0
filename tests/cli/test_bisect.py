"""`bisect` finds the planted faulty site of a program by running it, and says when there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import transformers

from .conftest import HOOK, PROJECT, Outcome

V4 = transformers.__version__.startswith("4.")
SMALL = "vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, head_dim=8, "
SMALL += "num_attention_heads=2, num_key_value_heads=2"
TRAINING = """
    import torch
    from transformers.models.{family}.modeling_{family} import {name}Config, {name}ForCausalLM

    torch.manual_seed(0)
    model = {name}ForCausalLM({name}Config({small}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    tokens = torch.randint(64, (2, 7))
    for step in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        print("step", step, {{"train_loss": loss.item()}})
"""
REMOTE = {
    "config.json": '{"model_type": "odd_one", "auto_map": {"AutoConfig": "configuration_odd.OddConfig", '
    '"AutoModel": "modeling_odd+1.OddModel"}}',
    "configuration_odd.py": "from transformers import PretrainedConfig\n"
    "class OddConfig(PretrainedConfig):\n    model_type = 'odd_one'\n",
    "modeling_odd+1.py": """
        import torch
        from transformers import PreTrainedModel
        from .configuration_odd import OddConfig

        class Evener(torch.nn.Module):
            def __init__(self, width, tick=1e-5):
                super().__init__()
                self.gains = torch.nn.Parameter(torch.ones(width))
                self.tick = tick

            def forward(self, stream):
                wide = stream.float()
                wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.tick)
                return (self.gains.float() * wide).to(stream.dtype)

        class Leveller(Evener):
            def forward(self, stream):
                wide = stream.float()
                wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tick)
                return self.gains * wide.to(stream.dtype)

        class OddModel(PreTrainedModel):
            config_class = OddConfig

            def __init__(self, config):
                super().__init__(config)
                self.first, self.second = Evener(24), Leveller(24)
                self.post_init()

            def _init_weights(self, module):
                pass

            def forward(self, stream):
                return self.second(self.first(stream))
    """,
}
USING_REMOTE = """
    import torch
    from transformers import AutoConfig, AutoModel
    model = AutoModel.from_config(AutoConfig.from_pretrained("odd", trust_remote_code=True), trust_remote_code=True)
    model(torch.ones(2, 24))
"""


def training(family: str, name: str, more: str = "") -> str:
    return TRAINING.format(family=family, name=name, small=SMALL + more)


QWEN3, MISTRAL, LLAMA = (training(name.lower(), name) for name in ("Qwen3", "Mistral", "Llama"))
EXPERTS = ", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, decoder_sparse_step=1"


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a server that starts programs in no time."""
    folder = tmp_path_factory.mktemp("warm")
    (folder / "sitecustomize.py").write_text("import tests.cli.planting\n")
    path = os.pathsep.join(map(str, (folder, HOOK, PROJECT)))
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.cli.planting", str(folder / "socket")],
        env={**os.environ, "PYTHONPATH": path, "NPU_AUTOPATCH": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    until = time.monotonic() + 60
    while not (folder / "socket").exists() and time.monotonic() < until:
        assert server.poll() is None
        time.sleep(0.1)
    yield folder / "socket"
    server.kill()
    server.wait()


@pytest.fixture
def bisect(command: Callable[..., Outcome], warm: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Run `bisect` on a script; `planted` are the faults in it, keywords variables."""

    def run(
        script: str,
        *options: str,
        planted: dict[str, str],
        cold: bool = False,
        verified: bool = False,
        **variables: str,
    ) -> Outcome:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        (tmp_path / "sitecustomize.py").write_text("import tests.cli.planting\n")
        client = ("-I", "-S", str(PROJECT / "tests" / "cli" / "planting.py"), str(warm))
        program = (sys.executable, *(() if cold else client), "script.py")
        variables |= {"NPU_AUTOPATCH_BACKEND": "emulate", "HF_MODULES_CACHE": str(tmp_path / "hf")}
        variables |= {"PLANTED": json.dumps(planted), "OMP_NUM_THREADS": "1"}
        options = (*options, *(() if verified else ("--no-verify",)))
        return command(
            "bisect", "--logs", "logs", *options, "--", *program, folders=(tmp_path,), started=True, **variables
        )

    return run


def culprits(done: Outcome) -> list[list[str]]:
    assert done.code == 0, done
    return [[site["name"] for site in culprit["sites"]] for culprit in json.loads(done.out)["culprits"]]


def test_a_site_that_raises_is_found_by_the_exit_code(bisect: Callable[..., Outcome], tmp_path: Path) -> None:
    done = bisect(QWEN3, cold=True, planted={"qwen3.Qwen3MLP": "raise"}, NPU_AUTOPATCH="rms_norm,swiglu")
    assert done.code == 0, done
    assert max(len(line) for line in done.out.splitlines() if str(tmp_path) not in line) <= 80
    assert "culprit 1 fails alone: exit code 1" in done.out and "qwen3.Qwen3MLP  swiglu, separate" in done.out
    assert "\n  NPU_AUTOPATCH_SKIP=qwen3.Qwen3MLP\n" in done.out
    assert "backend emulate, CPU kernels in place of the NPU's" in done.out
    assert "RuntimeError: planted" in (tmp_path / "logs" / "01.log").read_text()
    assert "planted" not in (tmp_path / "logs" / "02.log").read_text()
    said = done.err.splitlines()
    assert [line.split()[0] for line in said[2:]] == [log.name for log in sorted((tmp_path / "logs").iterdir())]
    assert "everything patched" in said[2] and "everything skipped" in said[3]
    assert max(map(len, said[2:])) <= 80


def test_a_site_that_gives_nan_is_found_by_the_loss_printed(bisect: Callable[..., Outcome]) -> None:
    planted = {"llama.LlamaRMSNorm": "nan"}
    done = bisect(LLAMA, "--until-nan", "--json", planted=planted, verified=True, NPU_AUTOPATCH="rms_norm,rope")
    assert culprits(done) == [["llama.LlamaRMSNorm"]]
    found = json.loads(done.out)
    assert found["culprits"][0]["failure"].startswith("printed \"step 0 {'train_loss': nan}")
    assert found["skip"] == "llama.LlamaRMSNorm"
    (verified,) = found["culprits"][0]["verified"]
    assert verified.startswith("npu-autopatch verify llama: ") and "nothing is wrong" not in verified


def test_a_site_that_is_wrong_is_found_by_losses_that_differ(bisect: Callable[..., Outcome]) -> None:
    planted = {"qwen3.apply_rotary_pos_emb": "-1"}
    done = bisect(QWEN3, "--compare", "--json", planted=planted, NPU_AUTOPATCH="rms_norm,rope")
    assert culprits(done) == [["qwen3.apply_rotary_pos_emb"]]
    found = json.loads(done.out)
    assert [run["what"] for run in found["runs"][:3]] == ["NPU_AUTOPATCH=0", "everything patched", "everything skipped"]
    assert found["culprits"][0]["failure"].startswith("loss ")


def test_two_culprits_are_both_found(bisect: Callable[..., Outcome]) -> None:
    """The second in a module that the program has not imported when the first one ends it."""
    planted = {"qwen3.Qwen3RMSNorm": "raise", "mistral.MistralMLP": "raise"}
    both = textwrap.dedent(QWEN3) + textwrap.dedent(MISTRAL)
    done = bisect(both, "--json", planted=planted, NPU_AUTOPATCH="rms_norm,swiglu")
    assert sorted(culprits(done)) == [["mistral.MistralMLP"], ["qwen3.Qwen3RMSNorm"]]
    assert sorted(json.loads(done.out)["skip"].split(",")) == ["mistral.MistralMLP", "qwen3.Qwen3RMSNorm"]


def test_a_class_of_remote_code_is_found(bisect: Callable[..., Outcome], tmp_path: Path) -> None:
    """In a file whose name has a character that patterns have in brackets only."""
    (tmp_path / "odd").mkdir()
    for name, text in REMOTE.items():
        (tmp_path / "odd" / name).write_text(textwrap.dedent(text))
    done = bisect(USING_REMOTE, "--json", planted={"odd+1.Leveller": "raise"})
    assert culprits(done) == [["odd+1.Leveller"]]
    assert json.loads(done.out)["skip"] == "odd[+]1.Leveller"


def test_experts_are_found_and_not_what_serves_them(bisect: Callable[..., Outcome]) -> None:
    culprit = "qwen3_moe.Qwen3MoeSparseMoeBlock" if V4 else "qwen3_moe.Qwen3MoeExperts"
    script = training("qwen3_moe", "Qwen3Moe", EXPERTS)
    done = bisect(script, "--json", planted={culprit: "raise"}, NPU_AUTOPATCH="swiglu,moe")
    (together,) = culprits(done)
    assert culprit in together
    assert [name for name in together if name != culprit and not name.startswith("moe.")] == []
    assert json.loads(done.out)["skip"] == culprit
