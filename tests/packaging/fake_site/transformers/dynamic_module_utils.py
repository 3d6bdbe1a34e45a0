"""Loads a class out of a file of remote code, executing the file each time, as the real one does."""

import importlib.util
import sys


def get_class_in_module(class_name, module_path, *, force_reload=False):
    name = "transformers_modules." + module_path.rpartition("/")[2].removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, location=module_path)
    module = sys.modules.get(name)
    if module is None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, class_name)
