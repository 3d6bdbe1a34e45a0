"""`npu-autopatch analyze`: a model taken apart, what of it is fused, what could be, and what each part costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_autopatch.analysis.result import Analysis
from npu_autopatch.cli import model_child
from npu_autopatch.cli.terminal import CommandError, console
from npu_autopatch.kernels import REGISTRY
from npu_autopatch.settings import Settings


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `analyze` command; its `func` takes the parsed namespace and returns an exit code."""
    parser = subparsers.add_parser(
        "analyze",
        help="take a model apart: what is fused, what could be, and the cost of each part",
        description="Run a model at its real sizes on tensors without values, unpatched and patched, in prefill, "
        "decode and training, and put every launch into a chain: norm, rope, router... Each chain is fused here, fused "
        "by torch_npu, a candidate for an op that exists (with what to prepare, check and try), not possible by an "
        "op's contract, or without an op. No kernel runs, and no NPU is needed.",
        epilog="example: npu-autopatch analyze qwen3_moe --html qwen3_moe.html",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder, a config.json, or a model type as in qwen3_moe")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens a sequence (4096)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (1)")
    parser.add_argument(
        "--kernels", metavar="LIST", default="all", help="as in NPU_AUTOPATCH: names of kernels, or all,-NAME"
    )
    parser.add_argument("--skip", metavar="PATTERNS", default="", help="sites to leave alone, as in NPU_AUTOPATCH_SKIP")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that a model folder brings")
    parser.add_argument("--html", metavar="FILE", help="also write one self-contained page, the model as a tree")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the same as JSON")
    form.add_argument("--markdown", action="store_true", help="the same as Markdown, for a review")
    parser.set_defaults(func=_from_arguments)


def _from_arguments(arguments: argparse.Namespace) -> int:
    Settings.of(REGISTRY, arguments.kernels, arguments.skip)
    for option in ("tokens", "batch"):
        if getattr(arguments, option) < 1:
            raise CommandError(f"--{option} is {getattr(arguments, option)}: give a number of 1 or more")
    page = Path(arguments.html) if arguments.html is not None else None
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        raise CommandError(f"--html {arguments.html} cannot be written: give a file in a folder that exists")
    found = _analyzed(arguments)
    if page is not None:
        _write(page, found)
    if arguments.json:
        print(found.to_json())
    elif arguments.markdown:
        from npu_autopatch.analysis.markdown import markdown

        print(markdown(found), end="")
    else:
        from npu_autopatch.analysis.table import shown

        console().print(shown(found))
        if page is not None:
            console().print(f"\nwritten to {page}", soft_wrap=True)
    return 0


def _write(path: Path, found: Analysis) -> None:
    from npu_autopatch.analysis.page import page

    try:
        path.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--html {path} cannot be written ({error.strerror}): give another file") from None


def _analyzed(arguments: argparse.Namespace) -> Analysis:
    """What a child found, which runs the model. Raises `CommandError`."""
    order = {name: getattr(arguments, name) for name in ("tokens", "batch", "kernels", "skip", "trust_remote_code")}
    return Analysis.of(model_child.found("npu_autopatch.analysis", arguments.model, order))
