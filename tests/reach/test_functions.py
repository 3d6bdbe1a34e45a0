"""Functions that others hold: what imported the name is reached and let go, what captured it is told in the report."""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import npu_autopatch

NAME = "apply_rotary_pos_emb"
ORIGINAL = vars(modeling_llama)[NAME]


@pytest.fixture(autouse=True)
def modules_as_they_were() -> Iterator[None]:
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.startswith(("user_", "transformers_modules", "their_")):
            del sys.modules[name]
    setattr(modeling_llama, NAME, ORIGINAL)


def module(name: str, code: str = "") -> Any:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = made
    exec(code, vars(made))
    return made


TAKES_THE_NAME = f"from {modeling_llama.__name__} import {NAME}"


def block() -> Any:
    return npu_autopatch.patched(backend="emulate", kernels="rope")


def row(name: str = f"llama.{NAME}") -> Any:
    (found,) = [row for row in npu_autopatch.report().sites if row.name == name and row.kernel == "rope"]
    return found


def told() -> set[str]:
    """Who holds the function, by the report; tests do, too."""
    reason = row().reason.removeprefix("not reached where it is held by ")
    return {name for name in reason.split(", ") if name and not name.startswith("test")}


def test_remote_code_that_imported_the_name_is_a_site_of_its_own_before_and_after() -> None:
    before = module("transformers_modules.before.modeling_before", TAKES_THE_NAME)
    with block():
        assert vars(before)[NAME] is not ORIGINAL
        assert row(f"before.{NAME}").state == "patched"
        assert told() == set()
        after = module("transformers_modules.after.modeling_after", TAKES_THE_NAME)
        with block():  # what the loader of remote code does
            assert row(f"after.{NAME}").state == "patched"
    assert vars(before)[NAME] is vars(after)[NAME] is vars(modeling_llama)[NAME] is ORIGINAL


def test_a_script_that_took_the_name_before_keeps_the_original_and_is_told() -> None:
    script = module("user_script", TAKES_THE_NAME)
    with block():
        assert vars(script)[NAME] is ORIGINAL
        assert row().state == "patched"
        assert told() == {"user_script"}
        assert "user_script" in str(npu_autopatch.report())
    assert vars(script)[NAME] is ORIGINAL


def test_a_script_that_takes_the_name_inside_gets_the_patch_and_the_original_after() -> None:
    with block():
        script = module("user_script", f"{TAKES_THE_NAME} as rope")
        assert script.rope is vars(modeling_llama)[NAME] is not ORIGINAL
        assert told() == set()
    assert script.rope is ORIGINAL


def test_what_captured_the_function_is_named() -> None:
    script = module(
        "user_captures",
        f"""
{TAKES_THE_NAME} as _rope

class Attention:
    rope = staticmethod(_rope)

def decorate(function):
    def inner(*args):
        return function(*args)
    return inner

decorated = decorate(_rope)
del _rope
""",
    )
    with block():
        assert told() == {"user_captures.Attention", "user_captures.decorate.<locals>.inner"}
        assert script.Attention.rope is ORIGINAL


def test_two_names_of_one_function_are_both_patched() -> None:
    modeling_qwen3.second_name = vars(modeling_qwen3)[NAME]
    original = modeling_qwen3.second_name
    try:
        with block():
            assert modeling_qwen3.second_name is not original
            assert vars(modeling_qwen3)[NAME] is not original
            assert {row("qwen3.second_name").state, row(f"qwen3.{NAME}").state} == {"patched"}
        assert modeling_qwen3.second_name is vars(modeling_qwen3)[NAME] is original
    finally:
        del modeling_qwen3.second_name


THEIRS = """
import torch
def apply_rotary_npu(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return q + 1, k + 1
"""


def test_a_function_of_another_package_is_left_alone_and_named() -> None:
    setattr(modeling_llama, NAME, module("their_package", THEIRS).apply_rotary_npu)
    with block():
        x = torch.zeros(1, 1, 1, 2)
        assert torch.equal(vars(modeling_llama)[NAME](x, x, x, x)[0], x + 1)
        assert (row().state, "their_package" in row().reason) == ("foreign", True)


def test_a_wrapper_of_another_package_around_ours_is_left_alone_and_works() -> None:
    wrap = module(
        "their_wrapper", "import functools\ndef wrap(f):\n return functools.wraps(f)(lambda *a, **k: f(*a, **k))"
    )
    args = [torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), torch.rand(1, 3, 8), torch.rand(1, 3, 8)]
    with block():
        wrapped = wrap.wrap(vars(modeling_llama)[NAME])
        setattr(modeling_llama, NAME, wrapped)
        with block():
            assert vars(modeling_llama)[NAME] is wrapped
            assert (row().state, "their_wrapper" in row().reason) == ("foreign", True)
    assert vars(modeling_llama)[NAME] is wrapped
    assert "their_wrapper" in row().reason
    torch.testing.assert_close(wrapped(*args), ORIGINAL(*args))


def test_what_holds_ours_beside_a_wrapper_of_another_package_gets_the_original_back() -> None:
    code = f"""
{TAKES_THE_NAME}

def gives(function):
    held = [function]
    def decorate(cls):
        cls.__init__ = lambda self: setattr(self, "rotary", held[0])
        return cls
    return decorate

@gives({NAME})
class Attention:
    pass
"""
    remote = module("transformers_modules.captures.modeling_captures", code)
    with block():
        ours = vars(remote)[NAME]
        assert remote.Attention().rotary is ours is not ORIGINAL
        script = module("user_script", f"from {remote.__name__} import {NAME} as rope")
        setattr(remote, NAME, lambda *args: ours(*args))
    assert vars(remote)[NAME] is not ORIGINAL
    assert remote.Attention().rotary is script.rope is ORIGINAL


def test_a_skipped_function_stays(fused_calls: Any) -> None:
    with npu_autopatch.patched(backend="emulate", skip=f"llama.{NAME}"):
        assert vars(modeling_llama)[NAME] is ORIGINAL
        assert row().state == "skipped"


def test_a_partial_or_callable_of_that_name_is_no_site() -> None:
    setattr(modeling_llama, NAME, functools.partial(ORIGINAL, unsqueeze_dim=2))
    with block():
        assert isinstance(vars(modeling_llama)[NAME], functools.partial)
        assert row().state in ("refused", "foreign")


def test_a_constructor_with_an_empty_closure_is_no_hindrance() -> None:
    """What a class closes over is looked through where a function is held; a name there may not be bound yet."""
    code = f"""
{TAKES_THE_NAME}

def unfinished():
    if False:
        later = None
    class Attention:
        def __init__(self):
            self.later = later
    return Attention

Attention, ROTARY = unfinished(), [{NAME}]
"""
    remote = module("transformers_modules.unfinished.modeling_unfinished", code)
    with block():
        assert row(f"unfinished.{NAME}").state == "patched"
        assert vars(remote)[NAME] is not ORIGINAL
    assert vars(remote)[NAME] is vars(modeling_llama)[NAME] is ORIGINAL
