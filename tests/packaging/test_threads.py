"""Threads that import at the same time neither hang nor patch twice."""

from __future__ import annotations

from programs import emulated
from virtual_environment import VirtualEnvironment


def test_a_package_half_way_through_and_another_thread_in_its_model(with_models: VirtualEnvironment) -> None:
    """Where hooks that look for a spec by importing the parent wait for each other for ever."""
    program = """\
    import threading
    import transformers.models
    slow9_started = threading.Event()
    errors = []

    def importing(name):
        try:
            __import__(name)
        except BaseException as error:
            errors.append(error)

    parent = threading.Thread(target=importing, args=("transformers.models.slow9",))
    child = threading.Thread(target=importing, args=("transformers.models.slow9.modeling_slow9",))
    parent.start()
    slow9_started.wait()
    child.start()
    parent.join(), child.join()
    print(errors, fused(family("slow9").Slow9RMSNorm), states())
    """
    emulated(with_models, program).said("[] 1 {'slow9.Slow9RMSNorm': 'patched'}\n")


def test_a_thread_that_holds_the_lock_of_a_parent_package(with_models: VirtualEnvironment) -> None:
    program = """\
    import importlib._bootstrap as bootstrap, threading, time
    import transformers.models.qwen9
    done = threading.Event()

    def holding():
        with bootstrap._ModuleLockManager("transformers.models.qwen9"):
            started.set()
            done.wait(20)

    started = threading.Event()
    holder = threading.Thread(target=holding)
    holder.start()
    started.wait()
    model = family("qwen9")  # its parent is loaded: nobody needs that lock
    was_held = holder.is_alive()
    done.set()
    holder.join()
    print(was_held, fused(model.Qwen9RMSNorm))
    """
    emulated(with_models, program).said("True 1\n")


def test_eight_threads_at_a_lazy_attribute_and_at_different_models(with_models: VirtualEnvironment) -> None:
    program = """\
    import threading, sys
    import transformers
    sys.setswitchinterval(1e-6)
    barrier, got, errors = threading.Barrier(8), [], []
    norms = {"qwen9": "Qwen9RMSNorm", "space9": "Space9RMSNorm", "self9": "Self9RMSNorm", "skew9": "Skew9Scale"}

    def racing(number):
        try:
            barrier.wait()
            got.append(transformers.Qwen9RMSNorm)
            family(list(norms)[number % len(norms)])
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=racing, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    sys.setswitchinterval(0.005)
    print(errors, len(set(got)), finders())
    print([fused(getattr(family(name), norm)) for name, norm in norms.items()])
    import npu_autopatch
    npu_autopatch.disable()
    print([fused(getattr(family(name), norm)) for name, norm in norms.items()], finders())
    """
    emulated(with_models, program).said("[] 1 1\n[1, 1, 1, 1]\n[0, 0, 0, 0] 0\n")
