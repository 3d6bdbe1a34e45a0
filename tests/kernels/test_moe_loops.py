"""Blocks that loop over a list of experts: served where the loop is their weighted sum, and left alone elsewhere."""

from __future__ import annotations

import copy
import importlib
import inspect
import traceback

import pytest
import torch
from peft.tuners.lora import LoraConfig
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from npu_autopatch import emulator
from npu_autopatch.kernels import probing, swiglu
from npu_autopatch.kernels.base import Match, Site
from npu_autopatch.kernels.moe import loops, tiny
from tests.counting import Fused
from tests.kernels import odd_loops
from tests.kernels.exact import InDouble, behind, error_in_ulps
from tests.kernels.odd import patched_copy

MODULE = "transformers.models.{0}.modeling_{0}"
# Every block of transformers 4.57.6 that loops over a list of gated MLPs; those of 5.x have their experts stacked.
SERVED = {
    "deepseek_v2": ["DeepseekV2MoE"],
    "deepseek_v3": ["DeepseekV3MoE"],
    "dots1": ["Dots1MoE"],
    "ernie4_5_moe": ["Ernie4_5_MoeSparseMoeBlock"],
    "flex_olmo": ["FlexOlmoSparseMoeBlock"],
    "glm4_moe": ["Glm4MoeMoE"],
    "glm4v_moe": ["Glm4vMoeTextMoE"],
    "hunyuan_v1_moe": ["HunYuanMoEV1Moe"],
    "jamba": ["JambaSparseMoeBlock"],
    "minimax": ["MiniMaxSparseMoeBlock"],
    "mixtral": ["MixtralSparseMoeBlock"],
    "olmoe": ["OlmoeSparseMoeBlock"],
    "phimoe": ["PhimoeSparseMoeBlock"],
    "qwen2_moe": ["Qwen2MoeSparseMoeBlock"],
    "qwen3_moe": ["Qwen3MoeSparseMoeBlock"],
    "qwen3_next": ["Qwen3NextSparseMoeBlock"],
    "qwen3_omni_moe": ["Qwen3OmniMoeThinkerTextSparseMoeBlock", "Qwen3OmniMoeTalkerTextSparseMoeBlock"],
}
REFUSED = {
    "longcat_flash": "its experts are of 2 kinds: LongcatFlashMLP, Identity",
    "nllb_moe": "its experts are in a dictionary, not in a list",
    "switch_transformers": "its experts are in a dictionary, not in a list",
    "vitpose_backbone": "its constructor names no gated MLP",
}
ODD = {
    "Masked": "forward",
    "Halves": "forward",
    "Kept": "forward",
    "Jittered": "forward",
    "Handed": "experts_of",
    "Sorted": "infer",
}


def sites(module):
    return {site.owner.__name__: site for site in loops.find(module)}


def proved(site):
    with probing.undisturbed():
        return loops.prove(site, ("npu", "cpu"))


def _loops_over_experts() -> bool:
    return bool(sites(importlib.import_module(MODULE.format("mixtral"))))


def _found():
    """The site of each block that must be served on this version, by name."""
    found = {f"odd.{name}": sites(odd_loops)[name] for name in ODD}
    if _loops_over_experts():
        for family, names in SERVED.items():
            here = sites(importlib.import_module(MODULE.format(family)))
            found.update({f"{family}.{name}": here[name] for name in names})
    return found


FOUND = _found()


@pytest.fixture(autouse=True, scope="module")
def emulated():
    emulator.install()


