"""Where CANN, the Ascend software under torch_npu, is installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_USUAL = ("/usr/local/Ascend/ascend-toolkit", "/usr/local/Ascend/cann", "/usr/local/Ascend/nnae")
_VERSION_FILES = ("*/ascend_toolkit_install.info", "ascend_toolkit_install.info", "version.cfg", "*/version.info")
# version=8.1.RC1, or runtime_running_version=[7.7.0.1:8.1.RC1]
_VERSION = re.compile(r'(?im)^(?:version|runtime_running_version)\s*=\s*["\[]*(?:[^:\]\s"]*:)?([^\]\s"]+)')


@dataclass(frozen=True)
class Installation:
    """The folder the environment names, and its version; the advice if there is none."""

    folder: str
    version: str
    words: str
    advice: str
    device_files: tuple[str, ...]


def find(environ: Mapping[str, str]) -> Installation:
    """Look where the environment says CANN is, or else where it usually is."""
    devices = tuple(sorted(str(path) for path in Path("/dev").glob("davinci[0-9]*")))
    for variable in _VARIABLES:
        if named := environ.get(variable, ""):
            if not Path(named).is_dir():
                words = f"{variable} names {named}, which does not exist"
                return Installation("", "", words, f"{words}: source the set_env.sh of CANN", devices)
            version = _version(Path(named))
            words = f"{version or 'of unknown version'} in {named}"
            advice = f"source {named}/set_env.sh, and check that its version is one torch_npu was made for"
            return Installation(named, version, words, advice, devices)
    words = f"neither {' nor '.join(_VARIABLES)} is set"
    scripts = [f"{folder}/set_env.sh" for folder in _USUAL if Path(folder, "set_env.sh").is_file()]
    advice = f"source {scripts[0]}" if scripts else "install CANN and source its set_env.sh"
    return Installation("", "", words, advice, devices)


def _version(folder: Path) -> str:
    for pattern in _VERSION_FILES:
        for file in sorted(folder.glob(pattern)):
            if file.is_file() and (found := _VERSION.search(file.read_text(errors="replace"))):
                return found[1]
    return ""
