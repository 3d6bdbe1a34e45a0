"""A step of training under torch.compile, and the fused ops of its graphs."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch

from npu_autopatch.verification import passes
from npu_autopatch.verification.choices import Choices
from npu_autopatch.verification.comparison import Pass, flat

COMPILED = "compiled"


def step(model: Any, batch: dict[str, Any]) -> Pass:
    """A forward and backward of a copy of `model`, compiled; the calls are the fused ops of all graphs.

    Graphs are taken by Dynamo and differentiated ahead of time, and run as they are: it is they that are verified, not
    the code that a compiler would make of them. Raises what the compiler raises.
    """
    # some seconds of imports
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    ops: Counter[str] = Counter()

    def keep(graph: torch.fx.GraphModule, examples: Any) -> Any:
        ops.update(str(n.target).split(".")[1] for n in graph.graph.nodes if str(n.target).startswith("npu."))
        return make_boxed_func(graph.forward)  # type: ignore[no-untyped-call]

    model = copy.deepcopy(model).train()
    batch = {**passes.labelled(model, passes.there(batch, model)), **passes.cached(model, False)}
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)  # type: ignore[no-untyped-call]
    compiled: Any = torch.compile(model, backend=backend)
    with torch.random.fork_rng(devices=[]):
        passes.seed()
        output = passes.stepped(compiled(**batch))
    torch._dynamo.reset()
    returned, kind = flat(output)
    return Pass(returned, kind, {name: p.grad for name, p in model.named_parameters()}, Choices(), ops)