@pytest.fixture(scope="module")
def matches():
    """The match of each block, whose replacement is in its place."""
    found = {name: proved(site) for name, site in FOUND.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, match in found.items():
            patch.setattr(FOUND[name].owner, FOUND[name].attribute, match.replacement)
        yield found


def built(site, **given):
    with probing.undisturbed():
        return tiny.build(site.owner, **given).eval()


def drawn(site, block, dtype=torch.float32, scale=1.0, seed=0):
    """Inputs by keyword: hidden states alone, or with the routing where the function is handed it."""
    width = next(linear.in_features for linear in block.experts[0].children() if isinstance(linear, nn.Linear))
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, 7, width, generator=generator) * scale).to(dtype)
    function = inspect.unwrap(vars(site.owner)[site.attribute])  # the original's
    names = list(inspect.signature(function).parameters)[1:]
    if len(names) == 1:
        return {names[0]: x.view(14, width) if site.owner is odd_loops.Halves else x}
    order = ("weights", "hidden", "ids") if site.owner is odd_loops.Handed else ("hidden", "ids", "weights")
    scores = torch.rand(14, len(block.experts), generator=generator)
    weights, ids = scores.topk(3)
    given = {"hidden": x.view(14, width), "ids": ids, "weights": weights.to(dtype)}
    return dict(zip(names, (given[kind] for kind in order), strict=True))


def run(function, block, inputs, exactly=False):
    """Every floating output, and the gradient of each floating input and parameter, by name."""
    block = copy.deepcopy(block)
    block.double() if exactly else None
    given = {n: x.double() if exactly and x.is_floating_point() else x for n, x in inputs.items()}
    leaves = {n: x.clone().requires_grad_() for n, x in given.items() if x.is_floating_point()}
    fresh = {n: leaves[n] * 1 if n in leaves else x for n, x in given.items()}
    if exactly:
        with InDouble():
            outputs = function(block, **fresh)
    else:
        outputs = function(block, **fresh)
    outputs = list(outputs.values()) if isinstance(outputs, dict) else outputs
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    found = {f"output {index}": y for index, y in enumerate(outputs)}
    leaves.update((n, p) for n, p in block.named_parameters() if p.requires_grad)
    along = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(9)).to(outputs[0].dtype)
    if not outputs[0].requires_grad:
        return found
    gradients = torch.autograd.grad(outputs[0], list(leaves.values()), along, allow_unused=True)
    found.update({f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)})
    return found


def errors(site, match, block, dtype, scale, seed):
    """Of each output and gradient the largest error of the fused and of the original function, in ulps of its row."""
    original = match.replacement.__wrapped__
    for attempt in range(seed, seed + 100_000, 1000):
        inputs = drawn(site, block, dtype, scale, attempt)
        exact, theirs = run(original, block, inputs, exactly=True), run(original, block, inputs)
        if error_in_ulps(theirs["output 0"], exact["output 0"], dtype, by_row=True) < 64:
            break  # or else a token near a tie went to another expert in fp64
    mine = run(match.replacement, block, inputs)
    parts = []
    for name, right in exact.items():
        one, other = mine[name], theirs[name]
        if right is None or not right.any():
            assert one is None or not one.any(), name
            continue
        assert one.dtype is other.dtype and one.shape == other.shape, name
        pair = (error_in_ulps(y, right, dtype, by_row=True) for y in (one, other))
        parts.append((name, dtype, scale, *pair))
    return parts


class CallsBesides(TorchDispatchMode):
    """The names of the ops called, but for those of one namespace and what they call themselves."""

    def __init__(self, namespace):
        super().__init__()
        self.namespace, self.names = namespace, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != self.namespace:
            self.names.add(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))


def test_every_block_of_its_version_is_served(matches):
    assert {name: getattr(match, "reason", "") for name, match in matches.items()} == dict.fromkeys(FOUND, "")


