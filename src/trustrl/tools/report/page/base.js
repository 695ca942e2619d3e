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

// Range of steps, smoothing and cursor that all charts share.
const view = { from: -Infinity, to: Infinity, smooth: "auto", charts: [] };
const AUTO_FROM = 250; // lines with at least this many points are smoothed by default
const AUTO = 0.02;
const KEYS = { "+": 0.5, "=": 0.5, "-": 2, "−": 2, _: 2 };

// Steps of the longest line, from first to last.
const extent = (() => {
  const ends = DATA.charts.flatMap((chart) => chart.lines.flatMap((line) => [line.points[0][0], line.points.at(-1)[0]]));
  const first = ends.reduce((a, b) => Math.min(a, b), Infinity);
  return [first, Math.max(ends.reduce((a, b) => Math.max(a, b), -Infinity), first + 1)];
})();

const shownRange = () => [Math.max(view.from, extent[0]), Math.min(view.to, extent[1])];

function zoomTo(from, to) {
  const least = Math.min(1, extent[1] - extent[0]);
  if (to - from < least) [from, to] = [(from + to - least) / 2, (from + to + least) / 2];
  const whole = from <= extent[0] && to >= extent[1];
  [view.from, view.to] = whole ? [-Infinity, Infinity] : [Math.max(from, extent[0]), Math.min(to, extent[1])];
  const said = document.getElementById("zoomed");
  if (said) said.textContent = whole ? "" : `steps ${Math.ceil(view.from)} to ${Math.floor(view.to)}`;
  redraw();
}

// Scales the range by a factor around a step, or around its middle.
function zoomBy(factor, around) {
  const [from, to] = shownRange();
  const at = around ?? (from + to) / 2;
  zoomTo(at - (at - from) * factor, at + (to - at) * factor);
}

const zoomOut = () => zoomTo(-Infinity, Infinity);
const redraw = () => view.charts.forEach((chart) => chart.redraw());

function hoverAt(step) {
  for (const chart of view.charts) chart.hover(step);
}

// Returns the running mean over a share of the points, or null if the line is drawn as it is.
function smoothed(line) {
  const base = line.means.length ? line.means : line.points;
  const share = view.smooth === "auto" ? (line.means.length || line.points.length >= AUTO_FROM ? AUTO : 0) : Number(view.smooth);
  const width = Math.round(share * base.length);
  if (share === 0 || (width < 2 && !line.means.length)) return null;
  const finite = base.filter((point) => point[1] !== null);
  const means = [];
  let sum = 0;
  finite.forEach(([step, value], i) => {
    sum += value;
    if (i >= Math.max(1, width)) sum -= finite[i - Math.max(1, width)][1];
    means.push([step, sum / Math.min(i + 1, Math.max(1, width))]);
  });
  return means;
}

// Points inside the range, with one neighbor on each side so that lines reach the edges.
function within(points) {
  if (view.from === -Infinity) return points;
  const [from, to] = shownRange();
  const first = points.findIndex((point) => point[0] >= from);
  const last = points.findLastIndex((point) => point[0] <= to);
  return first < 0 || last < 0 ? [] : points.slice(Math.max(0, first - 1), last + 2);
}

function viewControls() {
  const smooth = document.getElementById("smooth");
  if (!smooth) return;
  smooth.addEventListener("change", () => ((view.smooth = smooth.value), redraw()));
  view.smooth = smooth.value;
  document.getElementById("zoom-in").addEventListener("click", () => zoomBy(0.5));
  document.getElementById("zoom-out").addEventListener("click", () => zoomBy(2));
  document.getElementById("zoom-reset").addEventListener("click", zoomOut);
}

// Adds zooming by drag, pinch, Ctrl and wheel, double click and keys to a plot. `place` converts pixels to steps.
function zoomable(plot, place) {
  let start = null;
  const at = (event) => place().step(event.clientX - plot.getBoundingClientRect().left);
  const end = (event) => {
    if (start === null) return;
    const moved = Math.abs(event.clientX - start.x);
    place().selection(null);
    const [a, b] = [start.step, at(event)].sort((x, y) => x - y);
    start = null;
    if (event.type === "pointerup" && moved > 8) zoomTo(a, b);
  };
  plot.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    start = { x: event.clientX, step: at(event) };
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    if (start !== null) place().selection(Math.abs(event.clientX - start.x) > 8 ? [start.step, at(event)] : null);
  });
  plot.addEventListener("pointerup", end);
  plot.addEventListener("pointercancel", end);
  plot.addEventListener("dblclick", zoomOut);
  plot.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey) return; // the wheel alone scrolls the page
      event.preventDefault();
      zoomBy(event.deltaY > 0 ? 1.25 : 0.8, at(event));
    },
    { passive: false },
  );
}
