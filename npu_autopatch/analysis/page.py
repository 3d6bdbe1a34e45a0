"""An analysis as one HTML document: nothing is loaded from elsewhere, and nothing in the analysis becomes markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from dataclasses import asdict
from pathlib import Path
from string import Template

from npu_autopatch.analysis.result import Analysis


def page(analysis: Analysis) -> str:
    """The document, in ASCII; `page.js` draws it from the analysis, which lies in it as JSON.

    Raises ValueError if a fact is a nan or infinite: JSON has no word for it.
    """
    style, costs, script = map(_beside, ("page.css", "page_costs.js", "page.js"))
    # "<" would be enough to end the element or to open a comment in it
    content = json.dumps(asdict(analysis), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    runs = f"style-src {_digest(style)}; script-src {_digest(costs)} {_digest(script)}"
    document = Template(_beside("page.html")).substitute(
        policy=f"default-src 'none'; {runs}; base-uri 'none'",
        title=html.escape(analysis.model),
        style=style,
        costs=costs,
        script=script,
        analysis=content,
    )
    # a folder's name may hold what UTF-8 cannot
    return document.encode("ascii", "xmlcharrefreplace").decode()


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="ascii")


def _digest(source: str) -> str:
    """As a content security policy names what may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
