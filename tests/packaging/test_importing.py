"""However a modeling module comes to be imported, it is patched, and importing behaves as it does without us."""

from __future__ import annotations

import py_compile
import re
import shutil
import zipfile
from pathlib import Path

import pytest
from programs import emulated
from virtual_environment import VirtualEnvironment


def test_a_model_is_patched_whichever_way_it_is_imported(with_models: VirtualEnvironment) -> None:
    ways = {
        "from transformers.models.qwen9.modeling_qwen9 import Qwen9RMSNorm": "Qwen9RMSNorm",
        "import transformers": "transformers.Qwen9RMSNorm",
    }
    for statement, what in ways.items():
        emulated(with_models, f"{statement}\nprint(fused({what}), states(), finders())").said(
            "1 {'qwen9.Qwen9RMSNorm': 'patched'} 1\n"
        )


def test_off_or_for_another_family_nothing_is_fused(with_models: VirtualEnvironment) -> None:
    emulated(with_models, "print(fused(family('qwen9').Qwen9RMSNorm))", on=None).said("0\n")
    skipping = {"NPU_AUTOPATCH_SKIP": "qwen9"}
    emulated(with_models, "q = family('qwen9'); print(fused(q.Qwen9RMSNorm), states())", **skipping).said(
        "0 {'qwen9.Qwen9RMSNorm': 'skipped'}\n"
    )


def test_a_model_that_raises_on_import_raises_the_same_and_is_patched_when_it_loads_later(
    with_models: VirtualEnvironment, tmp_path: Path
) -> None:
    uncaught = {"file": tmp_path / "program.py", "BREAK_BROKEN9": "1"}
    statement = "import transformers.models.broken9.modeling_broken9"
    on, off = emulated(with_models, statement, **uncaught), emulated(with_models, statement, on=None, **uncaught)
    assert on == off
    assert on.code == 1 and on.err.endswith("ZeroDivisionError: broken9 says no\n")

    program = """\
    import sys
    try:
        family("broken9")
    except ZeroDivisionError as error:
        files = []
        trace = error.__traceback__
        while trace:
            files.append(trace.tb_frame.f_code.co_filename)
            trace = trace.tb_next
        print("npu_autopatch" in str(files), len(set(files)), FAMILY.format("broken9") in sys.modules)
    print(fused(family("broken9").Broken9RMSNorm))
    """
    emulated(with_models, program, BREAK_BROKEN9="1").said("False 6 False\n1\n")


def test_reload_and_reimport_are_patched_again(with_models: VirtualEnvironment) -> None:
    program = """\
    import importlib, sys
    model = family("qwen9")
    first = model.Qwen9RMSNorm
    reloaded = importlib.reload(model)
    assert reloaded is model and model.Qwen9RMSNorm is not first
    print(fused(first), fused(model.Qwen9RMSNorm))
    del sys.modules[model.__name__]
    again = family("qwen9")
    assert again is not model
    print(fused(again.Qwen9RMSNorm), fused(model.Qwen9RMSNorm), states())
    """
    emulated(with_models, program).said("1 1\n1 1 {'qwen9.Qwen9RMSNorm': 'patched'}\n")


def test_a_reload_without_a_spec_behaves_as_without_us(with_models: VirtualEnvironment) -> None:
    program = """\
    import importlib
    model = family("plain9")
    model.__spec__ = None
    try:
        importlib.reload(model)
    except Exception as error:
        print(type(error).__name__)
    else:
        print("reloaded")
    """
    off = emulated(with_models, program, on=None)
    assert emulated(with_models, program) == off
    assert off.code == 0


def test_enabling_later_reaches_what_is_loaded_and_what_is_half_loaded(with_models: VirtualEnvironment) -> None:
    program = """\
    import npu_autopatch
    model = family("qwen9")
    instance = model.Qwen9RMSNorm(16)
    print(fused(instance))
    half = family("half9")  # calls enable() in the middle of its own import
    print(fused(instance), fused(family("space9").Space9RMSNorm), fused(half.Half9RMSNorm), len(states()))
    """
    done = emulated(with_models, program, on=None)
    assert (done.code, done.err) == (0, "")
    assert done.out == "0\n1 1 1 3\n"


