"""The documentation names what exists: files, headings, commands, options, variables, functions."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

import npu_autopatch
from npu_autopatch import settings
from npu_autopatch.cli import _parsers

PROJECT = Path(__file__).resolve().parents[2]
PAGES = {
    str(file.relative_to(PROJECT)): file for file in [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
}
_FENCED = re.compile(r"^( *)```\w*\n(.*?)^\1```", re.M | re.S)

each_page = pytest.mark.parametrize("page", PAGES)


def prose(text: str) -> str:
    """The text without its blocks of code."""
    return _FENCED.sub("", text)


def code(text: str) -> list[str]:
    """The lines of blocks of code, and spans of code."""
    lines = [line for _, block in _FENCED.findall(text) for line in block.splitlines()]
    return [*lines, *(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text)))]


def anchors(text: str) -> set[str]:
    """What a page's headings are called in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands() -> dict[str, set[str]]:
    """Each command with its options, those of its own commands among them."""
    _, parsers = _parsers()
    return {name: set(_options(parser)) for name, parser in parsers.items()}


def _options(parser: argparse.ArgumentParser) -> list[str]:
    options = []
    for action in parser._actions:
        options += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            options += [option for choice in action.choices.values() for option in _options(choice)]
    return options


def variables() -> set[str]:
    return set(re.findall(r"NPU_AUTOPATCH(?:_[A-Z]+)?", Path(settings.__file__).read_text()))


@each_page
def test_every_relative_link_leads_to_a_file_and_a_heading(page: str) -> None:
    file = PAGES[page]
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(file.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        assert there.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(there.read_text()), f"{page} links to {target}"


@each_page
def test_every_command_and_option_exists(page: str) -> None:
    known = commands()
    for line in code(PAGES[page].read_text()):
        for name, rest in re.findall(r"npu-autopatch ([a-z]+)\b((?: [^#|&;`]*)?)", line):
            assert name in known, f"{page}: {line}"
            if name != "run":  # what follows the script is the script's
                for option in re.findall(r"(?<=\s)(--?[a-z][a-z-]*)", rest):
                    assert option in known[name], f"{page}: {name} has no {option}"


@each_page
def test_every_variable_exists(page: str) -> None:
    named = set(re.findall(r"NPU_AUTOPATCH(?:_[A-Z]+)*", PAGES[page].read_text()))
    assert named <= variables(), f"{page} names {named - variables()}"


@each_page
def test_every_function_exists(page: str) -> None:
    for name in re.findall(r"\bnpu_autopatch\.(\w+)\(", PAGES[page].read_text()):
        assert name in npu_autopatch.__all__, f"{page} names npu_autopatch.{name}()"


def test_the_settings_have_a_heading_each() -> None:
    headings = re.findall(r"^## (NPU_\w+)$", (PROJECT / "docs" / "settings.md").read_text(), re.M)
    assert set(headings) == variables()


def test_each_command_has_a_section_with_its_output() -> None:
    page = (PROJECT / "docs" / "commands.md").read_text()
    sections = dict(re.findall(r"(?ms)^## (\w+)\n(.*?)(?=^## |\Z)", _FENCED.sub(_shown, page)))
    for name in commands():
        assert name in sections, f"docs/commands.md has no section on {name}"
        assert f"npu-autopatch {name}" in sections[name], f"docs/commands.md shows no output of {name}"


def _shown(block: re.Match[str]) -> str:
    """A block of code without what may look like a heading."""
    return re.sub(r"(?m)^#", " #", block[0])


def test_the_index_has_every_page() -> None:
    named = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (PROJECT / "docs" / "README.md").read_text()))
    assert named == {file.name for name, file in PAGES.items() if name.startswith("docs/")} - {"README.md"}


def test_the_readme_is_short_and_leads_to_the_documentation() -> None:
    text = PAGES["README.md"].read_text()
    assert "(docs/README.md)" in text
    assert len(text.splitlines()) < 200


def test_a_name_that_does_not_exist_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n[a](missing.md) [b](#two) `npu-autopatch mend` `npu-autopatch doctor --loud` NPU_AUTOPATCH_MOOD "
        "npu_autopatch.mend()\n"
    )
    for line, check in (
        ("[a](missing.md)", test_every_relative_link_leads_to_a_file_and_a_heading),
        ("[b](#two)", test_every_relative_link_leads_to_a_file_and_a_heading),
        ("`npu-autopatch mend`", test_every_command_and_option_exists),
        ("`npu-autopatch doctor --loud`", test_every_command_and_option_exists),
        ("NPU_AUTOPATCH_MOOD", test_every_variable_exists),
        ("npu_autopatch.mend()", test_every_function_exists),
    ):
        page.write_text(f"# One\n{line}\n")
        monkeypatch.setitem(PAGES, "page", page)
        with pytest.raises(AssertionError):
            check("page")