def test_no_other_family_is_served():
    for family, reason in REFUSED.items():
        for site in sites(importlib.import_module(MODULE.format(family))).values():
            assert proved(site).reason.startswith(reason)


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FOUND)
def test_outputs_and_all_gradients_are_no_less_exact(name, dtype, scale, matches):
    site, match = FOUND[name], matches[name]
    block = built(site).to(dtype)
    if "ernie" in name:
        block.gate.float()  # as it is built, and as its forward wants it
        block.moe_statics.float()
    first = errors(site, match, block, dtype, scale, 0)
    assert behind(first, lambda seed: errors(site, match, block, dtype, scale, seed)) == []


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", FOUND)
def test_each_loop_is_three_grouped_products_forward_and_six_backward(name, training, matches):
    site = FOUND[name]
    block = built(site).train(training)
    listed = [p for expert in block.experts for p in expert.parameters()]
    linears = 2 if name == "odd.Halves" else 3
    biases = len(listed) // len(block.experts) - linears
    learns = name != "odd.Sorted"
    with Fused() as fused:
        run(matches[name].replacement, block, drawn(site, block))
    assert fused.calls["npu_grouped_matmul"] == (linears * 3 + biases if learns else linears)
    assert fused.calls["npu_moe_token_permute"] == fused.calls["npu_moe_token_unpermute"] == 1
    assert fused.calls["npu_geglu" if name == "odd.Halves" else "npu_swiglu"] == learns


@pytest.mark.parametrize("name", FOUND)
def test_what_is_returned_besides_the_sum_is_the_same_to_the_bit(name, matches):
    site = FOUND[name]
    block = built(site).train()
    inputs = drawn(site, block)
    runs = []
    for function in (matches[name].replacement.__wrapped__, matches[name].replacement):
        torch.manual_seed(5)
        found = run(function, block, inputs)
        runs.append((found, torch.get_rng_state()))
    (theirs, their_state), (mine, my_state) = runs
    assert torch.equal(their_state, my_state)
    assert theirs.keys() == mine.keys()
    for output in filter(lambda name: name.startswith("output") and name != "output 0", theirs):
        assert torch.equal(theirs[output], mine[output])
    size = theirs["output 0"].abs().max()
    assert (theirs["output 0"] - mine["output 0"]).abs().max() <= 1e-5 * size


@pytest.mark.parametrize("name", FOUND)
def test_a_patched_block_is_fused_where_models_call_it(name, matches):
    site = FOUND[name]
    block = built(site)
    inputs = drawn(site, block)
    with Fused() as fused, torch.no_grad():
        getattr(block, site.attribute)(**inputs)
    assert fused.calls["npu_grouped_matmul"] == (2 if name == "odd.Halves" else 3)
    assert not fused.calls["npu_swiglu"]  # a copy that only pays under gradients


# ---- each call, on blocks that every version has ----


@pytest.fixture
def handed(matches):
    """A block that is handed its routing, its fused function, and the original."""
    match = matches["odd.Handed"]
    return built(FOUND["odd.Handed"]), match.replacement, match.replacement.__wrapped__


def routed(block, ids, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    width = block.gate.in_features
    return {
        "scores": torch.rand(ids.shape, generator=generator).to(dtype),
        "tokens": torch.randn(ids.size(0), width, generator=generator).to(dtype),
        "chosen": ids,
    }


def calls(function, block, inputs):
    with Fused() as fused:
        result = function(block, **inputs)
    return fused.calls["npu_grouped_matmul"], result


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.detach().abs().max()))


