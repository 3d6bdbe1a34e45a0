"""Rotary functions are recognised by what they return: any name, any order; and what only looks like one is refused."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch

from npu_autopatch import emulator
from npu_autopatch.kernels import probing, rope
from npu_autopatch.kernels.base import Match, Refusal
from npu_autopatch.kernels.rope import formula
from npu_autopatch.kernels.rope.probe import Probe, Unproved
from tests.kernels import odd_rotary


@pytest.fixture(scope="module")
def outcomes():
    emulator.install()
    found = {}
    with probing.undisturbed():
        for site in rope.KERNEL.find(odd_rotary):
            found[site.attribute] = rope.KERNEL.prove(site, ("cpu",))
    return found


@pytest.mark.parametrize("name", odd_rotary.MATCHED)
def test_a_rotation_is_recognised_whatever_it_is_called(name, outcomes):
    assert isinstance(outcomes[name], Match), outcomes[name]
    assert outcomes[name].variant == odd_rotary.MATCHED[name]


@pytest.mark.parametrize("name", odd_rotary.REFUSED)
def test_what_is_called_a_rotation_and_is_none_is_refused_with_its_reason(name, outcomes):
    assert isinstance(outcomes[name], Refusal), outcomes[name]
    assert odd_rotary.REFUSED[name] in outcomes[name].reason


def test_other_functions_have_no_row(outcomes):
    """Nor are they called if they talk to other processes: the module would not have been searched to its end."""
    assert not {"rotate_half", "rotate_pairs", "joins_masks", "gathers_and_joins"} & outcomes.keys()
    assert outcomes.keys() == odd_rotary.MATCHED.keys() | odd_rotary.REFUSED.keys()


def test_a_function_that_differs_from_a_proved_one_in_what_it_calls_is_proved_by_itself(outcomes):
    """The proof of a code serves its copies: not one whose rotate_half is another."""
    twin = types.ModuleType("twin_of_odd_rotary")
    exec(inspect.getsource(odd_rotary).replace("(-second, first)", "(second, -first)"), vars(twin))
    sys.modules[twin.__name__] = twin
    try:
        with probing.undisturbed():
            found = {site.attribute: rope.KERNEL.prove(site, ("cpu",)) for site in rope.KERNEL.find(twin)}
    finally:
        del sys.modules[twin.__name__]
    assert "the opposite sign" in found["usual_rotary"].reason
    assert found["rotary_other_way"].variant == "half"


def test_codes_are_equal_only_if_all_they_name_is():
    def made(body, **names):
        scope = dict(names)
        exec(f"def f(x, n=1):\n    '''{body}'''\n    return g(x) * c + {body}", scope)
        return scope["f"]

    def helper(x):
        return x

    def other(x):
        return -x

    first = probing.code_of(made("x", g=helper, c=2))
    assert first == probing.code_of(made("x", g=helper, c=2))
    for different in (
        made("x", g=other, c=2),
        made("x", g=helper, c=3),
        made("x", g=helper, c=2.0),
        made("-x", g=helper, c=2),
    ):
        assert probing.code_of(different) != first
    assert probing.code_of(made("x", g=helper, c=[2])) is None  # a list may change
    assert probing.code_of(lambda: first) is None  # a closure


def test_a_wrong_formula_proves_nothing(monkeypatch):
    """Each step of the proof rests on the formula: with the halves the other way round there is no match."""
    right = formula.quarter_turn
    monkeypatch.setattr(formula, "quarter_turn", lambda x, mode: -right(x, mode))
    with probing.undisturbed(), pytest.raises(Unproved):
        Probe(odd_rotary.usual_rotary, inspect.signature(odd_rotary.usual_rotary)).case()


@pytest.mark.parametrize("mutation", ["rounds the tables", "other mode", "forgets the result dtype", "raises"])
def test_the_proof_runs_the_replacement_itself(mutation, monkeypatch):
    from npu_autopatch.ops import rotary as ops

    right = ops.reference

    def wrong(x, cos, sin, mode):
        if mutation == "rounds the tables":
            return right(x, cos.bfloat16().to(x.dtype), sin.bfloat16().to(x.dtype), mode)
        if mutation == "other mode":
            return right(x, cos, sin, "interleave" if mode == "half" else "half")
        if mutation == "forgets the result dtype":
            return right(x, cos, sin, mode).double()
        raise RuntimeError("no such op")

    monkeypatch.setattr(ops, "reference", wrong)
    with probing.undisturbed(), pytest.raises(Unproved):
        Probe(odd_rotary.usual_rotary, inspect.signature(odd_rotary.usual_rotary)).case()


def test_a_probe_leaves_the_process_as_it_was():
    before = torch.get_rng_state()
    with probing.undisturbed():
        Probe(odd_rotary.usual_rotary, inspect.signature(odd_rotary.usual_rotary)).case()
    assert torch.equal(torch.get_rng_state(), before)
