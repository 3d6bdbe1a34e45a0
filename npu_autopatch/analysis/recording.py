"""Every launch of a pass, where in the model it stands, and what it reads and writes; backward included."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import cache_utils

from npu_autopatch.analysis.as_on_device import AsOnDevice, anywhere

_ALLOCATES = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
_ALLOCATES |= {"aten::detach", "aten::_local_scalar_dense", "aten::lift_fresh", "aten::_unsafe_view", "aten::alias"}
_LOOK_UP = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather", "npu::npu_moe_token_permute"}
_GROUPED = {"aten::_grouped_mm", "npu::npu_grouped_matmul"}
# zeros, and a copy into a part of them
_LAUNCHES = {f"aten::{view}_backward": 2 for view in ("slice", "select", "diagonal")}
CORE, CACHE = "attention core", "cache write"


@dataclass(frozen=True)
class Scope:
    """One call of something that stands out: a site of ours, attention as one function, a cache.

    `module` is the path it was called in, of a module's forward that module's; `number` is unique.
    """

    kind: str
    name: str
    module: str
    number: int


@dataclass
class Op:
    """One launch, or several of one op.

    `module` is the path of the innermost module it ran in. `reads` and `writes` are storages; `parameters` those of
    `reads` that are a parameter's. `sources` are the ops it depends on. `forward` is, of an op in the backward, the one
    it belongs to.
    """

    index: int
    name: str
    launches: int
    bytes: int
    module: str
    scopes: tuple[Scope, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    result: tuple[int, ...]
    parameters: tuple[int, ...]
    sources: tuple[int, ...]
    forward: int | None = None

    @property
    def fused(self) -> bool:
        """Whether it is an op of torch_npu."""
        return self.name.startswith("npu::")

    def within(self, kind: str) -> Scope | None:
        """The innermost call of that kind it ran in."""
        return next((scope for scope in reversed(self.scopes) if scope.kind == kind), None)


@dataclass
class Recording:
    """The ops of one pass in order, the modules that ran, and how often the model asked for a value there was not."""

    ops: list[Op] = field(default_factory=list)
    asked: int = 0
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Records the ops of `model` while it lasts.

    Tensors without values answer each question whether something holds with yes: no padding, no packed sequences.
    `sites` are the calls to mark: (owner, attribute, kernel, site).
    """

    def __init__(self, model: nn.Module, sites: list[tuple[Any, str, str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Recording()
        self._sites = sites
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._parameters = {_storage(tensor) for tensor in model.parameters()}
        self._module = [""]
        self._scopes: list[Scope] = []
        self._numbers = itertools.count()
        self._writers: dict[int, int] = {}
        # a storage that is freed could lend its address to another; a tensor that is kept would be copied as a gradient
        self._kept: list[torch.UntypedStorage] = []
        self._by_sequence: dict[int, int] = {}
        self._views: list[tuple[int, int, int]] = []  # until the next op: node of autograd, call, what made the viewed
        self._last = 0
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        self._replace(nn.Module, "__call__", self._in_module(nn.Module.__call__))
        for cls in _caches():
            for name, value in list(vars(cls).items()):
                if isinstance(value, FunctionType) and not name.startswith("_"):
                    self._replace(cls, name, self._marked(CACHE, name, value))
        for owner, attribute, kernel, site in self._sites:
            if attribute in vars(owner):
                self._replace(owner, attribute, self._marked(kernel, site, vars(owner)[attribute]))
        self._replace(torch.autocast, "__init__", anywhere(torch.autocast.__init__))
        self._stack.enter_context(AsOnDevice(lambda: self.scope(CORE, "sdpa")))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._stack.close()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._stack.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, value)

    def _in_module(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def within(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(module), self._module[-1])
            self._module.append(path)
            given = next((leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)), None)
            if given is not None:
                self.found.inputs.setdefault(path, tuple(given.shape))
            try:
                return call(module, *args, **kwargs)
            finally:
                self._module.pop()

        return within

    def _marked(self, kind: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with self.scope(kind, name):
                return function(*args, **kwargs)

        # kernels tell by it whose function stands in a class
        marked.__wrapped__ = getattr(function, "__wrapped__", function)  # type: ignore[attr-defined]
        return marked

    @contextmanager
    def scope(self, kind: str, name: str) -> Iterator[None]:
        """Mark the ops of a block."""
        self._scopes.append(Scope(kind, name, self._module[-1], next(self._numbers)))
        try:
            yield
        finally:
            self._scopes.pop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        if name == "aten::_local_scalar_dense" and args[0].device.type == "meta" and args[0].dtype is torch.bool:
            self.found.asked += 1
            return True
        result = function(*args, **kwargs)
        if not (function.is_view or name in _ALLOCATES):
            self._note(function, name, args, kwargs, result)
        elif torch._C._current_autograd_node() is None and args and isinstance(args[0], Tensor):
            made_by = self._writers.get(_storage(args[0]), len(self.found.ops))
            self._views.append((_made_last(), self._scopes[-1].number if self._scopes else -1, made_by))
        return result

    def _place_views(self) -> None:
        """What the gradient of a view costs, the call it is taken in does; outside of one, what made the viewed."""
        here = {scope.number for scope in self._scopes}
        for sequence, scope, made_by in self._views:
            self._by_sequence.setdefault(sequence, len(self.found.ops) if scope in here else made_by)
        self._views.clear()

    def _note(self, function: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        declared = function._schema.arguments
        given = [*zip(declared, args, strict=False), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
        changed = [v for a, v in given if a.alias_info is not None and a.alias_info.is_write]
        read = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        written = [v for v in tree_leaves((result, changed)) if isinstance(v, Tensor)]
        self._kept += [v.untyped_storage() for v in (*read, *written)]
        storages = [_storage(v) for v in read]
        targets = dict.fromkeys(_storage(v) for v in written)
        if not sum(v.numel() for v in written):
            return
        if storages and all(s in self._parameters for s in storages):
            self._parameters |= set(targets)  # a parameter in another dtype or layout
        self._place_views()
        index = len(self.found.ops)
        sources = dict.fromkeys(self._writers[s] for s in (*storages, *targets) if s in self._writers)
        node = torch._C._current_autograd_node()
        forward = None
        if node is not None:
            forward = self._last = self._by_sequence.get(node._sequence_nr(), self._last)
        else:
            self._by_sequence.setdefault(_made_last(), index)
        stored = sum(_bytes(v) for v in {id(v): v for v in written}.values())
        self.found.ops.append(
            Op(
                index,
                name,
                _groups(read) if name == "aten::_grouped_mm" else _LAUNCHES.get(name, 1),
                _loaded(name, read, stored) + stored,
                self._module[-1],
                tuple(self._scopes),
                tuple(tuple(v.shape) for v in read),
                tuple(v.dtype for v in read),
                tuple(written[0].shape),
                tuple(place for place, s in enumerate(storages) if s in self._parameters),
                tuple(sources),
                forward,
            )
        )
        for target in targets:
            self._writers[target] = index


def _made_last() -> int:
    """The number of the newest node of autograd: in the forward, that of the op that runs."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


def _groups(read: list[Tensor]) -> int:
    """How many products a grouped one is where the device has no kernel for it: torch itself runs one a group."""
    x, weight = read[:2]
    rows, groups = (x.size(0), weight.size(0)) if weight.dim() == 3 else (weight.size(0), read[-1].numel())
    return min(rows, groups)


def _loaded(name: str, read: list[Tensor], stored: int) -> int:
    """The bytes read: of what is looked up in, no more than is found; of grouped weights, no more than rows use."""
    if name in _LOOK_UP:
        return sum(min(_bytes(v), stored) for v in read)
    if name in _GROUPED and any(v.dim() == 3 for v in read):
        rows = read[0].size(0)
        return sum(_bytes(v) * min(v.size(0), rows) // v.size(0) if v.dim() == 3 else _bytes(v) for v in read)
    return sum(_bytes(v) for v in read)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride or not length else 1  # an expanded dimension is read once
    return size


def _caches() -> dict[type, None]:
    """The classes of transformers' caches and their layers, and those derived from them elsewhere."""
    found = {cls: None for cls in vars(cache_utils).values() if getattr(cls, "__module__", "") == cache_utils.__name__}
    found = {cls: None for cls in found if isinstance(cls, type)}
    waiting = list(found)
    while waiting:
        derived = waiting.pop().__subclasses__()
        waiting += [cls for cls in derived if cls not in found]
        found |= dict.fromkeys(derived)
    return found
