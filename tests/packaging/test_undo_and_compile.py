"""The built wheel end to end: exact undo, and models that are compiled, copied, pickled and inspected."""

from __future__ import annotations

from pathlib import Path

from programs import emulated
from virtual_environment import VirtualEnvironment


def test_undo_is_exact_in_any_order_and_leaves_other_peoples_patches(with_models: VirtualEnvironment) -> None:
    program = """\
    import gc, weakref
    import npu_autopatch
    from npu_autopatch import patched

    model = family("qwen9")
    norm, sub = model.Qwen9RMSNorm, type("Inheriting", (model.Qwen9RMSNorm,), {})
    original, attributes = vars(norm)["forward"], set(vars(norm))
    instance = norm(16)

    def untouched():
        return vars(norm)["forward"] is original and "forward" not in vars(sub) and set(vars(norm)) == attributes

    with patched(backend="emulate"):
        assert fused(instance) == fused(sub(16)) == 1 and not untouched()
        with patched(backend="emulate"):
            assert fused(instance) == 1
        assert fused(instance) == 1
    assert untouched() and fused(instance) == 0 and finders() == 0, "nested"

    try:
        with patched(backend="emulate"):
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert untouched(), "exception"

    first, second = patched(backend="emulate"), patched(backend="emulate")
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert fused(instance) == 1
    second.__exit__(None, None, None)
    assert untouched(), "not last in, first out"

    scale = family("skew9").Skew9Scale  # nothing but its code says that it is a norm
    first, second = patched(backend="emulate"), patched(backend="emulate")
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert fused(scale) == 1
    second.__exit__(None, None, None)
    assert fused(scale) == 0

    def generator():
        with patched(backend="emulate"):
            yield fused(instance)

    running = generator()
    assert next(running) == 1
    running.close()
    assert untouched(), "generator"

    def foreign(self, hidden_states):
        return hidden_states

    with patched(backend="emulate"):
        norm.forward = foreign
    assert vars(norm)["forward"] is foreign, "another's patch on top"
    norm.forward = original

    npu_autopatch.enable(backend="emulate")
    assert fused(instance) == 1
    npu_autopatch.disable()
    npu_autopatch.disable()
    assert untouched() and finders() == 0
    print("done")
    """
    emulated(with_models, program, on=None).said("done\n")


def test_undo_in_an_async_body_and_from_two_threads(with_models: VirtualEnvironment) -> None:
    program = """\
    import asyncio, threading
    from npu_autopatch import patched
    norm = family("qwen9").Qwen9RMSNorm
    original = vars(norm)["forward"]
    seen = []

    async def task(seconds):
        with patched(backend="emulate"):
            await asyncio.sleep(seconds)
            seen.append(fused(norm))

    async def both():
        await asyncio.gather(task(0.05), task(0.01))

    asyncio.run(both())
    assert vars(norm)["forward"] is original

    def many():
        for _ in range(20):
            with patched(backend="emulate"):
                seen.append(fused(norm))

    threads = [threading.Thread(target=many) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print(set(seen), len(seen), vars(norm)["forward"] is original, finders())
    """
    emulated(with_models, program, on=None).said("{1} 42 True 0\n")


def test_disable_ends_what_the_environment_began(with_models: VirtualEnvironment) -> None:
    program = """\
    import npu_autopatch
    norm = family("qwen9").Qwen9RMSNorm
    before = fused(norm)
    npu_autopatch.disable()
    print(before, fused(norm), fused(family("space9").Space9RMSNorm), finders())
    """
    emulated(with_models, program).said("1 0 0 0\n")


def test_compiled_equals_eager_and_follows_patch_and_undo(with_models: VirtualEnvironment) -> None:
    program = """\
    import torch
    from npu_autopatch import patched
    torch.manual_seed(0)
    model, graphs = family("qwen9").Qwen9Model(), []
    inputs = torch.randn(2, 3, 16)

    def backend(graph, _):
        graphs.append(sum("npu_rms_norm" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        eager = model(inputs)
        assert torch.equal(compiled(inputs), eager)
        with patched(backend="emulate"):
            fused_eager = model(inputs)
            assert torch.equal(compiled(inputs), fused_eager)
        assert torch.equal(compiled(inputs), eager)
        with patched(backend="emulate"):
            again = torch.compile(model, backend=backend, fullgraph=True)
            assert torch.equal(again(inputs), fused_eager)
            exported = torch.export.export(model, (inputs,))
        assert torch.equal(again(inputs), eager)
    print(graphs, sum("npu_rms_norm" in str(node.target) for node in exported.graph.nodes))
    """
    emulated(with_models, program, on=None).said("[0, 1, 0, 1, 0] 1\n")


def test_a_patched_model_looks_copies_and_travels_like_any_other(
    with_models: VirtualEnvironment, tmp_path: Path
) -> None:
    program = """\
    import copy, inspect, multiprocessing, pickle
    import torch

    def child(model, queue):
        queue.put((fused(model), type(model).__module__))

    if __name__ == "__main__":
        torch.manual_seed(0)
        module = family("qwen9")
        model = module.Qwen9Model()
        forward = module.Qwen9RMSNorm.forward
        print(inspect.signature(forward), forward.__name__, forward.__qualname__, forward.__module__, forward.__doc__)
        print(repr(model), list(model.state_dict()), type(model.norm) is module.Qwen9RMSNorm)
        print(type(model.norm.forward).__name__, pickle.loads(pickle.dumps(model.norm.forward)).__name__)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            inputs = torch.randn(2, 3, 16)
            print(torch.equal(twin(inputs), model(inputs)))
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(model, queue))
        process.start()
        there, name = queue.get()
        process.join()
        print(there == fused(model) == fused(copy.deepcopy(model)), name)
        print(fused(model), file=sys.stderr)
    """
    on = emulated(with_models, program, tmp_path / "on.py")
    off = emulated(with_models, program, tmp_path / "off.py", on=None)
    assert (on.code, off.code, on.err, off.err) == (0, 0, "1\n", "0\n"), (on, off)
    assert on.out == off.out
