"""The frame of the report: one HTML file with its style and script inside; it loads nothing.

The style and the charts (dom.js, chart.js) are those of the service's live page.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from pathlib import Path

ASSETS = Path(__file__).with_name("assets")
STYLE = (ASSETS / "style.css").read_text()


# JavaScript modules as one script, each after those that it imports
_modules = "\n".join((ASSETS / name).read_text() for name in ("dom.js", "chart.js", "report.js"))
_without_imports = re.sub(r"^import .*\n", "", _modules, flags=re.MULTILINE)
SCRIPT = re.sub(r"^export ", "", _without_imports, flags=re.MULTILINE)


def page(title: str, body: str) -> str:
    """A whole HTML document around `body`, which is trusted; `title` is escaped.

    Its policy forbids every request, every script but its own, and markup made of texts: a text of
    a run that was not escaped by mistake still could not run.
    """
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri "
        "'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
