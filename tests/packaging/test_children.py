"""Every kind of child process is patched as its parent is, once, and can be left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import emulated
from virtual_environment import VirtualEnvironment

OBSERVED = "(fused(family('qwen9').Qwen9RMSNorm), finders(), states())"
EXPECTED = "(1, 1, {'qwen9.Qwen9RMSNorm': 'patched'})\n"


@pytest.mark.parametrize(
    ("method", "loaded"),
    [
        ("fork", "family('qwen9')"),
        ("fork", "pass"),
        ("spawn", "family('qwen9')"),
        ("forkserver", "family('qwen9')"),
    ],
)
def test_multiprocessing(with_models: VirtualEnvironment, tmp_path: Path, method: str, loaded: str) -> None:
    program = f"""\
    import multiprocessing

    def child():
        print({OBSERVED}, flush=True)

    if __name__ == "__main__":
        {loaded}
        process = multiprocessing.get_context("{method}").Process(target=child)
        process.start()
        process.join()
        print(process.exitcode)
    """
    emulated(with_models, program, tmp_path / "program.py").said(f"{EXPECTED}0\n")


def test_subprocess_exec_and_a_child_that_is_turned_off(with_models: VirtualEnvironment, tmp_path: Path) -> None:
    program = f"""\
    import os, subprocess
    if sys.argv[1:] == ["child"]:
        print({OBSERVED}, flush=True)
    elif sys.argv[1:] == ["off"]:
        print(finders(), "npu_autopatch" in sys.modules)
    else:
        subprocess.run([sys.executable, __file__, "off"], env={{**os.environ, "NPU_AUTOPATCH": "0"}})
        subprocess.run([sys.executable, __file__, "child"])
        os.execv(sys.executable, [sys.executable, __file__, "child"])
    """
    emulated(with_models, program, tmp_path / "program.py").said(f"0 False\n{EXPECTED}{EXPECTED}")


def test_workers_of_a_data_loader(with_models: VirtualEnvironment, tmp_path: Path) -> None:
    program = f"""\
    import torch

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return str({OBSERVED})

    if __name__ == "__main__":
        for method in ("fork", "spawn"):
            loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=method, batch_size=2)
            print(set(next(iter(loader))))
    """
    line = f"{{{EXPECTED.strip()!r}}}\n"
    emulated(with_models, program, tmp_path / "program.py").said(line * 2)


def test_torchrun(with_models: VirtualEnvironment, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os\nfrom observing import *\n"
        f"open(os.path.dirname(__file__) + '/rank' + os.environ['RANK'], 'w').write(str({OBSERVED}) + '\\n')\n"
    )
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    done = with_models.python(*launcher, tmp_path / "program.py", NPU_AUTOPATCH_BACKEND="emulate")
    assert done.code == 0, done
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == [EXPECTED, EXPECTED]


def test_a_start_up_that_starts_interpreters_does_not_do_so_for_ever(
    with_models: VirtualEnvironment, tmp_path: Path
) -> None:
    environment = with_models.copy(tmp_path / "venv")
    environment.write(
        "sitecustomize.py",
        "import os, subprocess, sys\n"
        "if os.environ.setdefault('DEPTH', '0') == '0':\n"
        "    os.environ['DEPTH'] = '1'\n"
        "    subprocess.run([sys.executable, '-c', 'from observing import *; print(finders())'])\n",
    )
    run = "import sys; from npu_autopatch.cli.run import run; sys.exit(run(sys.argv[1:]))"
    (tmp_path / "program.py").write_text("from observing import *; print(finders())\n")
    environment.python("-c", run, tmp_path / "program.py", DEPTH="0").said("1\n1\n")
