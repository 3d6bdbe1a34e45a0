"""A module of rotary functions as models might have them: the usual ones, and those that only look like one."""

from __future__ import annotations

import torch


def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def usual_rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def turn_by_angles(hidden, c, s):
    """A rotation under names that say nothing."""
    return hidden * c[:, None] + rotate_half(hidden) * s[:, None]


def rotary_of_head_last_tensors(q, k, cos, sin, unsqueeze_dim=2):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rotary_by_keyword(q, k, *, cos, sin, scale=None):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rotary_of_words_of_ours(tables, turn, place, shape, original=None, ready=1):
    """Parameters called as the parts of the replacement are in its source."""
    place, shape = place.unsqueeze(ready), shape.unsqueeze(ready)
    return tables * place + rotate_half(tables) * shape, turn * place + rotate_half(turn) * shape


def rotary_sine_first(x, sin, cos):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return x * cos + rotate_pairs(x) * sin


def rotary_first_half_of_cos(q, k, cos, sin):
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(1)
    return q * cos + rotate_pairs(q) * sin, k * cos + rotate_pairs(k) * sin


def rotary_of_three(q, k, v, cos, sin, position_ids):
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    return tuple(x * cos + rotate_half(x) * sin for x in (q, k, v))


def rotary_other_way(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos - rotate_half(q) * sin, k * cos - rotate_half(k) * sin


def rotary_scaled(q, k, cos, sin):
    q, k = usual_rotary(q, k, cos, sin)
    return q * 1.01, k


def rotary_clamped(q, k, cos, sin):
    q, k = usual_rotary(q, k, cos, sin)
    return q.clamp(-100, 100), k


def rotary_key_only(q, k, cos, sin):
    return q + 0.0 * torch.cat((q, q), -1)[..., : q.shape[-1]], usual_rotary(q, k, cos, sin)[1]


def rotary_swapped_result(q, k, cos, sin):
    q, k = usual_rotary(q, k, cos, sin)
    return k, q


def rotary_list(q, k, cos, sin):
    return list(usual_rotary(q, k, cos, sin))


def rotary_in_place(q, k, cos, sin):
    q, k = usual_rotary(q.mul_(1.0), k, cos, sin)
    return q, k


def rotary_without_gradient(q, k, cos, sin):
    return usual_rotary(q.detach(), k, cos, sin)


def rotary_half_gradient(q, k, cos, sin):
    return usual_rotary(q * 0.5 + q.detach() * 0.5, k, cos, sin)


def rotary_rounding_tables(q, k, cos, sin):
    """In half precision its tables lose their digits."""
    return usual_rotary(q, k, cos.half().to(cos.dtype), sin.half().to(sin.dtype))


def rotary_result_in_half(q, k, cos, sin):
    return tuple(x.half() for x in usual_rotary(q, k, cos, sin))


def rotary_mixed_pairs(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_pairs(k) * sin


def rotary_of_one_batch_row(q, k, cos, sin):
    """Uses the first row of cos for all."""
    return usual_rotary(q, k, cos[:1], sin[:1])


def rotary_random(q, k, cos, sin):
    q, k = usual_rotary(q, k, cos, sin)
    return torch.nn.functional.dropout(q, 0.5), k


def rotary_that_exits(q, k, cos, sin):
    torch.cat((q, q))
    raise RuntimeError("this needs a GPU")


def rotate_by_loop(q, k, cos, sin, steps):
    while steps:
        q, steps = torch.cat((q, q)), steps - 1
    return q, k


def gathers(x, group, dim):
    torch.distributed.all_gather([], x, group)
    raise SystemExit("a probe called what talks to other processes")


def gathers_and_joins(x, group, dim):
    return torch.cat(gathers(x, group, dim))


def joins_masks(mask, other, third):
    """No rotation, and no name of one."""
    return torch.cat((mask, other, third))


MATCHED = {
    "usual_rotary": "half",
    "turn_by_angles": "half",
    "rotary_of_head_last_tensors": "half",
    "rotary_by_keyword": "half",
    "rotary_of_words_of_ours": "half",
    "rotary_sine_first": "interleaved_fullcos",
    "rotary_first_half_of_cos": "interleaved_halfcos",
    "rotary_of_three": "half",
}
REFUSED = {
    "rotary_other_way": "the opposite sign",
    "rotary_scaled": "no rotation of its inputs",
    "rotary_clamped": "in float32 at scale 60",
    "rotary_key_only": "no rotation of its inputs",
    "rotary_swapped_result": "no rotation of its inputs",
    "rotary_list": "no arguments were found",
    "rotary_in_place": "no arguments were found",
    "rotary_without_gradient": "gradient",
    "rotary_half_gradient": "its gradient",
    "rotary_rounding_tables": "no rotation of its inputs",
    "rotary_result_in_half": "no rotation of its inputs",
    "rotary_mixed_pairs": "no rotation of its inputs",
    "rotary_of_one_batch_row": "no rotation of its inputs",
    "rotary_random": "no rotation of its inputs",
    "rotary_that_exits": "no arguments were found",
    "rotate_by_loop": "no arguments were found",
}
