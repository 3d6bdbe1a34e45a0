"""Environment and arguments become one frozen `Settings`; the only reader of the environment after start-up."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BACKENDS = ("npu", "emulate")
LOG_LEVELS = ("debug", "info", "warning")
_ON = ("1", "true", "on", "yes")
_PATTERN = re.compile(r"(?:[\w.*?!-]|\[!?(?:\][^\]]*|[^\]]+)\])+")
_WILD = re.compile(r"[*?\[]")


class SettingsError(ValueError):
    """A setting that cannot be followed; the message is one sentence that names the valid choices."""


@dataclass(frozen=True)
class Settings:
    """What to patch, through which backend, and where to say what happened.

    `kernels` are names in the order they are tried, `skip` are shell patterns over site names such as
    ``qwen3.Qwen3MLP`` or over their families (``glm4*``); as text also ``@FILE``, which has one in each line.
    """

    kernels: tuple[str, ...]
    skip: tuple[str, ...] = ()
    backend: str = "npu"
    strict: bool = False
    report_path: str = ""
    log_level: str = "info"
    trace: bool = False

    @classmethod
    def of(
        cls,
        known: Iterable[str],
        kernels: str | Iterable[str] = "all",
        skip: str | Iterable[str] = (),
        backend: str = "npu",
        **rest: str | bool,
    ) -> Settings:
        """Check and normalise arguments; `known` are the names of all kernels. Raises `SettingsError`."""
        if backend not in BACKENDS:
            raise SettingsError(f"backend {backend!r} is unknown: choose {_choices(BACKENDS)}")
        if rest.get("log_level", "info") not in LOG_LEVELS:
            raise SettingsError(f"log level {rest['log_level']!r} is unknown: choose {_choices(LOG_LEVELS)}")
        return cls(_kernels(kernels, tuple(known)), _patterns(skip), backend, **rest)  # type: ignore[arg-type]

    @classmethod
    def from_environment(cls, known: Iterable[str], environ: Mapping[str, str] = os.environ) -> Settings:
        """The settings of the ``NPU_AUTOPATCH*`` variables. Raises `SettingsError`, naming the variable."""

        def read(name: str, default: str = "") -> str:
            return environ.get(name, "").strip() or default

        try:
            return cls.of(
                known,
                kernels=read("NPU_AUTOPATCH", "all"),
                skip=read("NPU_AUTOPATCH_SKIP"),
                backend=read("NPU_AUTOPATCH_BACKEND", "npu").lower(),
                strict=is_strict(environ),
                report_path=read("NPU_AUTOPATCH_REPORT"),
                log_level=read("NPU_AUTOPATCH_LOG", "info").lower(),
                trace=_is_on(read("NPU_AUTOPATCH_TRACE")),
            )
        except SettingsError as error:
            raise SettingsError(f"in the NPU_AUTOPATCH variables, {error}") from None

    def skips(self, site: str) -> str:
        """The pattern that excludes `site`, or an empty string."""
        family = site.partition(".")[0]
        for pattern in self.skip:
            if pattern in (site, family):
                return pattern
            if _WILD.search(pattern) and any(fnmatch.fnmatchcase(name, pattern) for name in (site, family)):
                return pattern
        return ""


def rank() -> str:
    """The number of this process among those that a launcher such as torchrun started together."""
    return os.environ.get("RANK", "0")


def is_strict(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether errors of ours are to be raised into the program: asked apart, for wrong settings are among them."""
    return _is_on(environ.get("NPU_AUTOPATCH_STRICT", ""))


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def _kernels(asked: str | Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
    words = _words("kernels", asked, "'rms_norm,moe' or a list of names")
    if len(words) == 1 and words[0].lower() in _ON:
        words = ["all"]
    for word in words:
        if word != "all" and word.removeprefix("-") not in known:
            choices = _choices(("all", *known))
            raise SettingsError(f"kernel {word!r} is unknown: choose {choices}, or -NAME to leave one out")
    included = {word for word in words if not word.startswith("-")}
    excluded = {word[1:] for word in words if word.startswith("-")}
    if "all" in included or not included:
        included |= set(known) if words else set()
    chosen = tuple(name for name in known if name in included and name not in excluded)
    if not chosen:
        choices = _choices(("all", *known))
        raise SettingsError(f"no kernel is left of {asked!r}: choose {choices}, or set NPU_AUTOPATCH=0")
    return chosen


def _patterns(asked: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(asked, str) and asked.strip().startswith("@"):
        asked = _lines(asked.strip()[1:])
    words = _words("skip", asked, "'qwen3.Qwen3MLP,glm4*' or a list of patterns")
    for word in words:
        if not _PATTERN.fullmatch(word):
            raise SettingsError(
                f"skip pattern {word!r} cannot match a site: write names such as 'qwen3.Qwen3MLP', with *, ? and [abc]"
            )
    return tuple(words)


def _lines(file: str) -> list[str]:
    try:
        with open(file, encoding="utf-8") as lines:
            return lines.read().splitlines()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise SettingsError(
            f"skip file {file!r} cannot be read ({why}): give one with a pattern in each line"
        ) from None


def _words(setting: str, asked: str | Iterable[str], example: str) -> list[str]:
    words = asked.split(",") if isinstance(asked, str) else list(asked) if isinstance(asked, Iterable) else [asked]
    if not all(isinstance(word, str) for word in words):
        raise SettingsError(f"{setting} is {asked!r}, not text: give {example}")
    return [word.strip() for word in words if word.strip()]


def _choices(names: Iterable[str]) -> str:
    return " or ".join(names) if len(tuple(names)) < 3 else ", ".join(names)