IDS = {
    "one token": torch.tensor([[4, 0]]),
    "top 1": torch.tensor([[1], [0], [4], [1]]),
    "all to one": torch.full((6, 1), 2),
    "three unhit": torch.tensor([[1, 3], [3, 1], [1, 3]]),
    "int32": torch.tensor([[1, 3], [0, 1]], dtype=torch.int32),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_however_tokens_are_spread(ids, handed):
    block, fused, original = handed
    inputs = routed(block, ids)
    mine, theirs = run(fused, block, inputs), run(original, block, inputs)
    for name, right in theirs.items():
        if right is None:
            assert mine[name] is None or not mine[name].any(), name
        else:
            close(mine[name], right)


def test_an_expert_without_tokens_has_a_gradient_of_zeros(handed):
    block, fused, _ = handed
    inputs = routed(block, IDS["three unhit"])
    fused(block, **inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in block.experts.parameters())
    assert not block.experts[0].up_proj.weight.grad.any() and block.experts[1].up_proj.weight.grad.any()


def test_half_precision_with_routing_weights_in_fp32_returns_what_the_original_does(handed):
    block, fused, original = handed
    block.bfloat16()
    inputs = routed(block, IDS["three unhit"], torch.bfloat16) | {"scores": torch.rand(3, 2)}
    count, mine = calls(fused, block, inputs)
    assert count == 3 and mine.dtype is original(block, **inputs).dtype is torch.float32


def test_frozen_experts_have_no_gradient_products(handed):
    block, fused, _ = handed
    block.experts.requires_grad_(False)
    inputs = routed(block, IDS["three unhit"])
    inputs["tokens"].requires_grad_()
    with Fused() as counted:
        fused(block, **inputs).sum().backward()
    assert counted.calls["npu_grouped_matmul"] == 6


def hooked(add):
    return lambda block: getattr(block.experts[2].up_proj, add)(lambda *args: None)


def with_forward(module):
    module.forward = type(module).forward.__get__(module)


class Own(nn.Linear):
    """As quantised layers are."""

    def forward(self, x):
        return super().forward(x) * 1


def replaced(name, make):
    def change(block):
        old = getattr(block.experts[2], name)
        setattr(block.experts[2], name, make(old))

    return change


def swapped(block):
    block.experts[2] = odd_loops.Ungated(tiny.Size(8, {"hidden_size": block.gate.in_features}))


def strided(block):
    weight = block.experts[2].up_proj.weight
    block.experts[2].up_proj.weight = nn.Parameter(weight.detach().t().contiguous().t())


def half(block):
    block.experts[2].up_proj.half()


def lora(linear):
    layer = LoraLinear(linear, "default", LoraConfig(r=2), r=2, lora_alpha=4)
    nn.init.normal_(layer.lora_B["default"].weight)
    return layer


TURNED_AWAY = {
    "hook": hooked("register_forward_hook"),
    "pre-hook": hooked("register_forward_pre_hook"),
    "backward hook": hooked("register_full_backward_hook"),
    "hook on an expert": lambda block: block.experts[1].register_forward_hook(lambda *args: None),
    "forward of an instance": lambda block: with_forward(block.experts[1]),
    "forward of a layer": lambda block: with_forward(block.experts[1].down_proj),
    "subclass of linear": replaced("up_proj", lambda old: Own(old.in_features, old.out_features, bias=False)),
    "lora": replaced("up_proj", lora),
    "bias in one": replaced("up_proj", lambda old: nn.Linear(old.in_features, old.out_features)),
    "another expert": swapped,
    "another stride": strided,
    "another activation in one": replaced("act_fn", lambda old: nn.ReLU()),
    "a tuple": lambda block: setattr(block, "experts", nn.Sequential(*block.experts)),
}


@pytest.mark.parametrize("change", TURNED_AWAY.values(), ids=TURNED_AWAY)
def test_experts_that_are_no_longer_plain_run_as_they_did(change, handed):
    block, fused, original = handed
    change(block)
    inputs = routed(block, torch.tensor([[1, 3], [2, 1], [0, 4]]))
    count, mine = calls(fused, block, inputs)
    assert count == 0 and torch.equal(mine, original(block, **inputs))


def test_lora_on_one_expert_learns(handed):
    block, fused, _ = handed
    TURNED_AWAY["lora"](block)
    fused(block, **routed(block, torch.tensor([[1, 2], [2, 1]]))).sum().backward()
    assert block.experts[2].up_proj.lora_A["default"].weight.grad.any()


def test_an_activation_without_an_op_is_called_once_for_all(handed):
    block, fused, original = handed
    for expert in block.experts:
        expert.act_fn = nn.LeakyReLU(0.3)
    inputs = routed(block, torch.tensor([[1, 3], [2, 1], [0, 4]]))
    count, mine = calls(fused, block, inputs)
    assert count == 3
    close(mine, original(block, **inputs))
    block.experts[3].act_fn = nn.LeakyReLU(0.4)
    count, mine = calls(fused, block, inputs)
    assert count == 0 and torch.equal(mine, original(block, **inputs))


CALLS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a global hook": lambda: nn.modules.module.register_module_forward_hook(lambda *args: None),
}


