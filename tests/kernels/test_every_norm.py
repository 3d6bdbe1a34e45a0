"""Every norm of the installed transformers: recognised as what it is, and fused no less exactly than it was."""

from __future__ import annotations

import importlib
import json
import pathlib
from copy import deepcopy

import pytest
import torch
import transformers

import npu_autopatch
from npu_autopatch.kernels import probing
from tests.kernels.exact import CallsOf, InDouble, error_in_ulps

CENSUS = pathlib.Path(__file__).parent.parent / "data" / f"norms-{transformers.__version__}.json"
MODELS = pathlib.Path(transformers.__file__).parent / "models"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZE = 40
# classes that have a row here although no fused op can serve them, with what the reason must say
REFUSED = {
    "axk2.AXK2GatedRMSNorm": "normalises nothing",
    "voxtral_realtime.VoxtralRealtimeTextAdaRmsNorm": "normalises nothing",
    "vibevoice.VibeVoiceDiffusionHeadFinalLayer": "built of other modules (Linear)",
    "hy_v4.HYV4UnweightedRMSNorm": "returns shape (2, 3, 1)",
    "hy_v4_vl.HYV4VLUnweightedRMSNorm": "returns shape (2, 3, 1)",
    "dory.DoryL2Norm": "the root of the sum of squares",
    "muse_spark.MuseSparkTextInputScaledRMSNorm": "multiplies by its weight before the norm",
    "deprecated.mega.MegaRMSNorm": "normalises nothing",
    "deprecated.mega.MegaScaleNorm": "its forward fails",
}
# settings of a constructor, other than its defaults, that have a fused case of their own; the rest run the original
ALSO_FUSED = {
    ("Gemma3nRMSNorm", "with_scale"),
    ("Gemma4RMSNorm", "with_scale"),
    ("FalconH1RMSNormGated", "norm_before_gate"),
}


def modeling_modules() -> list[str]:
    files = sorted(MODELS.glob("**/modeling_*.py"))
    names = [".".join(file.relative_to(MODELS).with_suffix("").parts) for file in files]
    return [f"transformers.models.{name}" for name in names if not name.startswith("auto.")]


@pytest.fixture(scope="module")
def swept():
    """The rows of every modeling module, and class, original and fused forward of each patched site."""
    modules = {}
    for name in modeling_modules():
        try:
            modules[name] = importlib.import_module(name)
        except Exception:  # an optional dependency is not installed
            continue
    classes = {(name, cls.__name__): cls for name, module in modules.items() for cls in probing.classes(module)}
    originals = {cls: cls.forward for cls in classes.values()}
    with npu_autopatch.patched(kernels="rms_norm", backend="emulate") as report:
        rows = {row.name: row for row in report.sites if row.module in modules and row.kernel == "rms_norm"}
        fused = {cls: cls.forward for cls in originals}
    sites = {}
    for row in rows.values():
        if row.state == "patched":
            cls = classes[row.module, row.name.rpartition(".")[2]]
            sites[row.name] = (cls, originals[cls], fused[cls])
    return rows, sites


@pytest.mark.skipif(not CENSUS.exists(), reason=f"no census for transformers {transformers.__version__}")
def test_each_norm_of_the_census_is_recognised_as_its_variant(swept):
    rows, _ = swept
    wrong = []
    for site, entry in json.loads(CENSUS.read_text()).items():
        row = rows.get(site)
        if site in REFUSED:
            if row is None or row.state != "refused" or REFUSED[site] not in row.reason:
                wrong.append((site, row))
        elif row is None or row.state != "patched" or not _same_variant(entry["bucket"], row.variant):
            wrong.append((site, entry["bucket"], row and (row.state, row.variant, row.reason)))
    assert not wrong, "\n".join(map(str, wrong))


def _same_variant(bucket: str, variant: str) -> bool:
    bucket = bucket.removeprefix("llama:").replace("_w_grouped", "_grouped").removesuffix("_w")
    if bucket == "other:unprobed":  # the census did not run these; what they compute was read from their code
        return variant in ("round_then_mul", "round_then_mul or no_upcast")
    return variant.split(" or ")[0] == bucket


def test_coverage_reaches_its_figures(swept):
    least = {"4.51.3": 58, "4.57.6": 107, "5.0.0": 121, "5.24.0": 211}.get(transformers.__version__, 58)
    assert len(swept[1]) >= least


def test_every_refused_site_says_why(swept):
    assert not [row for row in swept[0].values() if row.state != "patched" and not row.reason]