def test_asking_for_a_spec_neither_imports_nor_patches(with_models: VirtualEnvironment) -> None:
    program = """\
    import importlib.util, importlib.machinery, pkgutil, sys
    import transformers.models.qwen9
    for _ in range(2):
        spec = importlib.util.find_spec("transformers.models.qwen9.modeling_qwen9")
        assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        assert "class Qwen9RMSNorm" in spec.loader.get_source(spec.name)
    found = [m.name for m in pkgutil.walk_packages(transformers.models.qwen9.__path__, "transformers.models.qwen9.")]
    print(found, importlib.util.find_spec(spec.name + "x"))
    print(spec.name in sys.modules, "npu_autopatch.activation" in sys.modules)
    print(fused(family("qwen9").Qwen9RMSNorm))
    """
    emulated(with_models, program).said("['transformers.models.qwen9.modeling_qwen9'] None\nFalse False\n1\n")


def test_a_spec_that_was_asked_for_loads_a_patched_module(with_models: VirtualEnvironment) -> None:
    program = """\
    import importlib.util
    spec = importlib.util.find_spec("transformers.models.qwen9.modeling_qwen9")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(fused(module.Qwen9RMSNorm))
    """
    emulated(with_models, program).said("1\n")


def test_the_loaded_module_shows_its_real_loader_source_and_data(with_models: VirtualEnvironment) -> None:
    program = """\
    import importlib.machinery, importlib.resources, inspect, pkgutil
    model = family("qwen9")
    real = importlib.machinery.SourceFileLoader
    print(type(model.__loader__) is real, type(model.__spec__.loader) is real, model.__spec__.origin == model.__file__)
    print(inspect.getsource(model).count("class Qwen9RMSNorm"), inspect.getsource(model.Qwen9RMSNorm).splitlines()[0])
    print(len(inspect.getsource(model.Qwen9RMSNorm.forward).splitlines()))
    print(b"class Qwen9RMSNorm" in pkgutil.get_data(model.__name__, "modeling_qwen9.py"))
    print((importlib.resources.files(model.__package__) / "modeling_qwen9.py").is_file())
    print(sorted(vars(model)))
    """
    on, off = emulated(with_models, program), emulated(with_models, program, on=None)
    assert on == off
    assert on.code == 0 and on.out.startswith("True True True\n1 class Qwen9RMSNorm(nn.Module):\n")


def test_a_namespace_package_named_like_a_model(with_models: VirtualEnvironment, tmp_path: Path) -> None:
    (tmp_path / "models" / "modeling_folder").mkdir(parents=True)
    program = f"""\
    import warnings; warnings.simplefilter("error")
    import transformers.models
    transformers.models.__path__.append({str(tmp_path / "models")!r})
    import transformers.models.modeling_folder as m
    print(list(m.__path__), m.__file__)
    """
    emulated(with_models, program).said(f"['{tmp_path}/models/modeling_folder'] None\n")


def test_models_in_a_namespace_package_in_a_zip_without_source_and_replacing_themselves(
    with_models: VirtualEnvironment, tmp_path: Path
) -> None:
    model = with_models.site_packages / "transformers/models/qwen9/modeling_qwen9.py"
    with zipfile.ZipFile(tmp_path / "models.zip", "w") as archive:
        archive.writestr("zip9/modeling_zip9.py", model.read_text().replace("Qwen9", "Zip9"))
        archive.writestr("zip9/__init__.py", "")
    (tmp_path / "bare9").mkdir()
    source = tmp_path / "source.py"
    source.write_text(model.read_text().replace("Qwen9", "Bare9"))
    py_compile.compile(str(source), cfile=str(tmp_path / "bare9" / "modeling_bare9.pyc"), doraise=True)
    source.unlink()
    program = f"""\
    import transformers.models, transformers.models.space9
    transformers.models.__path__.extend([{str(tmp_path / "models.zip")!r}, {str(tmp_path)!r}])
    assert transformers.models.space9.__file__ is None
    for name in ("space9", "zip9", "bare9", "self9"):
        norm = f"{{name.title()}}RMSNorm"
        model = family(name)
        print(type(model.__spec__.loader).__name__, fused(getattr(model, norm)), states()[f"{{name}}.{{norm}}"])
    """
    emulated(with_models, program).said(
        "SourceFileLoader 1 patched\nzipimporter 1 patched\n"
        "SourcelessFileLoader 1 patched\nSourceFileLoader 1 patched\n"
    )


def test_a_lazy_loader_stays_lazy_and_is_patched_when_it_wakes(with_models: VirtualEnvironment) -> None:
    program = """\
    import importlib.util, sys
    import transformers.models.qwen9
    name = "transformers.models.qwen9.modeling_qwen9"
    spec = importlib.util.find_spec(name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print("npu_autopatch.activation" in sys.modules, fused(module.Qwen9RMSNorm))
    """
    emulated(with_models, program).said("False 1\n")
    program = """\
    import importlib.util, sys
    from importlib.machinery import PathFinder
    class Lazy:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("transformers.models.qwen9.modeling"):
                spec = PathFinder.find_spec(name, path, target)
                spec.loader = importlib.util.LazyLoader(spec.loader)
                return spec
    sys.meta_path.insert(sys.meta_path.index(PathFinder), Lazy())
    module = family("qwen9")
    print("npu_autopatch.activation" in sys.modules, fused(module.Qwen9RMSNorm))
    """
    emulated(with_models, program).said("False 1\n")