@pytest.mark.parametrize("around", CALLS.values(), ids=CALLS)
def test_calls_that_are_left_to_the_original(around, handed):
    block, fused, _ = handed
    inputs = routed(block, IDS["one token"])
    with around():
        assert calls(fused, block, inputs)[0] == 0
    assert calls(fused, block, inputs)[0] == 3


def test_no_tokens_no_fusion(handed):
    block, fused, _ = handed
    count, result = calls(fused, block, routed(block, torch.empty(0, 2, dtype=torch.int64)))
    assert count == 0 and result.shape == (0, block.gate.in_features)


def test_inference_mode_is_fused(handed):
    block, fused, original = handed
    inputs = routed(block, IDS["top 1"])
    with torch.inference_mode():
        count, mine = calls(fused, block, inputs)
        assert count == 3
        close(mine, original(block, **inputs))


def test_the_forward_of_the_expert_class_replaced_by_others_is_honoured(handed, monkeypatch):
    block, fused, original = handed
    inputs = routed(block, IDS["top 1"])
    before = fused(block, **inputs)
    monkeypatch.setattr(odd_loops.MLP, "forward", lambda self, x: 2 * self.down_proj(x[:, :1] * self.up_proj(x)))
    count, mine = calls(fused, block, inputs)
    assert count == 0 and torch.equal(mine, original(block, **inputs)) and not torch.allclose(mine, before)


def test_an_expert_class_that_the_kernel_swiglu_serves_is_still_fused(handed, monkeypatch):
    block, fused, _ = handed
    with probing.undisturbed():
        match = swiglu.KERNEL.prove(Site("odd", "odd.MLP", odd_loops.MLP, "forward"), ("npu", "cpu"))
    match.replacement.__npu_autopatch__ = match.variant
    monkeypatch.setattr(odd_loops.MLP, "forward", match.replacement)
    assert calls(fused, block, routed(block, IDS["top 1"]))[0] == 3
    monkeypatch.setattr(odd_loops.Handed, "experts_of", odd_loops.Handed.experts_of.__wrapped__)
    assert isinstance(proved(sites(odd_loops)["Handed"]), Match)


def test_two_instances_of_other_sizes_in_one_process(handed):
    _, fused, original = handed
    for hidden, inner, count in ((16, 16, 4), (8, 40, 1), (24, 16, 128), (8, 16, 129)):
        block = built(FOUND["odd.Handed"], hidden_size=hidden, intermediate_size=inner, num_experts=count)
        inputs = routed(block, torch.arange(6).view(6, 1) % count)
        made, mine = calls(fused, block, inputs)
        assert made == (3 if count <= 128 else 0)  # the op takes a list of 128
        close(mine, original(block, **inputs))


