"""The report page's shell, style and script."""

from __future__ import annotations

__all__ = ["CSS", "JS", "PAGE", "POLICY"]

# Nothing runs but the two scripts of the page, nothing is loaded, nothing is sent.
POLICY = (
    "default-src 'none'; script-src 'sha256-{plotly}' 'sha256-{js}'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)

# Filled with str.format: every value is escaped HTML, a hash, or one of the constants below.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="probelens {version}">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<header class="bar">
<p class="brand">probelens report</p>
<button type="button" id="theme" hidden>Dark theme</button>
</header>
<div class="layout">
<nav class="toc" aria-labelledby="toc-title">
<h2 id="toc-title">Contents</h2>
<ol>
{toc}
</ol>
</nav>
<main id="main" tabindex="-1">
<h1>{title}</h1>
<div class="lead">{lead}</div>
<noscript><p class="note">The figures need JavaScript. Their numbers are in the tables.</p></noscript>
{body}
</main>
</div>
<footer class="foot">
<p>Made with probelens {version}. One self-contained file: it loads nothing from the network.
The figures are drawn by plotly.js (MIT licence), which is included.</p>
</footer>
<p id="said" class="visually-hidden" role="status"></p>
{data}
<!-- The script below is plotly.js; who holds the copyright is said at its top. Its licence, MIT:
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
files (the "Software"), to deal in the Software without restriction, including without limitation the rights to use, copy,
modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
Software is furnished to do so, subject to the following conditions:
The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.
THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE,
ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. -->
<script>{plotly}</script>
<script>{js}</script>
</body>
</html>
"""

CSS = """
:root {
  --bg: #ffffff; --panel: #f6f7f9; --ink: #1d2228; --soft: #4a525c; --line: #d5dae0;
  --link: #0a5a91; --accent: #0072b2; --shade: #00000038; color-scheme: light;
}
:root[data-theme=dark] {
  --bg: #14171c; --panel: #1c2027; --ink: #e8ebef; --soft: #b3bac4; --line: #343b45;
  --link: #7cc0f5; --accent: #4aa3df; --shade: #ffffff38; color-scheme: dark;
}
@media (prefers-color-scheme:dark) {
  :root:not([data-theme=light]) {
    --bg: #14171c; --panel: #1c2027; --ink: #e8ebef; --soft: #b3bac4; --line: #343b45;
    --link: #7cc0f5; --accent: #4aa3df; --shade: #ffffff38; color-scheme: dark;
  }
}
* { box-sizing: border-box }
html { scroll-behavior: smooth; scroll-padding-top: 4rem; -webkit-text-size-adjust: 100% }
@media (prefers-reduced-motion:reduce) {
  html { scroll-behavior: auto }
}
body {
  margin: 0; background: var(--bg); color: var(--ink);
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: anywhere;
}
a { color: var(--link) }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; border-radius: 3px }
main:focus { outline: none }
.skip {
  position: absolute; left: 1rem; top: -5rem; background: var(--bg); padding: .5rem 1rem;
  z-index: 20;
}
.skip:focus { top: .5rem }
.visually-hidden {
  position: absolute; width: 1px; height: 1px; margin: -1px; padding: 0; overflow: hidden;
  clip-path: inset(50%); white-space: nowrap; border: 0;
}
.bar {
  position: sticky; top: 0; z-index: 10; display: flex; justify-content: space-between;
  align-items: center; gap: 1rem; padding: .4rem clamp(1rem, 3vw, 2rem); background: var(--bg);
  border-bottom: 1px solid var(--line); min-height: 3.25rem;
}
.brand { margin: 0; font-weight: 650; letter-spacing: .01em; color: var(--soft) }
button {
  font: inherit; font-size: .875rem; color: var(--link); background: var(--bg);
  border: 1px solid var(--line); border-radius: 6px; padding: .35rem .8rem; min-height: 2.25rem;
  cursor: pointer;
}
button:hover { border-color: var(--accent); background: var(--panel) }
[hidden] { display: none!important }
.layout { max-width: 92rem; margin: 0 auto; padding: 0 clamp(1rem, 3vw, 2rem) }
main { min-width: 0; padding: 1rem 0 3rem }
h1 {
  font-size: clamp(1.55rem, 1.1rem + 2.2vw, 2.3rem); line-height: 1.2; letter-spacing: -.015em;
  margin: 1rem 0 .75rem; max-width: 32em; text-wrap: balance;
}
h2 { font-size: 1.4rem; line-height: 1.3; margin: 0 0 .5rem; letter-spacing: -.01em }
h3 { font-size: 1rem; margin: 0 0 .2rem }
section { padding-top: 2rem; margin-top: 2rem; border-top: 1px solid var(--line) }
p, ul.findings { max-width: 46rem; margin: .5rem 0 .75rem }
.lead { font-size: 1.125rem }
ul.findings { padding-left: 1.2rem }
ul.findings li { margin: .35rem 0 }
code, pre {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  font-size: .9em;
}
code { background: var(--panel); border-radius: 4px; padding: .08em .3em }
pre {
  background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: .9rem 1rem; margin: .5rem 0; overflow-x: auto; white-space: pre-wrap;
}
pre code { background: none; padding: 0 }
.toc h2 { font-size: .85rem; color: var(--soft); letter-spacing: 0; margin: 0 0 .35rem }
.toc { padding-top: 1rem; font-size: .92rem }
.toc ol {
  list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem;
}
.toc a { display: inline-block; padding: .28rem 0; text-decoration: none }
.toc a:hover { text-decoration: underline }
@media (min-width:72rem) {
  .layout { display: grid; grid-template-columns: 13.5rem minmax(0, 1fr); gap: 3rem }
  .toc {
    position: sticky; top: 3.25rem; align-self: start; max-height: calc(100vh - 3.5rem);
    overflow: auto; padding-top: 2rem;
  }
  .toc ol { display: block }
  .toc li { border-left: 2px solid var(--line); padding-left: .8rem }
}
dl.facts { margin: .75rem 0; max-width: 60rem }
dl.facts div {
  display: grid; grid-template-columns: minmax(7rem, 12rem) minmax(0, 1fr); padding: .5rem 0;
  border-top: 1px solid var(--line);
}
dl.facts dt { font-weight: 600; padding-right: 1rem }
dl.facts dd { margin: 0 }
dl.settings {
  max-width: none; display: grid;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 0 2.5rem;
  font-size: .92rem;
}
dl.settings div { padding: .3rem 0 }
@media (max-width:34rem) {
  dl.facts:not(.settings) div { display: block }
}
.terms {
  background: var(--panel); border-radius: 10px; padding: 1rem 1.1rem .2rem; margin: 1rem 0;
  columns: 20rem; column-gap: 2rem;
}
.terms div { break-inside: avoid; padding-bottom: .8rem }
.terms p { margin: 0; font-size: .92rem; color: var(--soft); line-height: 1.5 }
.again { font-size: .92rem; color: var(--soft) }
.note {
  border-left: 4px solid var(--accent); background: var(--panel); padding: .7rem 1rem;
  border-radius: 0 8px 8px 0;
}
.note p { margin: .2rem 0 }
.charts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr));
  gap: 0 2.5rem; margin: 1.25rem 0;
}
figure {
  margin: 0 0 1.5rem; min-width: 0; display: grid; grid-template-columns: minmax(0, 1fr);
  align-content: start; grid-row: span 4; grid-template-rows: auto auto auto auto;
}
@supports (grid-template-rows:subgrid) {
  .charts figure { grid-template-rows: subgrid }
}
figcaption { font-size: .95rem; line-height: 1.45; margin: 0 0 .5rem; max-width: 46rem }
figcaption b { font-weight: 650 }
.plot { width: 100%; min-height: 12rem }
.actions { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; margin: .4rem 0 }
details { margin: .5rem 0; min-width: 0 }
summary {
  cursor: pointer; color: var(--link); padding: .3rem 0; font-size: .92rem; width: fit-content;
  max-width: 100%;
}
.words { font-size: .92rem; color: var(--soft) }
.scroll {
  overflow: auto; max-width: 100%; max-height: 26rem; border: 1px solid var(--line);
  border-radius: 8px;
  background: linear-gradient(to right, var(--bg) 40%, transparent) left/3rem 100% no-repeat local,
    linear-gradient(to left, var(--bg) 40%, transparent) right/3rem 100% no-repeat local,
    linear-gradient(to right, var(--shade), transparent) left/.9rem 100% no-repeat scroll,
    linear-gradient(to left, var(--shade), transparent) right/.9rem 100% no-repeat scroll;
}
table {
  border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums;
  min-width: 100%; overflow-wrap: normal;
}
caption { text-align: left; padding: .5rem .75rem; color: var(--soft) }
td:not(.n) { min-width: 5rem }
td:first-child:not(.n) { min-width: 7rem }
th, td {
  text-align: left; padding: .4rem .75rem; border-top: 1px solid var(--line);
  vertical-align: top; max-width: 26rem;
}
thead th {
  position: sticky; top: 0; background: var(--panel); border-top: 0; white-space: nowrap;
}
td.n, th.n { text-align: right; white-space: nowrap }
.foot {
  border-top: 1px solid var(--line); padding: 1rem clamp(1rem, 3vw, 2rem) 2rem;
  color: var(--soft); font-size: .875rem;
}
@media print {
  .toc, .bar, .actions, .skip { display: none }
  .layout { display: block }
  figure { break-inside: avoid }
}
"""

JS = r"""
(() => {
"use strict";
const read = id => JSON.parse(document.getElementById(id).textContent);
const templates = read("page-data");
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 34rem)");
const coarse = matchMedia("(pointer: coarse)");
const toggle = document.getElementById("theme");
const said = document.getElementById("said");
const charts = [...document.querySelectorAll("[data-figure]")].map(box => ({
  box, plot: box.querySelector(".plot"), figure: read(box.dataset.figure)}));

let stored = null;
try { stored = localStorage.getItem("probelens-theme"); } catch (e) { stored = null; }
let chosen = stored === "light" || stored === "dark" ? stored : null;
const theme = () => chosen || (dark.matches ? "dark" : "light");

// A fresh copy each time: plotly writes into what it is given.
const spec = (chart, name) => {
  const figure = structuredClone(chart.figure);
  figure.layout.template = templates[name];
  return figure;
};
const draw = chart => {
  const figure = spec(chart, theme());
  const config = {responsive: true, displaylogo: false, displayModeBar: false};
  // Dragging on a touch screen scrolls the page instead of zooming.
  if (coarse.matches || narrow.matches) figure.layout.dragmode = false;
  if (narrow.matches) {
    figure.layout.font = {...figure.layout.font, size: 12};
    figure.layout.height = (figure.layout.height || 420) + 40;
  }
  return Plotly.react(chart.plot, figure.data, figure.layout, config);
};
const show = () => {
  root.dataset.theme = theme();
  toggle.textContent = theme() === "dark" ? "Light theme" : "Dark theme";
};
const redraw = () => Promise.all(charts.map(draw));

show();
toggle.hidden = false;
toggle.addEventListener("click", () => {
  chosen = theme() === "dark" ? "light" : "dark";
  try { localStorage.setItem("probelens-theme", chosen); } catch (e) { /* for this visit only */ }
  show();
  redraw();
});
dark.addEventListener("change", () => { show(); redraw(); });
narrow.addEventListener("change", redraw);

const save = (href, name) => {
  const link = document.createElement("a");
  link.href = href;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  said.textContent = "Saved " + name;
};
const cell = value => {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
};
const csv = table => [table.columns, ...table.rows].map(row => row.map(cell).join(",")).join("\r\n") + "\r\n";
const saveCsv = (id, name) => {
  const url = URL.createObjectURL(new Blob([csv(read(id))], {type: "text/csv;charset=utf-8"}));
  save(url, name + ".csv");
  setTimeout(() => URL.revokeObjectURL(url), 10000);
};
// Pictures are saved on white, as papers and slides want them, whatever the page's theme.
const savePicture = async (chart, format, name) => {
  const figure = spec(chart, "light");
  Object.assign(figure.layout, {paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff"});
  const size = {width: 900, height: figure.layout.height || 420};
  const url = await Plotly.toImage(figure, {format, scale: format === "png" ? 2 : 1, ...size});
  save(url, name + "." + format);
};
document.addEventListener("click", async event => {
  const button = event.target.closest("button[data-do]");
  if (!button) return;
  const {do: action, rows, name} = button.dataset;
  const chart = charts.find(c => c.box.contains(button));
  if (action === "csv") saveCsv(rows, name);
  else if (action === "reset") draw(chart);
  else if (action === "copy") {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      said.textContent = "Copied";
      button.textContent = "Copied";
    } catch (e) {
      getSelection().selectAllChildren(code);
      said.textContent = "Selected: copy with the keyboard";
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  } else await savePicture(chart, action, name);
});

redraw().then(() => { root.dataset.ready = "true"; });
})();
"""