def test_finders_and_loaders_of_the_old_kind_go_on_working(with_models: VirtualEnvironment) -> None:
    program = """\
    import importlib.machinery, sys, types, warnings
    warnings.simplefilter("ignore")
    class NoFindSpec:
        def find_module(self, name, path=None):
            return None
    class OldLoader:
        def load_module(self, name):
            module = sys.modules[name] = types.ModuleType(name)
            module.answer = 42
            return module
    class OldKind:
        def find_spec(self, name, path=None, target=None):
            if name == "transformers.models.qwen9.modeling_old":
                return importlib.machinery.ModuleSpec(name, OldLoader())
    sys.meta_path[:0] = [NoFindSpec(), OldKind()]
    ours = [f for f in sys.meta_path if type(f).__name__ == "ModelingFinder"]
    sys.meta_path[:] = ours + [f for f in sys.meta_path if f not in ours]
    import transformers.models.qwen9.modeling_old as old
    print(old.answer, fused(family("qwen9").Qwen9RMSNorm))
    """
    emulated(with_models, program).said("42 1\n")


def test_a_finder_that_raises_raises_as_it_would_without_us(with_models: VirtualEnvironment) -> None:
    program = """\
    import sys
    class Raising:
        def find_spec(self, name, path=None, target=None):
            if name.endswith("modeling_plain9"):
                raise PermissionError("not this one")
    sys.meta_path.insert(-1, Raising())
    try:
        family("plain9")
    except PermissionError as error:
        print(error)
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, Raising)]
    print(family("plain9").ANSWER)
    """
    assert emulated(with_models, program) == emulated(with_models, program, on=None)


def test_a_model_that_does_not_exist_is_not_found_in_the_same_words(with_models: VirtualEnvironment) -> None:
    program = "import transformers.models.qwen9.modeling_qwen10"
    on, off = emulated(with_models, program), emulated(with_models, program, on=None)
    assert on == off and on.code == 1


def test_remote_code_is_patched_each_time_it_is_loaded(with_models: VirtualEnvironment, tmp_path: Path) -> None:
    source = (with_models.site_packages / "transformers/models/qwen9/modeling_qwen9.py").read_text()
    (tmp_path / "modeling_remote.py").write_text(re.sub("Qwen9", "Remote", source))
    program = f"""\
    from transformers.dynamic_module_utils import get_class_in_module
    classes = [get_class_in_module("RemoteRMSNorm", {str(tmp_path / "modeling_remote.py")!r}) for _ in range(3)]
    print(len(set(classes)), [fused(cls) for cls in classes])
    """
    emulated(with_models, program).said("3 [1, 1, 1]\n")


@pytest.mark.parametrize("name", ["transformers.models.auto.modeling_auto", "json", "transformers.models"])
def test_other_modules_are_not_touched(with_models: VirtualEnvironment, name: str) -> None:
    program = f"""\
    import importlib, importlib.util, sys
    print(type(importlib.util.find_spec({name!r}).loader))
    importlib.import_module({name!r})
    print("wrapt" in sys.modules, "torch" in sys.modules, "npu_autopatch.loader" in sys.modules)
    """
    emulated(with_models, program).said("<class '_frozen_importlib_external.SourceFileLoader'>\nFalse False False\n")


def test_a_real_model_of_the_installed_transformers(with_models: VirtualEnvironment, tmp_path: Path) -> None:
    environment = with_models.copy(tmp_path / "real")
    shutil.rmtree(environment.site_packages / "transformers")
    program = """\
    import torch, transformers
    from transformers import Qwen3Config, Qwen3ForCausalLM
    config = Qwen3Config(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, vocab_size=50,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )
    model = Qwen3ForCausalLM(config)
    nodes = [model(input_ids=torch.arange(6)[None]).logits.grad_fn]
    seen = set(nodes)
    for node in nodes:
        following = {node for node, _ in node.next_functions if node} - seen
        seen |= following
        nodes += following
    print(sum("npu_rms_norm" in node.name() for node in nodes), states().get("qwen3.Qwen3RMSNorm"))
    """
    done = emulated(environment, program)
    assert (done.code, done.err) == (0, "")
    assert done.out == "9 patched\n"
    assert emulated(environment, program, on=None).out == "0 None\n"