def test_a_number_of_the_loop_that_is_not_as_proved_is_honoured(matches):
    match, block = matches["odd.Sorted"], built(FOUND["odd.Sorted"])
    inputs = {"x": torch.randn(4, block.gate.in_features), "topk_ids": torch.tensor([[1, 0]] * 4)}
    inputs["topk_weight"] = torch.rand(4, 2)
    assert calls(match.replacement, block, inputs)[0] == 3
    for attribute, value in (("ep_size", 2), ("ep_rank", 1), ("experts_per_rank", 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block, attribute, value)
            assert calls(lambda block, **given: _ran(match, block, given), block, inputs)[0] == 0
    kept, block = matches["odd.Kept"].replacement, built(FOUND["odd.Kept"])
    block.num_experts = 2
    assert calls(kept, block, {"x": torch.randn(1, 4, block.gate.in_features)})[0] == 0


def _ran(match, block, given):
    """Whatever the original does with such a number: it need not run."""
    try:
        return match.replacement(block, **given)
    except IndexError:
        return None


@pytest.fixture
def branching():
    """A block whose loop is in one branch and in a method that the other calls, both proved; a run of it."""
    both = {site.attribute: proved(site).replacement for site in loops.find(odd_loops) if _branches(site)}
    block = built(next(filter(_branches, loops.find(odd_loops))))
    with pytest.MonkeyPatch.context() as patch:
        for attribute, replacement in both.items():
            patch.setattr(odd_loops.Branching, attribute, replacement)
        yield block, {attribute: replacement.__wrapped__ for attribute, replacement in both.items()}


def _branches(site):
    return site.owner is odd_loops.Branching


@pytest.mark.parametrize("training", [True, False])
def test_a_loop_in_a_branch_is_fused_where_the_branch_is_taken(training, branching):
    block, originals = branching
    block.train(training)
    x = torch.randn(2, 3, block.gate.in_features)
    with Fused() as fused:
        mine = run(odd_loops.Branching.forward, block, {"hidden_states": x})
    assert fused.calls["npu_grouped_matmul"] == (9 if training else 3)  # in evaluation it does not learn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(odd_loops.Branching, "infer", originals["infer"])
        theirs = run(originals["forward"], block, {"hidden_states": x})
    for name, right in theirs.items():
        if right is None:
            assert mine[name] is None or not mine[name].any()
        else:
            close(mine[name], right)


def test_a_loop_that_reads_how_many_experts_a_token_has_is_held_to_it(branching, monkeypatch):
    block, originals = branching
    block.train()
    x = torch.randn(1, 3, block.gate.in_features)
    monkeypatch.setattr(block, "route", lambda x: (x, torch.ones(3, 2, dtype=torch.int64), torch.ones(3, 2)))
    raised = []
    for forward in (odd_loops.Branching.forward, originals["forward"]):
        with pytest.raises(IndexError) as error:
            forward(block, x)
        raised.append(str(error.value))
    assert raised[0] == raised[1]


def test_gradient_checkpointing_gives_the_same_gradients(matches):
    match, block = matches["odd.Masked"], built(FOUND["odd.Masked"])
    x = torch.randn(2, 3, block.gate.in_features, requires_grad=True)

    def forward(x):
        return match.replacement(block, x)["hidden"]

    expected = torch.autograd.grad(forward(x).square().sum(), [x, *block.parameters()])
    again = checkpoint(forward, x, use_reentrant=False).square().sum()
    for one, other in zip(torch.autograd.grad(again, [x, *block.parameters()]), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("training", [False, True])
def test_a_served_block_compiles_to_one_graph(name, training, matches):
    torch._dynamo.reset()
    site, replacement = FOUND[name], matches[name].replacement
    block = built(site)
    inputs = drawn(site, block)
    block.requires_grad_(training)
    compiled = torch.compile(replacement, fullgraph=True, backend="aot_eager")

    def total(function):
        result = function(block, **{n: x.clone() for n, x in inputs.items()})
        result = list(result.values()) if isinstance(result, dict) else result
        return (result[0] if isinstance(result, (tuple, list)) else result).square().sum()

    with Fused() as fused:
        expected = total(replacement)
    assert fused.calls["npu_grouped_matmul"]
    found = total(compiled)
    close(found, expected)
    if training and found.requires_grad:
        parameters = list(block.experts.parameters())
        for one, other in zip(*(torch.autograd.grad(y, parameters) for y in (found, expected)), strict=True):
            close(one, other)
    torch._dynamo.reset()


def test_nothing_of_what_only_fed_the_loop_is_computed(matches):
    match, block = matches["odd.Sorted"], built(FOUND["odd.Sorted"])
    inputs = {"x": torch.randn(4, block.gate.in_features), "topk_ids": torch.tensor([[1, 0]] * 4)}
    with CallsBesides("npu") as others:
        match.replacement(block, **inputs, topk_weight=torch.rand(4, 2))
    assert not others.names & {"sort", "scatter_", "sum", "index", "cat", "nonzero", "item"}


def test_the_replacement_stands_where_the_original_does(matches):
    for match in matches.values():
        original = match.replacement.__wrapped__
        assert inspect.signature(match.replacement) == inspect.signature(original)
        assert match.replacement.__globals__ is original.__globals__
        assert match.replacement.__code__.co_filename == original.__code__.co_filename
        assert match.replacement.__qualname__ == original.__qualname__


def test_an_error_in_the_routing_is_shown_at_its_line(matches):
    match, block = matches["odd.Jittered"], built(FOUND["odd.Jittered"])
    block.gate = nn.Linear(3, 5)
    places = []
    for function in (match.replacement, match.replacement.__wrapped__):
        with pytest.raises(RuntimeError) as raised:
            function(block, torch.randn(2, 3, block.experts[0].up_proj.in_features))
        frames = traceback.extract_tb(raised.value.__traceback__)
        places.append([(f.filename, f.lineno, f.name, f.line) for f in frames if "odd_loops" in f.filename])
    assert places[0] == places[1] != []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Clamped", "its sum over experts is not that of grouped products in float32"),
        ("Scaled", "its loop depends on self.alpha"),
        ("Residual", "what its loop adds up is not each token's experts, weighted"),
        ("FromHidden", "what its loop adds up is not each token's experts, weighted"),
        ("Twice", "what its loop adds up is not each token's experts, weighted"),
        ("Dropping", "its sum over experts is not that of grouped products in float32"),
        ("Reversed", "what its loop adds up is not each token's experts, weighted"),
        ("Before", "what its loop adds up is not each token's experts, weighted"),
        ("Counting", "its loop depends on self.seen"),
        ("Leaving", "what its loop does to hit is used after it"),
        ("Flagged", "its loop depends on FLAG of its module"),
        ("Noisy", "its loop draws random numbers in float32, training"),
        ("InPlace", "its loop writes to the hidden states in float32, training"),
        ("Plain", "its experts are no gated MLPs: Ungated: "),
    ],
)
def test_a_loop_that_does_anything_else_is_refused(name, reason):
    assert proved(sites(odd_loops)[name]).reason.startswith(reason)


