// Line charts over the steps: SVG, one line style per run, labels at the line ends.
const HEIGHT = 190;
const TABLE_ROWS = 120;
const FEW = 12; // lines with at most this many points get a dot at each

function lineChart(chart) {
  const figure = document.getElementById(`chart-${chart.key}`);
  const plot = figure.querySelector(".plot");
  const readout = put(figure, "p", { class: "readout" });
  const steps = [...new Set(chart.lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
  const at = chart.lines.map((line) => new Map(line.points));
  let cursor = -1;
  let place = null;

  const draw = (width) => {
    const focused = plot.contains(document.activeElement);
    place = drawn(plot, chart, width);
    if (focused) plot.firstElementChild.focus();
  };
  whenResized(plot, draw);
  zoomable(plot, () => place);
  view.charts.push({ redraw: () => plot.clientWidth && draw(plot.clientWidth), hover });

  function hover(step) {
    if (place === null || !plot.clientWidth) return;
    if (step === null) {
      readout.textContent = "";
      place.cursor(null);
      return;
    }
    cursor = nearest(steps, step);
    const found = steps[cursor];
    place.cursor(found);
    const values = chart.lines.map((line, i) => [line.run, at[i].get(found)]).filter(([, value]) => value !== undefined);
    const said = values.map(([run, value]) => `${many ? `${letter(run)} ` : ""}${value === null ? "not finite" : number(value, chart.percent)}`);
    readout.textContent = `step ${found}:  ${said.join("   ")}`;
  }
  plot.addEventListener("pointermove", (event) => hoverAt(place.step(event.clientX - plot.getBoundingClientRect().left)));
  plot.addEventListener("pointerleave", () => hoverAt(null));
  plot.addEventListener("focusin", () => readout.setAttribute("aria-live", "polite"));
  plot.addEventListener("focusout", (event) => {
    if (plot.contains(event.relatedTarget)) return;
    readout.removeAttribute("aria-live");
    hoverAt(null);
  });
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (by !== undefined) {
      const next = cursor < 0 && Number.isFinite(by) ? 0 : Math.max(0, Math.min(steps.length - 1, cursor + by));
      hoverAt(steps[next]);
    } else if (KEYS[event.key]) zoomBy(KEYS[event.key], cursor < 0 ? undefined : steps[cursor]);
    else if (event.key === "0" || event.key === "Escape") zoomOut();
    else return;
    event.preventDefault();
  });

  asTable(figure, (details) => {
    const every = Math.ceil(steps.length / TABLE_ROWS);
    const some = steps.filter((_, i) => i % every === 0 || i === steps.length - 1);
    const heads = ["step", ...chart.lines.map((line) => DATA.runs[line.run].label)];
    const cell = (i, step) => (at[i].has(step) ? (at[i].get(step) === null ? "not finite" : number(at[i].get(step), chart.percent)) : "–");
    const rows = some.map((step) => [step, ...chart.lines.map((_, i) => cell(i, step))]);
    table(details, `${chart.title}, ${chart.unit}${every > 1 ? `, every ${every}th of ${steps.length} steps` : ""}`, heads, rows);
  });
}

