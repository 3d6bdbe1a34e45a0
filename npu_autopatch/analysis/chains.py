"""The chains by name, and what tells an op's kind."""

from __future__ import annotations

from npu_autopatch.analysis.recording import Op

EMBEDDING, TABLES, NORM, ADD_NORM, ADD = (
    "embedding",
    "masks and positions",
    "norm",
    "residual add and norm",
    "residual add",
)
QKV, ROPE, OUTPUT, OUTPUT_GATE = "QKV", "rope", "output projection", "output gate"
INDEXER, COMPRESSOR, LINEAR_ATTENTION, CONVOLUTION = (
    "indexer",
    "compressor",
    "linear attention",
    "causal convolution",
)
MLP, ROUTER, DISPATCH, EXPERTS, COMBINE, SHARED_GATE = (
    "MLP",
    "router",
    "dispatch",
    "experts",
    "combine",
    "shared expert gate",
)
HYPER, THINNED, HEAD, LOSS, OTHER = "hyper-connections", "dropout", "output head", "loss", "other"

_PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "_grouped_mm", "addmv", "mv")}
_PRODUCTS |= {"npu::npu_grouped_matmul"}
DROPOUT = "aten::native_dropout"
_ROW_NORM = {"aten::native_layer_norm", "aten::_fused_rms_norm"}


def product(op: Op) -> bool:
    """Whether it multiplies matrices."""
    return op.name in _PRODUCTS


def projects(op: Op) -> bool:
    """Whether it multiplies by a parameter."""
    return op.name in _PRODUCTS and bool(op.parameters)


def norms(op: Op) -> bool:
    """Whether it is a norm over the rows, or part of one."""
    return op.name in _ROW_NORM or op.within("rms_norm") is not None


def adds(op: Op) -> bool:
    """Whether it adds what the model computes."""
    return op.name == "aten::add" and not op.parameters
