"""The emulator promises of each op what the torch_npu wheel registers: schema, gradient, shapes and dtypes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch
from torch._subclasses import FakeTensorMode

from npu_autopatch import emulator, ops
from npu_autopatch.ops.capability import detect

from .accounting import counted
from .device import over, tensors
from .samples import samples_of

each_op = pytest.mark.parametrize("op", emulator.OPS, ids=lambda op: op.name)


def wheel_schema(name):
    base, _, overload = name.partition(".")
    schemas = torch._C._jit_get_schemas_for_operator(f"npu::{base}")
    (found,) = [schema for schema in schemas if schema.overload_name == overload]
    return found


def wheel_differentiates(name):
    """An autograd formula, and not one whose only purpose is to raise."""
    registered = torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "AutogradPrivateUse1")
    return registered and "AutogradErrorFallback" not in torch._C._dispatch_dump(f"npu::{name}")


def wheel_call(name, args, kwargs):
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.npu, base), overload or "default")(*args, **kwargs)


def described(result):
    return [(tuple(t.shape), t.dtype, t.device.type, t.is_contiguous()) for t in tensors(result)]


def put(place, calls):
    """The calls with every tensor passed through `place`."""

    def moved(value):
        return place(value) if isinstance(value, torch.Tensor) else value

    return [(over(moved, args), {name: over(moved, v) for name, v in kwargs.items()}) for args, kwargs in calls]


def to_meta(tensor):
    return tensor.to("meta")


def to_npu(tensor):
    return tensor.to("npu")


@each_op
def test_the_schema_is_the_wheels(op):
    assert str(torch._C.parse_schema(f"npu::{op.schema}")) == str(wheel_schema(op.name))


@each_op
def test_kernel_and_shapes_take_the_arguments_of_the_schema(op):
    names = [argument.name for argument in wheel_schema(op.name).arguments]
    for function in (op.kernel, op.shapes):
        assert list(inspect.signature(function).parameters) == names


@each_op
def test_there_is_a_formula_where_the_wheel_has_one(op):
    assert (op.backward is not None) == wheel_differentiates(op.name)


# Their Meta kernels in the wheel only raise, whatever they get: no compiler can trace them.
WITHOUT_META = {"npu_geglu_grad"}


@pytest.mark.parametrize("op", WITHOUT_META)
def test_what_the_wheel_cannot_trace_it_still_cannot(op):
    for args, kwargs in put(to_meta, samples_of(op)):
        with pytest.raises((RuntimeError, TypeError)):
            wheel_call(op, args, kwargs)


each_traced_op = pytest.mark.parametrize(
    "op", [op for op in emulator.OPS if op.name not in WITHOUT_META], ids=lambda op: op.name
)


@each_traced_op
def test_shapes_and_dtypes_are_those_of_the_wheels_meta_kernel(op):
    for args, kwargs in put(to_meta, samples_of(op.name)):
        assert described(op.shapes(*args, **kwargs)) == described(wheel_call(op.name, args, kwargs))


@each_traced_op
def test_the_device_returns_what_the_meta_kernel_promises(op):
    mode = FakeTensorMode()
    real = put(to_npu, samples_of(op.name))
    for (args, kwargs), (fake_args, fake_kwargs) in zip(real, put(mode.from_tensor, real), strict=True):
        with mode:
            promised = described(wheel_call(op.name, fake_args, fake_kwargs))
        assert described(wheel_call(op.name, args, kwargs)) == promised


@each_op
def test_the_device_computes_what_the_emulator_computes_in_one_launch(op):
    calls = samples_of(op.name)
    for (args, kwargs), (npu_args, npu_kwargs) in zip(calls, put(to_npu, calls), strict=True):
        want = tensors(op.kernel(*args, **kwargs))
        with counted() as counts:
            result = wheel_call(op.name, npu_args, npu_kwargs)
        torch.testing.assert_close([t.cpu() for t in tensors(result)], want, rtol=0, atol=0, equal_nan=True)
        launched = any(t.numel() for t in want)
        assert counts.launches == ({op.name.partition(".")[0]: 1} if launched else {})


def capabilities():
    modules = [importlib.import_module(f"{ops.__name__}.{m.name}") for m in pkgutil.iter_modules(ops.__path__)]
    return {m.__name__.rpartition(".")[2]: m.capability for m in modules if hasattr(m, "capability")}


@pytest.mark.parametrize("module", capabilities())
def test_what_our_ops_call_is_detected_as_available(module):
    found = capabilities()[module]()
    assert found.available, found.missing
    assert found.differentiable == wheel_differentiates(found.op)


def test_rms_norm_is_detected_as_differentiable():
    assert capabilities()["rms_norm"]().differentiable


@pytest.mark.parametrize(
    "name", ["npu_grouped_matmul", "npu_gemma_rms_norm", "npu_add_rms_norm", "npu_interleave_rope"]
)
def test_an_op_that_gives_no_gradient_is_detected_as_such(name):
    found = detect(name, ())
    assert found.available
    assert not found.differentiable


def test_what_the_wheel_lacks_is_named():
    assert "npu_of_tomorrow" in detect("npu_of_tomorrow", ()).missing
    assert "zeta" in detect("npu_rms_norm", ("gamma", "zeta")).missing