// Returns the place of the step nearest to a given one, by bisection.
function nearest(steps, step) {
  let [low, high] = [0, steps.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

// Returns the range of visible values, and whether it needs a logarithmic scale.
function vertical(chart, lines) {
  const [from, to] = shownRange();
  const inRange = (points) => points.filter(([step, value]) => value !== null && step >= from && step <= to).map((point) => point[1]);
  let values = lines.flatMap((line) => inRange(line.points));
  if (!values.length) values = lines.flatMap((line) => line.points.map((point) => point[1]).filter((value) => value !== null));
  if (!values.length) return { low: 0, high: 1, log: false };
  const sorted = [...values].sort((a, b) => a - b);
  const [least, most, middle] = [sorted[0], sorted.at(-1), sorted[sorted.length >> 1]];
  if (least > 0 && most / middle > 40) return { low: least / 1.2, high: most * 1.2, log: true };
  if (chart.percent && chart.key === "accuracy") return { low: 0, high: 1, log: false };
  let [low, high] = [Math.min(least, least >= 0 && least < most / 2 ? 0 : least), most];
  for (const edge of [chart.bound, chart.band?.[1]]) if (edge != null && edge < 3 * most) high = Math.max(high, edge);
  if (chart.band?.[0] != null && chart.band[0] > least / 3) low = Math.min(low, chart.band[0]);
  if (high === 0 && low === 0) return { low: 0, high: 1, log: false, flat: true };
  if (high === low) [low, high] = [Math.min(0, low), Math.max(0, high)];
  const room = (high - low) * 0.06;
  return { low: low === 0 ? 0 : low - room, high: high + room, log: false };
}

function drawn(plot, chart, width) {
  plot.replaceChildren();
  const wide = width > 420;
  const lines = chart.lines.map((line) => {
    const mean = smoothed(line);
    return { run: line.run, points: within(line.points), mean: mean && within(mean) };
  });
  const scale = vertical(chart, lines);
  const labels = chart.lines.map((line) => (wide ? `${letter(line.run)} ${shortened(DATA.runs[line.run].label)}` : letter(line.run)));
  const right = many ? 14 + Math.max(...labels.map((label) => label.length)) * 6.2 : 12;
  const box = { left: 46, right: width - right, top: 8, bottom: HEIGHT - 24 };
  const [first, last] = shownRange();
  const x = (step) => box.left + ((step - first) / (last - first)) * (box.right - box.left);
  const share = (v) => (scale.log ? Math.log(v / scale.low) / Math.log(scale.high / scale.low) : (v - scale.low) / (scale.high - scale.low));
  const y = (v) => box.bottom - share(v) * (box.bottom - box.top);
  const svg = put(plot, "svg:svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, tabindex: 0, role: "img", "aria-label": spoken(chart) });
  if (chart.band) healthy(svg, chart.band, scale, box, y);
  axes(svg, chart, scale, box, { x, y, first, last, wide });
  const inner = Math.max(1, box.right - box.left + 3);
  // A nested image clips lines that leave the zoomed range.
  const data = put(svg, "svg:svg", { x: box.left - 3, width: inner + 3, height: HEIGHT, viewBox: `${box.left - 3} 0 ${inner + 3} ${HEIGHT}`, overflow: "hidden" });
  for (const line of lines) {
    const group = put(data, "svg:g", { class: `c${line.run % 8}` });
    const main = line.mean ?? line.points;
    if (line.mean && chart.lines.length < 4) put(group, "svg:path", { class: "run raw", d: path(line.points, x, y) });
    put(group, "svg:path", { class: `run ${style(line.run)}`, d: path(main, x, y) });
    for (const [step, value] of main.length <= FEW ? main : []) {
      if (value !== null) put(group, "svg:circle", { class: "run dot", cx: x(step), cy: y(value), r: 3 });
    }
    for (const [step, value] of line.points) {
      if (value === null) put(group, "svg:text", { class: "gap", x: x(step), y: box.top + 6, "text-anchor": "middle" }, "✕");
    }
  }
  if (chart.bound !== null && share(chart.bound) > 0 && share(chart.bound) <= 1) {
    put(svg, "svg:line", { class: "bound", x1: box.left, x2: box.right, y1: y(chart.bound), y2: y(chart.bound) });
    const above = y(chart.bound) > 22; // otherwise the label does not fit
    put(svg, "svg:text", { class: "halo", x: box.right - 2, y: y(chart.bound) + (above ? -4 : 13), "text-anchor": "end" }, `bound ${number(chart.bound)}`);
  }
  if (many) endLabels(svg, lines, labels, { x, y, box, last });
  for (const mark of chart.marks ?? []) evidence(svg, mark, (lines.find((line) => line.run === mark.run) ?? lines[0]).points, box, { x, y, first, last });
  const chosen = put(svg, "svg:rect", { class: "selection", y: box.top, height: box.bottom - box.top, visibility: "hidden" });
  const rule = put(svg, "svg:line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  return {
    step: (pixel) => first + ((pixel - box.left) / (box.right - box.left)) * (last - first),
    cursor(step) {
      const hidden = step === null || step < first || step > last;
      rule.setAttribute("visibility", hidden ? "hidden" : "visible");
      if (!hidden) for (const end of ["x1", "x2"]) rule.setAttribute(end, x(step));
    },
    selection(range) {
      chosen.setAttribute("visibility", range === null ? "hidden" : "visible");
      if (range === null) return;
      const [a, b] = range.map((step) => Math.max(box.left, Math.min(box.right, x(step)))).sort((p, q) => p - q);
      chosen.setAttribute("x", a);
      chosen.setAttribute("width", b - a);
    },
  };
}

// Marks the step of a number that supports a cause, or from which runs differ: a line, a dot on the curve, and the number.
function evidence(svg, mark, points, box, { x, y, first, last }) {
  if (mark.step < first || mark.step > last) return;
  const at = x(mark.step);
  put(svg, "svg:line", { class: "mark", x1: at, x2: at, y1: box.top, y2: box.bottom });
  const value = points.filter((point) => point[1] !== null && point[0] >= mark.step)[0]?.[1];
  if (value !== undefined) put(svg, "svg:circle", { class: "mark dot", cx: at, cy: y(value), r: 4.5 });
  const left = at > (box.left + box.right) / 2;
  put(svg, "svg:text", { class: "halo mark", x: at + (left ? -7 : 7), y: box.top + 11, "text-anchor": left ? "end" : "start" }, mark.text);
}

// Shades the healthy range as far as it is visible.
function healthy(svg, [low, high], scale, box, y) {
  const top = high === null || high >= scale.high ? box.top : y(Math.max(high, scale.low));
  const bottom = low === null || low <= scale.low ? box.bottom : y(Math.min(low, scale.high));
  const tall = Math.max(bottom - top, low === high ? 2 : 0);
  if (tall > 0) put(svg, "svg:rect", { class: "band", x: box.left, y: bottom - tall, width: Math.max(0, box.right - box.left), height: tall });
}

function axes(svg, chart, scale, box, { x, y, first, last, wide }) {
  const marks = scale.flat ? [scale.low] : scale.log ? decades(scale.low, scale.high, 5) : ticks(scale.low, scale.high, 4);
  for (const mark of marks) {
    put(svg, "svg:line", { class: "gridline", x1: box.left, x2: box.right, y1: y(mark), y2: y(mark) });
    put(svg, "svg:text", { x: box.left - 6, y: y(mark) + 4, "text-anchor": "end" }, number(mark, chart.percent));
  }
  put(svg, "svg:line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
  for (const mark of ticks(first, last, wide ? 6 : 4).filter(Number.isInteger)) {
    if (x(mark) < box.right - 58) put(svg, "svg:text", { x: x(mark), y: HEIGHT - 8, "text-anchor": "middle" }, mark);
  }
  put(svg, "svg:text", { x: box.right, y: HEIGHT - 8, "text-anchor": "end" }, `step ${Math.floor(last)}`);
}

// Labels at the line ends, pushed apart where lines end close together.
function endLabels(svg, lines, labels, { x, y, box, last }) {
  const ends = lines
    .map((line, i) => {
      const finite = (line.mean ?? line.points).filter((point) => point[1] !== null && point[0] <= last);
      if (!finite.length) return null;
      const [step, value] = finite.at(-1);
      const at = Math.max(box.top, Math.min(box.bottom, y(value)));
      return { run: line.run, text: labels[i], x: x(step), y: at, at };
    })
    .filter((end) => end !== null)
    .sort((a, b) => a.y - b.y);
  for (let i = 1; i < ends.length; i++) ends[i].y = Math.max(ends[i].y, ends[i - 1].y + 12);
  const over = ends.length ? Math.max(0, ends.at(-1).y - box.bottom) : 0;
  for (let i = ends.length - 1, most = box.bottom; over && i >= 0; i--, most -= 12) ends[i].y = Math.min(ends[i].y, most);
  for (const end of ends.filter((one) => one.x < box.right - 12)) {
    put(svg, "svg:path", { class: `run leader c${end.run % 8}`, d: `M${end.x + 3} ${end.at}L${box.right + 3} ${end.y}` });
  }
  for (const end of ends) put(svg, "svg:text", { class: `end c${end.run % 8}`, x: box.right + 6, y: end.y + 4 }, end.text);
}

const shortened = (label) => (label.length > 20 ? `${label.slice(0, 19)}…` : label);

function path(points, x, y) {
  let pen = "M";
  let made = "";
  for (const [step, value] of points) {
    if (value === null) pen = "M";
    else {
      made += `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    }
  }
  return made;
}

function spoken(chart) {
  const said = chart.lines.map((line) => {
    const finite = line.points.filter((point) => point[1] !== null);
    const ends = finite.length ? `from ${number(finite[0][1], chart.percent)} to ${number(finite.at(-1)[1], chart.percent)}` : "never finite";
    return `${DATA.runs[line.run].label} ${ends}`;
  });
  return `${chart.title}${chart.unit ? ` in ${chart.unit}` : ""}, over the steps: ${said.join("; ")}. Use the arrow keys to read single steps, plus and minus to zoom, 0 for the whole run.`;
}
