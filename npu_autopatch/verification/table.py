"""A verification for people: readable in 80 columns, with or without colour."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from npu_autopatch.verification.result import Largest, Part, SiteResult, Verification

_MOST = 2  # problems of one site or mode


def shown(found: Verification) -> RenderableType:
    """The model in each mode, each site, what is not verified, and the verdict."""
    where = ", CPU kernels in place of the NPU's" if found.backend == "emulate" else ""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    blocks: list[RenderableType] = [
        Text(f"{found.model}, {versions}"),
        Text(f"backend {found.backend}{where} ({found.chosen})\n"),
        Text("largest errors against fp64, in units in the last place of the largest value:"),
        Text("patched / unpatched\n"),
        _modes(found.modes),
        Text(""),
        *(_site(site) for site in found.sites),
    ]
    for heading, lines in (("not patched", found.not_patched), ("not verified", found.not_verified)):
        if lines:
            blocks += [Text(f"\n{heading}", "bold"), *(_indented(line) for line in lines)]
    if found.problems:
        blocks.append(Text("\nproblems", "bold red"))
    for part in (*found.sites, *found.modes):
        blocks += [_indented(f"{part.name}: {words}") for words in part.problems[:_MOST]]
        if len(part.problems) > _MOST:
            blocks.append(_indented(f"{part.name}: and {len(part.problems) - _MOST} more"))
    return Group(*blocks, Text(""), _verdict(found))


def _modes(modes: list[Part]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("model", "answer", "worst gradient", ""):
        table.add_column(heading, overflow="fold", min_width=len(heading))
    for mode in modes:
        table.add_row(mode.name, _pair(mode.error), _pair(mode.gradient, named=True), _mark(mode))
    return table


def _site(site: SiteResult) -> RenderableType:
    calls = f"{site.fused} calls fused" if site.fused or not site.original else "no call fused"
    if site.original:
        calls += f", {site.original} not: {site.why_original}"
    lines = [f"{site.kernel} {site.variant}", calls if site.fused or site.original else "not called by this model"]
    if site.error is not None:
        lines.append(f"error {_pair(site.error)}")
    if site.gradient is not None:
        lines[-1] += f", worst gradient {_pair(site.gradient, named=True)}"
    if site.seconds is not None:
        original, fused = (1e6 * seconds for seconds in site.seconds)
        lines.append(f"{original:.1f} us original, {fused:.1f} us fused")
    name = Text.assemble((site.name, "bold"), "  ", _mark(site))
    return Group(name, *(_indented(line) for line in lines))


def _verdict(found: Verification) -> Text:
    if found.problems:
        named = [site.name for site in found.sites if site.problems]
        return Text(f"failed: {', '.join(named) or 'no site alone, but the whole model'}", "red")
    if not found.modes:
        return Text("nothing was verified: the model itself does not run, see above", "red")
    if not found.fused:
        return Text("ok: nothing in this model is fused, and it is as it was", "green")
    return Text(f"ok: {found.fused} calls ran fused, and are no further from fp64 than the original's", "green")


def _mark(part: Part) -> Text:
    return Text("failed", "red") if part.problems else Text("ok" if part.error is not None else "", "green")


def _pair(largest: Largest | None, named: bool = False) -> str:
    if largest is None:
        return "-"
    name = f" ({largest.part})" if named else ""
    return f"{largest.ours:.3g} / {largest.original:.3g}{name}"


def _indented(line: str) -> Padding:
    return Padding(Text(line), (0, 0, 0, 2), expand=False)
