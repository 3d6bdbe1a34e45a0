"""Which chain each op of a pass belongs to, told from what marks it, what it computes and where its result goes.

Sites, attention as one function and caches are marked as they are called. The rest follows from the flow: a product
with a parameter from which an attention core is reached projects q, k or v; what leads to the choice of experts is the
router. No name of a module or model decides anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from npu_autopatch.analysis import chains
from npu_autopatch.analysis.chains import DROPOUT, adds, product, projects
from npu_autopatch.analysis.flow import Flow
from npu_autopatch.analysis.grouping import calls, children, each_norm, inside, one_expert, sublayers
from npu_autopatch.analysis.layers import layer_of
from npu_autopatch.analysis.recording import CACHE, CORE, Op, Recording

_SITES = {"rope": chains.ROPE, "swiglu": chains.MLP, CORE: CORE, CACHE: CACHE}
_SOFTMAX = {"aten::_softmax", "aten::_safe_softmax"}
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


class _Places:
    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.training = any(op.forward is not None for op in recording.ops)
        self.flow = Flow(recording)
        self.ops = self.flow.ops
        self.chain: dict[int, str] = {}
        self.block: dict[int, str] = {}
        self.layers: dict[str, list[Op]] = {}
        numbered = {layer_of(op.module) for op in self.ops.values() if projects(op)}
        for op in self.ops.values():
            layer = layer_of(op.module)
            # a list of modules without weights is none of layers: tables of positions for each kind of attention
            self.layers.setdefault(layer if layer in numbered else "", []).append(op)

    def found(self) -> dict[int, Place]:
        normed = {op.index for call in each_norm(self.ops.values()) for op in call}
        for op in self.ops.values():
            kind, home = (op.scopes[-1].kind, op.scopes[-1].module) if op.scopes else ("", op.module)
            if op.index in normed or op.name == "aten::native_group_norm":
                self.put([op], chains.NORM, home)
            elif kind in _SITES and not one_expert(op):
                self.put([op], _SITES[kind], home)
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
            places[index] = Place(
                layer, block.removeprefix(layer).removeprefix("."), self.chain.get(index, chains.OTHER)
            )
        return places

    def put(self, ops: Iterable[Op], chain: str, block: str) -> None:
        """Put those of `ops` that have no chain yet into `chain`."""
        for op in ops:
            if op.index not in self.chain:
                self.chain[op.index], self.block[op.index] = chain, block

    def free(self, ops: Iterable[Op]) -> list[Op]:
        return [op for op in ops if op.index not in self.chain]

    def in_layer(self, layer: str, ops: list[Op]) -> None:
        """The blocks of one layer, each with what belongs to it, and then the layer's own code."""
        for cores in self.cores(ops):
            home = cores[0].module
            self.put(cores, CORE, home)
            self.attention(home, [op for op in ops if inside(op.module, home)], ops)
        for experts in calls(ops, "moe"):
            self.experts(experts, ops)
        inner = sublayers(layer, ops)
        for home in (*inner, layer):
            here = [op for op in ops if inside(op.module, home)]
            blocks = [(block, own) for block, own in children(home, here) if not any(inside(it, block) for it in inner)]
            for block, own in blocks:
                self.block_without_core(block, own)
            self.join(home, blocks)
            self.own(home, [op for op in self.free(here) if op.module == home or self.streams(op.module)])
        for op in self.free(ops):
            if projects(op):
                self.put([op], chains.MLP, op.module.rpartition(".")[0])

    def own(self, home: str, ops: list[Op]) -> None:
        """What the code of a layer, or of a part of one, runs itself."""
        if self.streams(home):
            self.put(ops, chains.HYPER, home)
        self.put((op for op in ops if projects(op)), chains.MLP, home)
        self.put((op for op in ops if adds(op)), chains.ADD, home)

    def join(self, home: str, blocks: list[tuple[str, list[Op]]]) -> None:
        """An MLP whose products stand in parts of a layer of their own is one chain of the layer."""
        single = []
        for _, ops in blocks:
            mlp = [op for op in ops if self.chain.get(op.index) == chains.MLP]
            if sum(map(projects, mlp)) == 1:
                single.append(mlp)
        if len(single) > 1:
            self.block |= {op.index: home for mlp in single for op in mlp}

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
            behind, ahead = self.flow.before([softmax]), self.flow.after([softmax])
            scores = [op.index for op in pairs if op.index in behind]
            mixed = [op.index for op in pairs if op.index in ahead]
            if scores and mixed:
                yield [op for op in here if scores[-1] <= op.index <= mixed[0]]

    def attention(self, home: str, ops: list[Op], layer: list[Op]) -> None:
        """What stands around a core, in the module it runs in and those within, and its projection beside them."""
        chooses = {op.module for op in ops if op.name == "aten::topk" and op.module != home}
        for module in chooses:
            self.put((op for op in ops if inside(op.module, module)), chains.INDEXER, module)
        for module in dict.fromkeys(op.module for op in self.free(ops) if op.module != home):
            if any(inside(op.module, module) and op.module != module for op in ops):
                self.put((op for op in ops if inside(op.module, module)), chains.COMPRESSOR, module)
        core = [op for op in ops if self.chain.get(op.index) == CORE]
        leads, follows = self.flow.before(core), self.flow.after(core)
        free = self.free(ops)
        self.put((op for op in free if projects(op) and op.index in leads), chains.QKV, home)
        self.put((op for op in free if projects(op)), chains.OUTPUT, home)
        if not any(self.chain.get(op.index) == chains.OUTPUT for op in ops):
            beside = next((op for op in self.free(layer) if projects(op) and op.index in follows), None)
            if beside is not None:
                self.put([beside], chains.OUTPUT, beside.module.rpartition(".")[0])
        gate = (op for op in self.free(ops) if op.index in follows and op.name not in _COPIES and op.name != DROPOUT)
        self.put(gate, chains.OUTPUT_GATE, home)
        self.put((op for op in self.free(ops) if op.name == "aten::sigmoid"), chains.OUTPUT_GATE, home)

    def experts(self, call: list[Op], ops: list[Op]) -> None:
        """One call of experts, or of a whole block with them; and what leads to it and follows in its block."""
        scope = call[0].within("moe")
        module = scope.module if scope else ""
        chosen = [op for op in call if op.name == "aten::topk"]
        block = module if chosen else module.rpartition(".")[0]
        own = self.free(call)
        if chosen:
            leads = self.flow.before(chosen)
            self.put((op for op in own if op.index in leads or op in chosen), chains.ROUTER, block)
        products = [op.index for op in self.free(own) if projects(op)]
        first, last = (products[0], products[-1]) if products else (call[-1].index, call[-1].index)
        # what only prepares a parameter belongs to what reads it
        prepares = [op for op in own if op.shapes and len(op.parameters) == len(op.shapes)]
        for op in (op for op in self.free(own) if op not in prepares):
            self.put(
                [op],
                chains.DISPATCH if op.index < first else chains.EXPERTS if op.index <= last else chains.COMBINE,
                block,
            )
        within = {op.index for op in call}
        beside = [op for op in ops if inside(op.module, block) and op.index not in within]
        leads, follows = self.flow.before(call), self.flow.after(call)
        self.put((op for op in beside if op.index in leads), chains.ROUTER, block)
        self.put((op for op in beside if op.index in follows), chains.COMBINE, block)
        joined = self.flow.before(op for op in ops if op.index in follows and inside(op.module, block))
        self.put((op for op in beside if op.index in joined), chains.SHARED_GATE, block)

    def block_without_core(self, block: str, ops: list[Op]) -> None:
        """A part of a layer: it mixes tokens without attention, chooses experts in its own way, or is an MLP."""
        if any(self.chain.get(op.index) in (CORE, chains.EXPERTS) for op in ops):
            return
        free = self.free(ops)
        if self.streams(block):
            self.put(free, chains.HYPER, block)
        elif any(op.name in _MIXES or (product(op) and not projects(op)) for op in free):
            products = [op for op in free if projects(op)]
            self.put((op for op in free if op.name == "aten::convolution"), chains.CONVOLUTION, block)
            self.put(products[:-1], chains.QKV, block)
            self.put(products[-1:], chains.OUTPUT, block)
            self.put(free, chains.LINEAR_ATTENTION, block)
        elif chosen := [op for op in free if op.name == "aten::topk"]:
            leads = self.flow.before(chosen)
            self.put((op for op in free if op.index in leads or op in chosen), chains.ROUTER, block)
            self.put(free, chains.EXPERTS, block)
        elif any(projects(op) for op in free):
            self.put(free, chains.MLP, block)

    def outside(self) -> None:
        """What stands before the layers, after them, and behind the head."""
        ops = self.layers.get("", [])
        inner = [op.index for layer, own in self.layers.items() if layer for op in own]
        first, last = (min(inner), max(inner)) if inner else (0, 0)
        self.put((op for op in ops if op.name == "aten::embedding"), chains.EMBEDDING, "")
        for op in ops:
            if op.index < first and projects(op):  # from the width of the embedding to that of the layers
                self.put([op], chains.EMBEDDING, op.module)
        fed = self.flow.after(self.ops[index] for index in inner)
        # what no layer feeds, as the mask of a decoder behind its encoder
        tables = (op for op in ops if op.index < first or (op.index < last and op.index not in fed))
        self.put(tables, chains.TABLES, "")
        behind = [op for op in ops if op.index > last]
        heads = [op for op in behind if projects(op) and op.module]
        if heads:
            self.put([heads[-1], *self.bent(heads[-1])], chains.HEAD, heads[-1].module)
            for op in heads[:-1]:
                self.put([op], chains.HEAD, op.module)
            ends = (chains.LOSS, "") if self.training else (chains.HEAD, heads[-1].module)
            self.put((op for op in behind if op.index > heads[-1].index), *ends)
        if self.training:  # of a model without a loss the sum of its answer stands in for one
            self.put((op for op in behind if not op.module and op.index in fed), chains.LOSS, "")
        self.put((op for op in behind if self.streams(op.module)), chains.HYPER, behind[0].module if behind else "")

    def bent(self, head: Op) -> Iterator[Op]:
        """What scales or caps the logits."""
        readers = [self.ops[reader] for reader in self.flow.readers[head.index]]
        while len(readers) == 1 and readers[0].name in ("aten::div", "aten::tanh", "aten::mul"):
            yield readers[0]
            readers = [self.ops[reader] for reader in self.flow.readers[readers[0].index]]

    def by_flow(self) -> None:
        """The rest belongs where its result is read, or else where it was made."""
        for index, op in sorted(self.ops.items(), reverse=True):
            if index not in self.chain and op.name != DROPOUT:
                same = [r for r in self.flow.readers[index] if r in self.chain and self.beside(index, r)]
                # a norm reads what others have added up
                if same and not (self.chain[same[0]] == chains.NORM and adds(op)):
                    self.put([op], self.chain[same[0]], self.block[same[0]])
        for index in sorted(self.ops):
            if index not in self.chain:
                op = self.ops[index]
                same = [s for s in op.sources if s in self.chain and self.beside(index, s)]
                if op.name == DROPOUT and not any(self.chain[s] in (chains.OUTPUT, chains.MLP) for s in same):
                    self.put([op], chains.THINNED, op.module)
                elif same:
                    self.put([op], self.chain[same[-1]], self.block[same[-1]])

    def beside(self, one: int, other: int) -> bool:
        return layer_of(self.ops[one].module) == layer_of(self.ops[other].module)

    def residual(self, index: int) -> bool:
        """Whether it is a residual addition, be it in the code of a projection's module."""
        op, chain = self.ops[index], self.chain.get(index)
        whole = adds(op) and len(op.shapes) == 2 and op.shapes[0] == op.shapes[1]
        return chain in (chains.ADD, chains.ADD_NORM) or (whole and chain in (chains.OUTPUT, chains.MLP, chains.NORM))

    def with_norms(self) -> None:
        """An addition that a norm reads first, and that norm, are one chain: of the norm's block where it can be."""
        first: dict[str, str] = {}  # by layer the block of the norm that reads what the layer before has added
        across: list[int] = []
        for call in each_norm(self.ops.values()):
            within = {op.index for op in call}
            read = [source for op in call for source in op.sources if source not in within]
            added = [source for source in read if self.residual(source)]
            layer = layer_of(call[0].module)
            if not added:
                continue
            for op in call:
                self.chain[op.index] = chains.ADD_NORM
            # what is added may be scaled before
            scaled = [s for source in added for s in self.ops[source].sources if self.chain.get(s) == chains.ADD]
            for source in (*added, *(s for s in scaled if not adds(self.ops[s]))):
                self.chain[source] = chains.ADD_NORM
                if layer_of(self.ops[source].module) == layer:
                    self.block[source] = call[0].module
                else:
                    first.setdefault(layer, call[0].module)
                    across.append(source)
        for source in across:
            layer = layer_of(self.ops[source].module)
            self.block[source] = first.get(layer, layer)
