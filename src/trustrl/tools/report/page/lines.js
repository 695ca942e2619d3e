// Line charts over the steps: SVG, one line style per run, labels at the line ends.
const HEIGHT = 190;
const TABLE_ROWS = 120;
const FEW = 12; // lines with at most this many points get a dot at each

function lineChart(chart) {
  const figure = document.getElementById(`chart-${chart.key}`);
  const plot = figure.querySelector(".plot");
  const readout = put(figure, "p", { class: "readout", "aria-live": "polite" });
  const steps = [...new Set(chart.lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
  const at = chart.lines.map((line) => new Map(line.points));
  const scale = vertical(chart);
  let cursor = -1;
  let place = null;

  whenResized(plot, (width) => (place = drawn(plot, chart, scale, steps, width)));

  function show(index) {
    cursor = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[cursor];
    place.cursor(step);
    const values = chart.lines.map((line, i) => [line.run, at[i].get(step)]).filter(([, value]) => value !== undefined);
    const said = values.map(([run, value]) => `${many ? `${letter(run)} ` : ""}${value === null ? "not finite" : number(value, chart.percent)}`);
    readout.textContent = `step ${step}:  ${said.join("   ")}`;
  }
  function hide() {
    readout.textContent = "";
    place?.cursor(null);
  }
  plot.addEventListener("pointermove", (event) => {
    const step = place.step(event.clientX - plot.getBoundingClientRect().left);
    let best = 0;
    steps.forEach((one, i) => Math.abs(one - step) < Math.abs(steps[best] - step) && (best = i));
    show(best);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("focusout", hide);
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    show(cursor < 0 && Number.isFinite(by) ? 0 : cursor + by);
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

// Returns the range of values, and whether it needs a logarithmic scale.
function vertical(chart) {
  const values = chart.lines.flatMap((line) => line.points.map((point) => point[1])).filter((value) => value !== null);
  if (!values.length) return { low: 0, high: 1, log: false };
  const sorted = [...values].sort((a, b) => a - b);
  const [least, most, middle] = [sorted[0], sorted.at(-1), sorted[sorted.length >> 1]];
  if (least > 0 && most / middle > 40) return { low: least / 1.2, high: most * 1.2, log: true };
  if (chart.percent && chart.key === "accuracy") return { low: 0, high: 1, log: false };
  let [low, high] = [Math.min(least, least >= 0 && least < most / 2 ? 0 : least), most];
  if (chart.bound !== null && chart.bound < 3 * most) high = Math.max(high, chart.bound);
  if (high === 0 && low === 0) return { low: 0, high: 1, log: false, flat: true };
  if (high === low) [low, high] = [Math.min(0, low), Math.max(0, high)];
  const room = (high - low) * 0.06;
  return { low: low === 0 ? 0 : low - room, high: high + room, log: false };
}

function drawn(plot, chart, scale, steps, width) {
  plot.replaceChildren();
  const wide = width > 420;
  const labels = chart.lines.map((line) => (wide ? `${letter(line.run)} ${shortened(DATA.runs[line.run].label)}` : letter(line.run)));
  const right = many ? 14 + Math.max(...labels.map((label) => label.length)) * 6.2 : 12;
  const box = { left: 46, right: width - right, top: 8, bottom: HEIGHT - 24 };
  const [first, last] = [steps[0], Math.max(steps.at(-1), steps[0] + 1)];
  const x = (step) => box.left + ((step - first) / (last - first)) * (box.right - box.left);
  const share = (v) => (scale.log ? Math.log(v / scale.low) / Math.log(scale.high / scale.low) : (v - scale.low) / (scale.high - scale.low));
  const y = (v) => box.bottom - share(v) * (box.bottom - box.top);
  const svg = put(plot, "svg:svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, tabindex: 0, role: "img", "aria-label": spoken(chart) });

  const marks = scale.flat ? [scale.low] : scale.log ? decades(scale.low, scale.high, 5) : ticks(scale.low, scale.high, 4);
  for (const mark of marks) {
    put(svg, "svg:line", { class: "gridline", x1: box.left, x2: box.right, y1: y(mark), y2: y(mark) });
    put(svg, "svg:text", { x: box.left - 6, y: y(mark) + 4, "text-anchor": "end" }, number(mark, chart.percent));
  }
  put(svg, "svg:line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
  for (const mark of ticks(first, last, wide ? 6 : 4).filter(Number.isInteger)) {
    if (x(mark) < box.right - 58) put(svg, "svg:text", { x: x(mark), y: HEIGHT - 8, "text-anchor": "middle" }, mark);
  }
  put(svg, "svg:text", { x: box.right, y: HEIGHT - 8, "text-anchor": "end" }, `step ${last}`);
  if (chart.bound !== null && share(chart.bound) > 0 && share(chart.bound) <= 1) {
    put(svg, "svg:line", { class: "bound", x1: box.left, x2: box.right, y1: y(chart.bound), y2: y(chart.bound) });
    const above = y(chart.bound) > 22; // otherwise the label does not fit
    put(svg, "svg:text", { class: "halo", x: box.right - 2, y: y(chart.bound) + (above ? -4 : 13), "text-anchor": "end" }, `bound ${number(chart.bound)}`);
  }
  for (const line of chart.lines) {
    const group = put(svg, "svg:g", { class: `c${line.run % 8}` });
    const main = line.mean.length ? line.mean : line.points;
    if (line.mean.length && chart.lines.length < 4) put(group, "svg:path", { class: "run raw", d: path(line.points, x, y) });
    put(group, "svg:path", { class: `run ${style(line.run)}`, d: path(main, x, y) });
    for (const [step, value] of main.length <= FEW ? main : []) {
      if (value !== null) put(group, "svg:circle", { class: "run dot", cx: x(step), cy: y(value), r: 3 });
    }
    for (const [step, value] of line.points) {
      if (value === null) put(group, "svg:text", { class: "gap", x: x(step), y: box.top + 6, "text-anchor": "middle" }, "✕");
    }
  }
  if (many) endLabels(svg, chart, labels, x, y, box);
  const rule = put(svg, "svg:line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  return {
    step: (pixel) => first + ((pixel - box.left) / (box.right - box.left)) * (last - first),
    cursor(step) {
      rule.setAttribute("visibility", step === null ? "hidden" : "visible");
      if (step !== null) for (const end of ["x1", "x2"]) rule.setAttribute(end, x(step));
    },
  };
}

// Labels at the line ends, pushed apart where lines end close together.
function endLabels(svg, chart, labels, x, y, box) {
  const ends = chart.lines
    .map((line, i) => {
      const finite = (line.mean.length ? line.mean : line.points).filter((point) => point[1] !== null);
      if (!finite.length) return null;
      const [step, value] = finite.at(-1);
      return { run: line.run, text: labels[i], x: x(step), y: y(value), at: y(value) };
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
  return `${chart.title} in ${chart.unit}, over the steps: ${said.join("; ")}. Use the arrow keys to read single steps.`;
}