def test_what_an_instance_has_kept_of_its_class_is_undone_with_it(handed, monkeypatch):
    block, _, original = handed
    block.experts_of = block.experts_of  # as transformers does once it has recorded what a router returns
    inputs = routed(block, IDS["top 1"])
    assert calls(lambda block, **given: block.experts_of(**given), block, inputs)[0] == 3
    monkeypatch.setattr(odd_loops.Handed, "experts_of", original)
    count, mine = calls(lambda block, **given: block.experts_of(**given), block, inputs)
    assert count == 0 and torch.equal(mine, original(block, **inputs))


def test_undo_restores_every_block():
    names = {f"odd.{name}" for name in ODD}
    with patched_copy(odd_loops, "moe") as of:
        rows = {name: of(getattr(odd_loops, name)) for name in ODD}
        assert {row.name for row, _ in rows.values() if row.state == "patched"} == names
        block = built(FOUND["odd.Kept"])
        block.__class__ = rows["Kept"][1]
        assert hasattr(block.forward, "__wrapped__")
    assert not hasattr(block.forward, "__wrapped__")


def test_a_function_whose_source_is_not_what_runs_is_refused(monkeypatch):
    handed = inspect.unwrap(odd_loops.Handed.experts_of)
    monkeypatch.setattr(odd_loops.Handed, "experts_of", handed)
    other = handed.__code__.replace(co_firstlineno=odd_loops.Twice.experts_of.__code__.co_firstlineno)
    monkeypatch.setattr(handed, "__code__", other)
    assert proved(sites(odd_loops)["Handed"]).reason == "its source cannot be read, or is not what is run"


def test_modules_without_experts_are_left_in_peace():
    assert list(loops.find(F)) == []
    assert list(loops.find(importlib.import_module(MODULE.format("llama")))) == []