def test_values_gradients_and_dtypes_are_those_of_the_original(swept):
    """fp32, bf16, fp16, at scale 1 and 60: error against fp64 at most one ulp above the original's."""
    wrong = []
    for site, (cls, original, fused) in swept[1].items():
        for settings in _settings(cls, swept[0][site].variant):
            for dtype in DTYPES:
                for scale in (1.0, 60.0):
                    wrong += [
                        (site, settings, dtype, scale, *w)
                        for w in _worse(cls, original, fused, settings, dtype, dtype, scale)
                    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_output_dtype_for_every_pair_of_input_and_weight_dtypes(swept):
    wrong = []
    for site, (cls, original, fused) in swept[1].items():
        for settings in _settings(cls, swept[0][site].variant):
            for x in DTYPES:
                for weight in DTYPES:
                    if x is not weight:
                        wrong += [
                            (site, settings, x, weight, *w)
                            for w in _worse(cls, original, fused, settings, x, weight, 1.0)
                        ]
    assert not wrong, "\n".join(map(str, wrong))


def test_any_shape_the_original_takes(swept):
    """Ranks 1 to 5, one token, empty, and strides of every kind: the same shape and values, or the same error."""
    wrong = []
    for site, (cls, original, fused) in swept[1].items():
        norm = _instance(cls, {})
        inputs = [
            torch.randn(*lead, SIZE)
            for lead in ((), (3,), (2, 1), (1, 2), (1, 1), (2, 5), (2, 3, 4), (2, 3, 2, 2), (0, 3))
        ]
        inputs += [
            torch.randn(2, SIZE, 3).transpose(1, 2),
            torch.randn(2, 3, 2 * SIZE)[..., ::2],
            torch.randn(1, SIZE).expand(4, SIZE),
        ]
        for x in inputs:
            args = (x, torch.randn(x.shape)) if original.__code__.co_argcount == 3 else (x,)
            got, expected = _outcome(fused, norm, args), _outcome(original, norm, args)
            same = type(got) is type(expected)
            if same and isinstance(got, torch.Tensor):
                same = got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-5, atol=1e-6)
            if not same:
                wrong.append((site, tuple(x.shape), x.stride(), got, expected))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_gated_norm_without_its_gate_is_the_original(swept):
    wrong = []
    for site, (cls, original, fused) in swept[1].items():
        if original.__code__.co_argcount == 3:
            norm, x = _instance(cls, {}), torch.randn(2, 3, SIZE)
            got, expected = _outcome(fused, norm, (x, None)), _outcome(original, norm, (x, None))
            if not (torch.equal(got, expected) if isinstance(expected, torch.Tensor) else type(got) is type(expected)):
                wrong.append((site, got, expected))
    assert not wrong, "\n".join(map(str, wrong))


def _outcome(forward, norm, args):
    try:
        return forward(norm, *args)
    except Exception as error:
        return error


def _settings(cls, variant: str) -> list[dict]:
    """Every switch of the constructor both ways, and two groups where the variant has groups."""
    switches = (
        [{}, *({name: not default} for name, default in probing.switches(cls).items())] if " or " in variant else [{}]
    )
    return switches + [{**one, "__groups__": True} for one in switches if "grouped" in variant]


def _instance(cls, settings: dict):
    arguments = {name: value for name, value in settings.items() if name != "__groups__"}
    norm = probing.build(cls, SIZE, **arguments)
    if "__groups__" in settings:
        name = next(name for name in ("n_groups", "group_size") if hasattr(norm, name))
        setattr(norm, name, 2 if name == "n_groups" else SIZE // 2)
    for name in ("eps", "variance_epsilon"):
        if isinstance(getattr(norm, name, None), probing.Anything):  # a configuration's
            setattr(norm, name, 1e-5)
    generator = torch.Generator().manual_seed(5)
    for tensor in norm.parameters():
        tensor.data = torch.randn(tensor.shape, generator=generator)
    return norm


def _worse(cls, original, fused, settings, x_dtype, weight_dtype, scale) -> list[tuple]:
    """What of output and gradients is of another dtype, or more than one ulp less exact than the original's."""
    norm = _instance(cls, settings).to(weight_dtype)
    generator = torch.Generator().manual_seed(6)
    tensors = [torch.randn(2, 7, SIZE, generator=generator) for _ in range(original.__code__.co_argcount - 1)]
    tensors = [(tensor * (scale if i == 0 else 1.0)).to(x_dtype) for i, tensor in enumerate(tensors)]
    incoming = torch.randn(2, 7, SIZE, generator=generator)
    theirs = _run(norm, original, tensors, incoming)
    incoming = incoming.to(theirs[0].dtype)
    with CallsOf("npu_rms_norm") as calls:
        mine = _run(norm, fused, tensors, incoming)
    proved = not settings or "__groups__" in settings or (cls.__name__, *settings) in ALSO_FUSED
    if calls.count != 1 and (proved or calls.count):
        return [("not fused", calls.count)]
    with InDouble():
        exact = _run(deepcopy(norm).double(), original, [t.double() for t in tensors], incoming.double())
    found = []
    for part, got, expected, right in zip(
        ("output", "gradient of x", "gradient", "gradient"), mine, theirs, exact, strict=False
    ):
        if got.dtype is not expected.dtype or got.shape != expected.shape:
            found.append((part, got.dtype, expected.dtype))
        elif torch.isfinite(expected).all():  # where the original overflows there is nothing to be like
            by_row = part != "output"
            errors = [error_in_ulps(y, right, expected.dtype, by_row) for y in (got, expected)]
            if errors[0] > errors[1] + 1:
                found.append((part, *errors))
    return found


def _run(norm, forward, tensors, incoming):
    """The output, then the gradients of the inputs and of the parameters."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = forward(norm, *leaves)
    needed = [*leaves, *norm.parameters()]
    gradients = torch.autograd.grad(output, needed, incoming.to(output.dtype), allow_unused=True)
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]
