"""`npu-autopatch verify`: a model run unpatched and patched, and both measured against fp64, site by site."""

from __future__ import annotations

import argparse

from npu_autopatch.cli import model_child
from npu_autopatch.cli.terminal import console
from npu_autopatch.kernels import REGISTRY
from npu_autopatch.settings import BACKENDS, Settings
from npu_autopatch.verification.result import Verification


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `verify` command; its `func` takes the parsed namespace and returns an exit code."""
    parser = subparsers.add_parser(
        "verify",
        help="show that the patches are right for a model",
        description="Build a model small with random weights, run it unpatched and patched in fp32 and bf16 (prefill, "
        "decode with cache, training, gradient checkpointing), and measure both against fp64: as a whole, and each "
        "site alone. Exit code 1 names the site that is further from fp64 than rounding explains, or lacks a gradient.",
        epilog="example: npu-autopatch verify qwen3_moe --compile",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder, a config.json, or a model type as in qwen3_moe")
    parser.add_argument("--full", action="store_true", help="the real sizes, and the weights of the folder")
    parser.add_argument("--compile", action="store_true", help="also a step of training under torch.compile (slow)")
    parser.add_argument(
        "--kernels", metavar="LIST", default="all", help="as in NPU_AUTOPATCH: names of kernels, or all,-NAME"
    )
    parser.add_argument("--skip", metavar="PATTERNS", default="", help="sites to leave alone, as in NPU_AUTOPATCH_SKIP")
    parser.add_argument("--backend", choices=BACKENDS, help="default: npu where torch has a device, else emulate")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that a model folder brings")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(func=_from_arguments)


def _from_arguments(arguments: argparse.Namespace) -> int:
    Settings.of(REGISTRY, arguments.kernels, arguments.skip)
    found = _verified(arguments)
    if arguments.json:
        print(found.to_json())
    else:
        console().print(found)
    return 0 if found.passed else 1


def _verified(arguments: argparse.Namespace) -> Verification:
    """What a child found, which runs the model. Raises `CommandError`."""
    order = {name: getattr(arguments, name) for name in ("full", "compile", "kernels", "skip", "trust_remote_code")}
    order["backend"] = arguments.backend or ""
    return Verification.of(model_child.found("npu_autopatch.verification", arguments.model, order))
