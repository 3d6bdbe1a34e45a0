"""Which chain each op of a pass belongs to, told from what marks it, what it computes and where its result goes.

Sites, attention as one function and caches are marked as they are called. The rest follows from the flow: a product
with a parameter from which an attention core is reached projects q, k or v; what leads to the choice of experts is the
router. No name of a module or model decides anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from npu_autopatch.analysis.layers import layer_of
from npu_autopatch.analysis.recording import CACHE, CORE, Op, Recording

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
HYPER, HEAD, LOSS, OTHER = "hyper-connections", "output head", "loss", "other"

_SITES = {"rms_norm": NORM, "rope": ROPE, "swiglu": MLP, CORE: CORE, CACHE: CACHE}
_PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "_grouped_mm", "addmv", "mv")}
_PRODUCTS |= {"npu::npu_grouped_matmul"}
_SOFTMAX = {"aten::_softmax", "aten::_safe_softmax"}
_LAYER_NORM = {"aten::native_layer_norm", "aten::_fused_rms_norm", "aten::native_group_norm"}
_MIXES = {"aten::convolution", "aten::cumsum", "aten::cumprod"}
_COPIES = {f"aten::{name}" for name in ("clone", "copy_", "cat", "_to_copy", "constant_pad_nd", "stack", "contiguous")}


@dataclass(frozen=True)
class Place:
    """Where an op belongs: its layer (empty outside), the path of its block, and its chain."""

    layer: str
    block: str
    chain: str


def placed(recording: Recording) -> list[Place]:
    """The place of each op of `recording`; of an op in the backward, that of its op in the forward."""
    places = _Places(recording).found()
    return [places[op.index if op.forward is None else op.forward] for op in recording.ops]


def product(op: Op) -> bool:
    """Whether it multiplies matrices."""
    return op.name in _PRODUCTS


def projects(op: Op) -> bool:
    """Whether it multiplies by a parameter."""
    return op.name in _PRODUCTS and bool(op.parameters)


class _Places:
    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.ops = {op.index: op for op in recording.ops if op.forward is None}
        self.chain: dict[int, str] = {}
        self.block: dict[int, str] = {}
        self.readers: dict[int, list[int]] = {index: [] for index in self.ops}
        for op in self.ops.values():
            for source in op.sources:
                if source in self.readers:
                    self.readers[source].append(op.index)
        self.layers: dict[str, list[Op]] = {}
        for op in self.ops.values():
            self.layers.setdefault(layer_of(op.module), []).append(op)

    def found(self) -> dict[int, Place]:
        for op in self.ops.values():
            if op.scopes and op.scopes[-1].kind in _SITES and not _one_expert(op):
                self.put([op], _SITES[op.scopes[-1].kind], op.scopes[-1].module)
            elif op.name in _LAYER_NORM:
                self.put([op], NORM, op.module)
        for layer, ops in self.layers.items():
            if layer:
                self.in_layer(layer, ops)
        self.outside()
        self.by_flow()
        self.with_norms()
        places = {}
        for index, op in self.ops.items():
            layer = layer_of(op.module)
            block = self.block.get(index, op.module)
            places[index] = Place(layer, block.removeprefix(layer).removeprefix("."), self.chain.get(index, OTHER))
        return places

    def put(self, ops: Iterable[Op], chain: str, block: str) -> None:
        """Put those of `ops` that have no chain yet into `chain`."""
        for op in ops:
            if op.index not in self.chain:
                self.chain[op.index], self.block[op.index] = chain, block

    def free(self, ops: Iterable[Op]) -> list[Op]:
        return [op for op in ops if op.index not in self.chain]

    def before(self, ops: Iterable[Op]) -> set[int]:
        """All that `ops` depend on."""
        found: set[int] = set()
        waiting = [source for op in ops for source in op.sources]
        while waiting:
            index = waiting.pop()
            if index not in found and index in self.ops:
                found.add(index)
                waiting += self.ops[index].sources
        return found

    def after(self, ops: Iterable[Op]) -> set[int]:
        """All that depends on `ops`."""
        found: set[int] = set()
        waiting = [reader for op in ops for reader in self.readers[op.index]]
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                waiting += self.readers[index]
        return found

    def in_layer(self, layer: str, ops: list[Op]) -> None:
        """The blocks of one layer, each with what belongs to it, and then the layer's own code."""
        for cores in self.cores(ops):
            home = cores[0].module
            self.put(cores, CORE, home)
            self.attention(home, [op for op in ops if _in(op.module, home)])
        for experts in _calls(ops, "moe"):
            self.experts(experts, ops)
        for block, own in _children(layer, ops):
            self.block_without_core(block, own)
        own = [op for op in self.free(ops) if op.module == layer or self.streams(op.module)]
        if self.streams(layer):
            self.put(own, HYPER, layer)
        self.put((op for op in own if projects(op)), MLP, layer)
        self.put((op for op in own if op.name == "aten::add" and not op.parameters), ADD, layer)

    def streams(self, module: str) -> bool:
        """Whether hidden states come in several streams there: a dimension more than [batch, tokens, width]."""
        return len(self.recording.inputs.get(module, ())) > 3

    def cores(self, ops: list[Op]) -> Iterator[list[Op]]:
        """Attention: as one function, or the ops from the product before a softmax to the one after it."""
        marked = [op for op in ops if op.within(CORE)]
        for module in dict.fromkeys(op.module for op in marked):
            yield [op for op in marked if op.module == module]
        for softmax in self.free(ops):
            if softmax.name not in _SOFTMAX:
                continue
            here = [op for op in ops if op.module == softmax.module]
            pairs = [op for op in here if product(op) and not projects(op)]
            behind, ahead = self.before([softmax]), self.after([softmax])
            scores = [op.index for op in pairs if op.index in behind]
            mixed = [op.index for op in pairs if op.index in ahead]
            if scores and mixed:
                yield [op for op in here if scores[-1] <= op.index <= mixed[0]]

    def attention(self, home: str, ops: list[Op]) -> None:
        """What stands around a core, in the module it runs in and those within."""
        chooses = {op.module for op in ops if op.name == "aten::topk" and op.module != home}
        for module in chooses:
            self.put((op for op in ops if _in(op.module, module)), INDEXER, module)
        for module in dict.fromkeys(op.module for op in self.free(ops) if op.module != home):
            if any(_in(op.module, module) and op.module != module for op in ops):
                self.put((op for op in ops if _in(op.module, module)), COMPRESSOR, module)
        core = [op for op in ops if self.chain.get(op.index) == CORE]
        leads, follows = self.before(core), self.after(core)
        free = self.free(ops)
        self.put((op for op in free if projects(op) and op.index in leads), QKV, home)
        self.put((op for op in free if projects(op)), OUTPUT, home)
        gate = (op for op in self.free(ops) if op.index in follows and op.name not in _COPIES)
        self.put(gate, OUTPUT_GATE, home)
        self.put((op for op in self.free(ops) if op.name == "aten::sigmoid"), OUTPUT_GATE, home)

    def experts(self, call: list[Op], ops: list[Op]) -> None:
        """One call of experts, or of a whole block with them; and what leads to it and follows in its block."""
        scope = call[0].within("moe")
        module = scope.module if scope else ""
        chosen = [op for op in call if op.name == "aten::topk"]
        block = module if chosen else module.rpartition(".")[0]
        own = self.free(call)
        if chosen:
            leads = self.before(chosen)
            self.put((op for op in own if op.index in leads or op in chosen), ROUTER, block)
        products = [op.index for op in self.free(own) if projects(op)]
        first, last = (products[0], products[-1]) if products else (call[-1].index, call[-1].index)
        # what only prepares a parameter belongs to what reads it
        prepares = [op for op in own if op.shapes and len(op.parameters) == len(op.shapes)]
        for op in (op for op in self.free(own) if op not in prepares):
            self.put([op], DISPATCH if op.index < first else EXPERTS if op.index <= last else COMBINE, block)
        within = {op.index for op in call}
        beside = [op for op in ops if _in(op.module, block) and op.index not in within]
        leads, follows = self.before(call), self.after(call)
        self.put((op for op in beside if op.index in leads), ROUTER, block)
        self.put((op for op in beside if op.index in follows), COMBINE, block)
        joined = self.before(op for op in ops if op.index in follows and _in(op.module, block))
        self.put((op for op in beside if op.index in joined), SHARED_GATE, block)

    def block_without_core(self, block: str, ops: list[Op]) -> None:
        """A part of a layer: it mixes tokens without attention, chooses experts in its own way, or is an MLP."""
        if any(self.chain.get(op.index) in (CORE, EXPERTS) for op in ops):
            return
        free = self.free(ops)
        if self.streams(block):
            self.put(free, HYPER, block)
        elif any(op.name in _MIXES or (product(op) and not projects(op)) for op in free):
            products = [op for op in free if projects(op)]
            self.put((op for op in free if op.name == "aten::convolution"), CONVOLUTION, block)
            self.put(products[:-1], QKV, block)
            self.put(products[-1:], OUTPUT, block)
            self.put(free, LINEAR_ATTENTION, block)
        elif chosen := [op for op in free if op.name == "aten::topk"]:
            leads = self.before(chosen)
            self.put((op for op in free if op.index in leads or op in chosen), ROUTER, block)
            self.put(free, EXPERTS, block)
        elif any(projects(op) for op in free):
            self.put(free, MLP, block)

    def outside(self) -> None:
        """What stands before the layers, after them, and behind the head."""
        ops = self.layers.get("", [])
        inner = [op.index for layer, own in self.layers.items() if layer for op in own]
        first, last = (min(inner), max(inner)) if inner else (0, 0)
        self.put((op for op in ops if op.name == "aten::embedding" and op.index < first), EMBEDDING, "")
        self.put((op for op in ops if op.index < first), TABLES, "")
        behind = [op for op in ops if op.index > last]
        heads = [op for op in behind if projects(op) and op.module]
        if heads:
            self.put(heads[-1:], HEAD, heads[-1].module)
            self.put((op for op in behind if op.index > heads[-1].index), LOSS, "")
        self.put((op for op in behind if self.streams(op.module)), HYPER, behind[0].module if behind else "")

    def by_flow(self) -> None:
        """The rest belongs where its result is read, or else where it was made."""
        for index in sorted(self.ops, reverse=True):
            if index not in self.chain:
                same = [r for r in self.readers[index] if r in self.chain and self.beside(index, r)]
                if same:
                    self.put([self.ops[index]], self.chain[same[0]], self.block[same[0]])
        for index in sorted(self.ops):
            if index not in self.chain:
                same = [s for s in self.ops[index].sources if s in self.chain and self.beside(index, s)]
                if same:
                    self.put([self.ops[index]], self.chain[same[-1]], self.block[same[-1]])

    def beside(self, one: int, other: int) -> bool:
        return layer_of(self.ops[one].module) == layer_of(self.ops[other].module)

    def with_norms(self) -> None:
        """An addition that a norm reads first, and that norm, are one chain: of the norm's block where it can be."""
        first: dict[str, str] = {}  # by layer the block of the norm that reads what the layer before has added
        across: list[int] = []
        for call in _calls(self.ops.values(), "rms_norm"):
            within = {op.index for op in call}
            read = [source for op in call for source in op.sources if source not in within]
            added = [source for source in read if self.chain.get(source) in (ADD, ADD_NORM)]
            layer = layer_of(call[0].module)
            if not added:
                continue
            for op in call:
                self.chain[op.index] = ADD_NORM
            for source in added:
                self.chain[source] = ADD_NORM
                if layer_of(self.ops[source].module) == layer:
                    self.block[source] = call[0].module
                else:
                    first.setdefault(layer, call[0].module)
                    across.append(source)
        for source in across:
            layer = layer_of(self.ops[source].module)
            self.block[source] = first.get(layer, layer)


def _calls(ops: Iterable[Op], kind: str) -> list[list[Op]]:
    """The ops of each call of that kind."""
    found: dict[int, list[Op]] = {}
    for op in ops:
        if scope := op.within(kind):
            found.setdefault(scope.number, []).append(op)
    return list(found.values())


def _one_expert(op: Op) -> bool:
    """Whether it runs in one of a list of modules within a block of experts: those are no MLPs of their own."""
    block = op.within("moe")
    return block is not None and bool(re.search(r"\.\d+(\.|$)", op.module.removeprefix(block.module)))


def _children(layer: str, ops: list[Op]) -> list[tuple[str, list[Op]]]:
    """The modules directly within a layer, with their ops."""
    found: dict[str, list[Op]] = {}
    for op in ops:
        name = op.module.removeprefix(layer).removeprefix(".").partition(".")[0]
        if name:
            found.setdefault(f"{layer}.{name}", []).append(op)
    return list(found.items())


def _in(path: str, home: str) -> bool:
    return path == home or path.startswith(f"{home}.")
