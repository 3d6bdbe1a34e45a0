"""Blocks that loop over a list of experts, written in ways that no model of transformers has, and some that must stay.

As a modeling module: each block is built from a configuration alone.
"""

import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    def __init__(self, config, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class TwoInOne(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.both = nn.Linear(config.hidden_size, 2 * config.intermediate_size)
        self.out = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = nn.GELU()

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.out(self.act(gate) * up)


class Ungated(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)) * 2)


class Block(nn.Module):
    expert = MLP

    def __init__(self, config):
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList([self.expert(config) for _ in range(config.num_experts)])

    def route(self, x):
        logits = self.gate(x)
        weights, ids = logits.softmax(-1, dtype=torch.float).topk(self.top_k, dim=-1)
        return logits, ids, weights.to(x.dtype)


class Masked(Block):
    """Every expert's rows by a mask, in a loop over the list itself; shared weights after it, a flag before it."""

    def __init__(self, config):
        super().__init__(config)
        self.shared = MLP(config)
        self.scale_shared = 0.5

    def forward(self, hidden):
        shape = hidden.shape
        shared = self.shared(hidden) * self.scale_shared
        hidden = hidden.reshape(-1, shape[-1])
        logits, ids, weights = self.route(hidden)
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(ids == index)
            out[token] += weights[token, slot].unsqueeze(-1) * expert(hidden[token])
        return {"hidden": out.view(shape) + shared, "logits": logits}


class Halves(Block):
    """Of each expert one projection for both halves, gelu, biases."""

    expert = TwoInOne

    def forward(self, x):
        logits, ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for index in range(self.num_experts):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None])
        return out, logits


class Kept(Block):
    """In three dimensions to the end; what the loop was given is used again."""

    def forward(self, x):
        _, ids, weights = self.route(x.flatten(0, 1))
        together = torch.zeros_like(x)
        rows = together.view(-1, x.size(-1))
        for index in range(self.num_experts):
            expert = self.experts[index]
            token, slot = torch.where(ids == index)
            if token.numel():
                rows.index_add_(0, token, expert(x.flatten(0, 1)[token]) * weights[token, slot, None])
        together = rows.view(x.shape)
        return together + x


class Jittered(Block):
    """Multiplies by noise in training, in place, and says what it routed by."""

    def __init__(self, config):
        super().__init__(config)
        self.jitter_noise = 0.1

    def forward(self, hidden_states):
        if self.training and self.jitter_noise > 0:
            hidden_states *= torch.empty_like(hidden_states).uniform_(1 - self.jitter_noise, 1 + self.jitter_noise)
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        logits, chosen, weights = self.route(rows)
        final = torch.zeros_like(rows)
        mask = F.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for index in hit:
            slot, token = torch.where(mask[index].squeeze(0))
            current = self.experts[index](rows[None, token].reshape(-1, rows.shape[-1])) * weights[token, slot, None]
            final.index_add_(0, token, current.to(rows.dtype))
        return final.reshape(hidden_states.shape), logits


class Handed(Block):
    """Is handed the routing, in an order of its own, and returns the sum as it was added up."""

    def experts_of(self, scores, tokens, chosen):
        total = torch.zeros(tokens.shape, dtype=torch.promote_types(tokens.dtype, scores.dtype), device=tokens.device)
        for index in range(len(self.experts)):
            token, slot = torch.where(chosen == index)
            if token.numel() == 0:
                continue
            total.index_add_(0, token, self.experts[index](tokens[token]) * scores[token, slot, None])
        return total


