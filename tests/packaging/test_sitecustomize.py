"""The user's own sitecustomize and usercustomize run as if the package were not there, under `run` as without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from virtual_environment import Outcome, VirtualEnvironment

CHAIN = "_npu_autopatch_chain"
FINDER = "ModelingFinder"

REPORT = """\
import sys
print(type(sys.meta_path[0]).__name__)
if module := sys.modules.get("sitecustomize"):
    print(module.__name__, module.__file__, module.__spec__.name, vars(module).get("X"))
"""

CUSTOMIZATIONS = {
    "works": "import os, sys\nX = (__name__, __file__, sorted(sys.modules[__name__].__dict__) and 1)\nprint('hello')\n",
    "raises": "X = 1\nraise ValueError('in two\\nlines')\n",
    "raises ImportError": "import there_is_no_such_module\n",
    "is not Python": "def\n",
    "imports itself": "import sitecustomize\nX = sitecustomize is __import__('sys').modules[__name__]\n",
    "replaces itself": "import sys, types\nm = types.ModuleType(__name__)\nm.__file__ = __file__\n"
    "m.__spec__ = __spec__\nm.X = 2\nsys.modules[__name__] = m\n",
    "adds a path": "import sys\nsys.path.append('/somewhere')\n",
}


@pytest.fixture
def environment(changeable: VirtualEnvironment, tmp_path: Path) -> VirtualEnvironment:
    (tmp_path / "script.py").write_text(REPORT)
    return changeable


def plain_and_chained(environment: VirtualEnvironment, script: Path, **variables: str) -> tuple[Outcome, Outcome]:
    rest = variables.pop("PYTHONPATH", "")
    chain = f"{environment.site_packages / CHAIN}:{rest}".rstrip(":")
    plain = environment.python(script, **variables, **({"PYTHONPATH": rest} if rest else {}))
    return plain, environment.python(script, **variables, PYTHONPATH=chain)


@pytest.mark.parametrize("customization", CUSTOMIZATIONS.values(), ids=CUSTOMIZATIONS)
@pytest.mark.parametrize("place", ["site-packages", "PYTHONPATH"])
def test_the_users_sitecustomize_runs_fails_and_is_named_as_without_run(
    environment: VirtualEnvironment, tmp_path: Path, customization: str, place: str
) -> None:
    folder = environment.site_packages if place == "site-packages" else tmp_path / "theirs"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(customization)
    variables = {} if place == "site-packages" else {"PYTHONPATH": str(folder)}
    plain, chained = plain_and_chained(environment, tmp_path / "script.py", **variables)
    assert plain == chained
    assert plain.code == 0 and FINDER in plain.out


@pytest.mark.parametrize("code", ["raise SystemExit(5)", "raise KeyboardInterrupt"])
def test_a_sitecustomize_that_ends_the_interpreter_still_does(
    environment: VirtualEnvironment, tmp_path: Path, code: str
) -> None:
    environment.write("sitecustomize.py", code)
    plain, chained = plain_and_chained(environment, tmp_path / "script.py")
    assert plain.code == chained.code != 0
    assert plain.out == chained.out == ""
    assert plain.err.splitlines()[-1] == chained.err.splitlines()[-1]


def test_without_a_sitecustomize_there_is_none(environment: VirtualEnvironment, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REPORT + "import sitecustomize\n")
    plain, chained = plain_and_chained(environment, tmp_path / "script.py")
    assert plain == chained
    assert "ModuleNotFoundError: No module named 'sitecustomize'" in chained.err


def test_a_broken_boot_does_not_cost_the_user_their_sitecustomize(
    environment: VirtualEnvironment, tmp_path: Path
) -> None:
    environment.write("sitecustomize.py", "print('hello')\n")
    (environment.site_packages / "npu_autopatch-init.pth").unlink()
    environment.write("_npu_autopatch_boot.py", "raise SystemExit(3)\n")
    _, chained = plain_and_chained(environment, tmp_path / "script.py")
    assert (chained.code, chained.out.splitlines()[0], len(chained.err.splitlines())) == (0, "hello", 1)


def test_usercustomize_runs_after_it_as_before(environment: VirtualEnvironment, tmp_path: Path) -> None:
    config = environment.folder / "pyvenv.cfg"
    config.write_text(config.read_text().replace("system-site-packages = false", "system-site-packages = true"))
    user = str(tmp_path / "user")
    place = environment.python("-c", "import site; print(site.USER_SITE)", on=None, PYTHONUSERBASE=user).out.strip()
    Path(place).mkdir(parents=True)
    (Path(place) / "usercustomize.py").write_text("import sys; print('user', 'sitecustomize' in sys.modules)\n")
    environment.write("sitecustomize.py", "print('site')\n")
    plain, chained = plain_and_chained(environment, tmp_path / "script.py", PYTHONUSERBASE=user)
    assert plain == chained
    assert plain.out.splitlines()[:2] == ["site", "user True"]


def test_a_sitecustomize_that_chains_as_other_tools_do_is_chained_too(
    environment: VirtualEnvironment, tmp_path: Path
) -> None:
    """The form of tracing tools: leave sys.path, leave sys.modules, import the next, come back."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(
        "import os, sys\nprint('other')\nhere = os.path.dirname(__file__)\nsys.path.remove(here)\n"
        "me = sys.modules.pop('sitecustomize')\ntry:\n    import sitecustomize\n"
        "except ImportError:\n    sys.modules['sitecustomize'] = me\nfinally:\n    sys.path.insert(0, here)\n"
    )
    environment.write("sitecustomize.py", "print('mine')\n")
    chain = str(environment.site_packages / CHAIN)
    for order in ([chain, str(other)], [str(other), chain]):
        done = environment.python(tmp_path / "script.py", PYTHONPATH=":".join(order))
        assert (done.code, done.err) == (0, "")
        assert done.out.splitlines()[:2] == ["other", "mine"] and FINDER in done.out
