"""The rule for several draws: what is typical decides, not the one draw that outweighs the others."""

from __future__ import annotations

import math

from npu_autopatch.verification.comparison import typically_behind


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