class Sorted(Block):
    """Rows sorted by expert, joined, put back; branches for experts that live elsewhere. Never learns."""

    def __init__(self, config):
        super().__init__(config)
        self.ep_size, self.ep_rank, self.experts_per_rank = 1, 0, config.num_experts

    @torch.no_grad()
    def infer(self, x, topk_ids, topk_weight):
        counts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        counts.scatter_(1, topk_ids, 1)
        counts = counts.sum(dim=0)
        order = topk_ids.view(-1).argsort()
        rows = x[order // topk_ids.shape[1]]
        shape = rows.shape
        if self.ep_size > 1:
            rows = self.exchanged(rows, counts)
            for rank in range(self.ep_size):
                counts[rank] += 1
        counts = counts.cpu().numpy()
        outputs = []
        start = 0
        for index, count in enumerate(counts):
            end = start + count
            if count == 0:
                continue
            outputs.append(self.experts[index + self.ep_rank * self.experts_per_rank](rows[start:end]))
            start = end
        rows = torch.cat(outputs, dim=0) if len(outputs) else rows.new_empty(0)
        if self.ep_size > 1:
            rows = self.exchanged(rows, shape)
        back = torch.empty_like(rows)
        back[order] = rows
        return (
            back.view(*topk_ids.shape, -1)
            .type(topk_weight.dtype)
            .mul_(topk_weight.unsqueeze(dim=-1))
            .sum(dim=1)
            .type(back.dtype)
        )

    def exchanged(self, rows, others):
        return rows * 0


class Branching(Block):
    """In training it repeats the rows and loops, in evaluation another method does; what is shared comes after both."""

    def __init__(self, config):
        super().__init__(config)
        self.shared = MLP(config)
        self.ep_size, self.ep_rank, self.experts_per_rank = 1, 0, config.num_experts

    def forward(self, hidden_states):
        identity = hidden_states
        shape = hidden_states.shape
        logits, ids, weights = self.route(hidden_states.view(-1, shape[-1]))
        hidden_states = hidden_states.view(-1, shape[-1])
        flat = ids.view(-1)
        if self.training:
            hidden_states = hidden_states.repeat_interleave(self.top_k, dim=0)
            y = torch.empty_like(hidden_states)
            for index, expert in enumerate(self.experts):
                y[flat == index] = expert(hidden_states[flat == index])
            y = (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
            y = y.to(hidden_states.dtype).view(shape)
        else:
            y = self.infer(hidden_states, ids, weights).view(shape)
        y = y + self.shared(identity)
        return y, logits

    infer = Sorted.infer


class Clamped(Block):
    """The experts' outputs are clamped where they are large."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            y = self.experts[index](x[token]).clamp(-500, 500)
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


class Scaled(Block):
    """By a number of the instance."""

    def __init__(self, config):
        super().__init__(config)
        self.alpha = 1.0

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None] * self.alpha)
        return out


class Residual(Block):
    """The rows themselves are added, once an expert."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, (self.experts[index](x[token]) + x[token]) * weights[token, slot, None])
        return out


class FromHidden(Block):
    """What is added to is no zeros."""

    def experts_of(self, x, ids, weights):
        out = x.clone()
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None])
        return out


class Twice(Block):
    """Every row is added twice."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            token, slot = token.repeat(2), slot.repeat(2)
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None])
        return out


class Dropping(Block):
    """No expert takes more tokens than it has room for."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            token, slot = token[:13], slot[:13]
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None])
        return out


class Reversed(Block):
    """The experts stand in another order."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, self.experts[-index - 1](x[token]) * weights[token, slot, None])
        return out


class Before(Block):
    """The weights multiply what the experts are given."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, self.experts[index](x[token] * weights[token, slot, None]))
        return out


class Counting(Block):
    """Keeps count of what it has done."""

    def __init__(self, config):
        super().__init__(config)
        self.seen = 0

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            self.seen += token.numel()
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None])
        return out


class Leaving(Block):
    """What the loop leaves behind is used after it."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        hit = []
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            hit.append(token.numel())
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None])
        return out, hit


FLAG = False


class Flagged(Block):
    """A flag of the module decides."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            y = self.experts[index](x[token])
            out.index_add_(0, token, (y.tanh() if FLAG else y) * weights[token, slot, None])
        return out


class Noisy(Block):
    """Draws random numbers in the loop."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            noise = torch.rand(1)
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None] + 0 * noise)
        return out


class InPlace(Block):
    """Writes the result over the hidden states."""

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None])
        x.copy_(out)
        return x


class Plain(Block):
    """Two layers, no gate."""

    expert = Ungated

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None])
        return out


def doubled(method):
    def around(self, x, ids, weights):
        return method(self, x, ids, weights) * 2

    return around


class Decorated(Block):
    """Somebody's decorator is around it."""

    @doubled
    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for index in range(len(self.experts)):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, self.experts[index](x[token]) * weights[token, slot, None])
        return out
