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
// Text that a spreadsheet would run as a formula gets an apostrophe before it; numbers stay numbers.
const formula = text => /^[\s]*[=+\-@\uFF1D\uFF0B\uFF0D\uFF20]|^[\t\r\n]/.test(text) && !/^[+-]?(\d+\.?\d*(e[+-]?\d+)?|inf)$/i.test(text);
const cell = value => {
  let text = value === null || value === undefined ? "" : String(value);
  if (typeof value === "string" && formula(text)) text = "'" + text;
  return /[",;\t\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
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
