// Helpers. Untrusted text is only ever set as text content; no script on this page parses HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function put(parent, name, attributes = {}, text) {
  const made = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function unpack(base64, Kind) {
  return new Kind(Uint8Array.from(atob(base64), (one) => one.charCodeAt(0)).buffer);
}

const KINDS = { position: Int32Array, step: Int32Array, text: Int32Array, verdict: Int8Array };
const unpacked = (columns) => Object.fromEntries(Object.entries(columns).map(([name, x]) => [name, unpack(x, KINDS[name] ?? Float32Array)]));

const letter = (run) => (run < 26 ? String.fromCharCode(65 + run) : `R${run + 1}`);
const style = (run) => `c${run % 8} d${(run + Math.floor(run / 8)) % 6}`;
const many = DATA.runs.length > 1;

function number(x, percent = false) {
  if (x === null || x === undefined) return "–";
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (percent) return `${trimmed((100 * x).toFixed(Math.abs(x) < 0.1 ? 2 : 1))}%`;
  if (x === 0) return "0";
  const size = Math.abs(x);
  const text = size >= 1e5 || size < 1e-3 ? x.toExponential(1).replace(".0e", "e").replace("e+", "e") : trimmed(x.toPrecision(3));
  return text.replaceAll("-", "−");
}

const trimmed = (text) => (text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text);

// Returns about `count` round numbers from low to high.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9 * step; at++) found.push(at * step);
  return found;
}

// Returns at most `count` powers of ten between low and high.
function decades(low, high, count) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / count));
  const found = [];
  for (let at = first; at <= last; at += every) found.push(10 ** at);
  return found;
}

// Redraws when the width or the color scheme changes.
function whenResized(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth && element.clientWidth !== width) draw((width = element.clientWidth));
  }).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => width && draw(width));
}

function table(parent, caption, heads, rows) {
  const box = put(parent, "div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption });
  const made = put(box, "table");
  put(made, "caption", {}, caption);
  const head = put(put(made, "thead"), "tr");
  for (const one of heads) put(head, "th", { scope: "col" }, one);
  const body = put(made, "tbody");
  for (const row of rows) {
    const line = put(body, "tr");
    for (const one of row) put(line, "td", {}, one);
  }
}

// Adds a table of the chart's numbers, built when it is opened.
function asTable(figure, fill) {
  const details = put(figure, "details");
  put(details, "summary", {}, "Table");
  details.addEventListener("toggle", () => details.open && details.children.length === 1 && fill(details));
}
