"""The frame of the report: one HTML file with style and script inside, nothing from outside."""

from __future__ import annotations

import base64
import hashlib
from html import escape

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2230;--soft:#667085;--line:#e3e6eb;--grid:#eceef2;
--train:#3b6fd4;--valid:#d9730d;--green:#1a7f4b;--blue:#3b6fd4;--cyan:#0e7490;--yellow:#a16207;--red:#c0362c;
--magenta:#9333a8;--grey:#667085;--chip:#f0f2f5;--code:#f6f7f9}
@media(prefers-color-scheme:dark){:root{--page:#12151b;--card:#1a1f28;--ink:#e6e9ef;--soft:#98a2b3;--line:#2b313d;
--grid:#252b36;--train:#7aa2f7;--valid:#f0a45d;--green:#4cc38a;--blue:#7aa2f7;--cyan:#4fc3d9;--yellow:#e2b340;
--red:#f2827a;--magenta:#d08ae0;--grey:#98a2b3;--chip:#252b36;--code:#12151b}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main,header{max-width:1440px;margin:0 auto;padding:0 24px}
header{padding-top:28px}
h1{font-size:22px;margin:0;overflow-wrap:anywhere}
h2{font-size:15px;margin:32px 0 10px}
h3{font-size:14px;margin:0;font-weight:600}
a{color:inherit;text-decoration-color:var(--soft);text-underline-offset:3px}
.soft{color:var(--soft)}
.small{font-size:12px}
code,.mono,pre{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:12px}
.states{display:flex;height:8px;border-radius:4px;overflow:hidden;margin:18px 0 10px;gap:2px}
.states i{background:currentColor;min-width:3px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0;padding:0;list-style:none}
.legend b{font-variant-numeric:tabular-nums}
.dot::before{content:"";display:inline-block;width:8px;height:8px;border-radius:50%;background:currentColor;
margin-right:6px}
.dot span{color:var(--ink)}
.pill{font-size:12px;font-weight:600;white-space:nowrap}
.s-succeeded{color:var(--green)}.s-running{color:var(--cyan)}
.s-submitting,.s-submitted,.s-queued{color:var(--blue)}.s-held,.s-preempted{color:var(--yellow)}
.s-failed,.s-timeout,.s-oom,.s-lost{color:var(--red)}.s-cancelled{color:var(--magenta)}.s-pending{color:var(--grey)}
.scroll{overflow:auto;max-height:70vh;background:var(--card);border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;font-size:13px;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}
tbody tr:hover{background:var(--chip)}
th{position:sticky;top:0;background:var(--card);font-size:12px;color:var(--soft);font-weight:600;
box-shadow:inset 0 -1px var(--line);z-index:1}
th button{all:unset;cursor:pointer}
th button:focus-visible{outline:2px solid var(--blue)}
th[aria-sort=ascending] button::after{content:" ↑"}
th[aria-sort=descending] button::after{content:" ↓"}
td.num,th.num{text-align:right}
td.text{max-width:180px;overflow:hidden;text-overflow:ellipsis}
td.best{font-weight:700;color:var(--green)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(400px,100%),1fr));gap:16px;
align-items:start}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px 12px;min-width:0}
.card:target{outline:2px solid var(--blue)}
.card>header{display:flex;align-items:baseline;gap:10px;padding:0;max-width:none;margin:0}
.card>header .group{flex:1;min-width:0;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.progress{height:3px;border-radius:2px;background:var(--grid);margin:8px 0 4px;overflow:hidden}
.progress i{display:block;height:100%;background:currentColor}
.facts{display:flex;flex-wrap:wrap;gap:0 14px;font-size:12px;color:var(--soft);font-variant-numeric:tabular-nums}
.chips{display:flex;flex-wrap:wrap;gap:4px;margin:8px 0 0;padding:0;list-style:none}
.chips li{background:var(--chip);border-radius:5px;padding:1px 7px;font-size:12px;max-width:100%;
overflow-wrap:anywhere}
.chips span{color:var(--soft)}
.chart{display:block;width:100%;height:auto;margin-top:10px;touch-action:pan-y}
.chart text{font-size:10px;fill:var(--soft)}
.grid{stroke:var(--grid);fill:none}
polyline{fill:none;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}
.train{stroke:var(--train)}.valid{stroke:var(--valid)}
.band{fill:var(--train);opacity:.16}.dots{fill:var(--valid)}
.key{display:flex;gap:14px;font-size:12px;color:var(--soft);min-height:18px}
.key b{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}
.k-train::before,.k-valid::before{content:"";display:inline-block;width:12px;height:0;border-top:2px solid var(--train);
margin-right:5px;vertical-align:middle}
.k-valid::before{border-color:var(--valid)}
.empty{display:grid;place-items:center;min-height:72px;color:var(--soft);font-size:12px;border:1px dashed var(--line);
border-radius:8px;margin-top:10px}
.sparks{display:grid;grid-template-columns:repeat(auto-fill,minmax(112px,1fr));gap:6px 12px;margin-top:8px}
.sparks div{font-size:12px;min-width:0}
.sparks span{display:flex;justify-content:space-between;gap:6px}
.sparks em{font-style:normal;color:var(--soft);overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.spark{display:block;width:100%;height:26px}
.spark polyline{stroke:var(--valid)}.spark circle{fill:var(--valid)}
.time{position:relative;height:8px;margin:12px 0 4px;background:var(--grid);border-radius:4px;overflow:hidden}
.time i{position:absolute;top:0;bottom:0;min-width:2px;background:currentColor;border-right:1px solid var(--card)}
.tries{margin:0;padding:0;list-style:none;font-size:12px;color:var(--soft);overflow-wrap:anywhere}
.why{margin:10px 0 0;padding:8px 10px;border-left:3px solid currentColor;background:var(--chip);font-size:12px;
border-radius:0 6px 6px 0;overflow-wrap:anywhere;white-space:pre-wrap}
.why span{color:var(--ink)}
details{margin-top:8px}
summary{cursor:pointer;font-size:12px;color:var(--soft)}
pre{margin:6px 0 0;padding:8px 10px;background:var(--code);border:1px solid var(--line);border-radius:6px;
max-height:260px;overflow:auto;font-size:11px;line-height:1.45;display:flex;flex-direction:column-reverse}
footer{padding:28px 0 40px}
@media print{.scroll{max-height:none}.card{break-inside:avoid}body{background:#fff}}
"""

# A hint of values under the pointer, and sorting by a click on a column; the page reads as well
# without.
SCRIPT = """
for (const svg of document.querySelectorAll("svg.chart")) {
  const numbers = name => svg.dataset[name].split(" ").map(Number);
  const [x0, x1] = numbers("x"), [y0, y1] = numbers("y"), [left, right, top, bottom] = numbers("box");
  const lines = [...svg.querySelectorAll("polyline")].map(line => ({name: line.dataset.name,
    points: line.getAttribute("points").split(" ").map(p => p.split(",").map(Number))}));
  const key = svg.nextElementSibling, before = key.innerHTML;
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    key.textContent = "";
    for (const line of lines) {
      const near = line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      const share = (bottom - near[1]) / (bottom - top);
      const value = svg.dataset.log === "1" ? y0 * Math.pow(y1 / y0, share) : y0 + share * (y1 - y0);
      const step = Math.round(x0 + (near[0] - left) / (right - left) * (x1 - x0));
      const item = document.createElement("span");
      item.className = line.name === "loss" ? "k-train" : "k-valid";
      item.textContent = `${line.name} ${value.toPrecision(4)} at ${step}`;
      key.append(item);
    }
  });
  svg.addEventListener("pointerleave", () => { key.innerHTML = before; });
}
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0];
    const at = head.cellIndex, down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => row.cells[at].dataset.value ?? row.cells[at].textContent;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return down ? -order : order;
    };
    body.append(...[...body.rows].sort(compare));
  });
}
"""


def page(title: str, body: str) -> str:
    """A whole HTML document around `body`, which is trusted; `title` is escaped.

    Its policy forbids every request, and every script but its own: a text that slipped through
    could not run.
    """
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri "
        "'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
