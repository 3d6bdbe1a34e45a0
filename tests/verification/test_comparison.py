"""The rule for several draws: what is typical decides, not the one draw that outweighs the others."""

from __future__ import annotations

import math

import torch

from npu_autopatch.verification.comparison import typically_behind
from npu_autopatch.verification.draws import Draw, behind


def draws(*ours: float) -> list[dict[str, tuple[float, float, float]]]:
    return [{"answer": (mine, 1.0, 0.5)} for mine in ours]


def test_one_draw_is_held_to_one_and_a_half_times_the_originals_error_and_a_unit() -> None:
    assert not typically_behind(draws(2.0))
    assert typically_behind(draws(2.01))


def test_one_draw_among_many_does_not_decide() -> None:
    assert not typically_behind(draws(20.0, 1.0, 1.0, 1.0, 1.0))
    assert typically_behind(draws(20.0, 2.1, 2.1, 2.1, 0.9))


def test_a_nan_or_an_error_where_none_is_allowed_decides_alone() -> None:
    assert typically_behind(draws(math.nan, 0.1, 0.1))
    assert typically_behind(draws(math.inf, 0.1, 0.1))
    assert typically_behind([{"answer": (1e-9, 0.0, 0.0)}])
    assert not typically_behind([{"answer": (0.0, 0.0, 0.0)}])


def test_a_gradient_that_only_some_draws_have_is_compared_in_these() -> None:
    assert typically_behind([{"expert": (9.0, 1.0, 0.0)}, {}])


def drawn(**errors: float) -> Draw:
    values = {name: (mine, 1.0, 0.0) for name, mine in errors.items()}
    return Draw(errors={("site", "fp32 prefill"): values}, cases={"fp32 prefill": (torch.float32, "prefill")})


def test_a_draw_that_is_behind_is_judged_by_the_others() -> None:
    first = drawn(answer=9.0, state=1.0)
    assert list(behind(first, [])) == [("site", "fp32 prefill")] and first.behind([]) == ((torch.float32, "prefill"),)
    assert not behind(first, [drawn(answer=1.4, state=1.4)] * 2) and not first.behind([drawn(answer=1.4)])
    ((words,),) = behind(first, [drawn(answer=1.6, state=1.0), drawn(answer=1.6, state=9.0)]).values()
    assert words.startswith("answer: 1.6 times")


def test_what_was_not_behind_at_first_is_not_looked_for_in_the_others() -> None:
    ((words,),) = behind(drawn(answer=1.6, state=1.0), [drawn(answer=1.6, state=9.0)]).values()
    assert words.startswith("answer: ")
    assert not behind(drawn(answer=1.0), [drawn(answer=9.0)])


def test_what_only_the_first_draw_has_is_judged_by_it() -> None:
    """An expert that the others do not choose."""
    ((words,),) = behind(drawn(expert=1.6), [drawn(answer=1.0)]).values()
    assert words.startswith("expert: 1.6 times")


def test_what_is_far_off_or_not_a_number_needs_no_other_draw() -> None:
    assert drawn(answer=15.1).hopeless() and drawn(answer=math.nan).hopeless() and not drawn(answer=14.9).hopeless()
