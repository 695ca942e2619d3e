// Scatter plots of ratio and probability gap: canvas, one shape and color per verdict.
const TALL = 340;
const INK = ["--v-kept", "--v-stopped", "--v-down", "--v-up", "--v-none", "--v-bad", "--v-kept"];
const ORDER = [4, 6, 0, 3, 2, 1]; // the most important verdict is drawn last; non-finite tokens cannot be plotted
const BINS = [0, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 1];
const LEAST = 1e-6; // probabilities closer to 0 or 1 are drawn at the edge

const logit = (p) => Math.log(p / (1 - p));
const inside = (p) => Math.min(1 - LEAST, Math.max(LEAST, p));

// One shape per verdict, also used in the legend.
function mark(ink, code, x, y, r) {
  if (code === 1) {
    ink.moveTo(x - r, y - r), ink.lineTo(x + r, y + r), ink.moveTo(x - r, y + r), ink.lineTo(x + r, y - r);
  } else if (code === 2 || code === 3) {
    const up = code === 3 ? r : -r;
    ink.moveTo(x - r, y + up * 0.8), ink.lineTo(x + r, y + up * 0.8), ink.lineTo(x, y - up), ink.closePath();
  } else if (code === 4) {
    ink.moveTo(x + r * 0.8, y), ink.arc(x, y, r * 0.8, 0, 2 * Math.PI);
  } else {
    ink.rect(x - r * 0.55, y - r * 0.55, r * 1.1, r * 1.1);
  }
}

const filled = (code) => code === 0 || code === 6;

function scatterPair(tokens) {
  const n = tokens.points.mu.length;
  const usable = [];
  for (let i = 0; i < n; i++) {
    if (Number.isFinite(tokens.points.mu[i]) && Number.isFinite(tokens.points.pi[i]) && tokens.points.verdict[i] !== 5) usable.push(i);
  }
  const b = tokens.mu;
  const ratio = {
    id: "scatter-ratio", title: `Ratio π/${b}`, log: true, tokens, usable, value: (mu, pi) => Math.exp(pi - mu),
    calm: 1,
    edge: (mu, by, side) => (tokens.edge.on === "ratio" ? 1 + side * by : 1 + (side * by) / mu),
  };
  const gap = {
    id: "scatter-gap", title: `Probability gap π − ${b}`, log: false, tokens, usable, value: (mu, pi) => Math.exp(pi) - Math.exp(mu),
    calm: 0,
    edge: (mu, by, side) => (tokens.edge.on === "ratio" ? side * by * mu : side * by),
  };
  for (const spec of [ratio, gap]) scatter(spec);
}

function scatter(spec) {
  const figure = document.getElementById(spec.id);
  const { tokens, usable } = spec;
  const values = Float64Array.from(usable, (i) => spec.value(tokens.points.mu[i], tokens.points.pi[i]));
  const range = fitted(spec, values);
  figure.querySelector("figcaption").replaceChildren();
  put(figure.querySelector("figcaption"), "strong", {}, spec.title);
  put(figure.querySelector("figcaption"), "span", { class: "unit" }, `over ${tokens.mu}${spec.log ? "; log scale" : ""}`);
  for (const gone of figure.querySelectorAll(".readout, details, .plot")) gone.remove();
  const plot = put(figure, "div", { class: "plot" });
  const counts = DATA.verdicts.map(() => 0);
  for (const i of usable) counts[tokens.points.verdict[i]]++;
  const said = DATA.verdicts.map((one, code) => `${counts[code]} ${one.name}`).filter((_, code) => counts[code]);
  const split = tokens.decided ? `: ${said.join(", ")}` : "";
  const label = `${spec.title} over ${tokens.mu}, of ${usable.length} sampled tokens${split}. The table below lists the numbers.`;
  const canvas = put(plot, "canvas", { role: "img", "aria-label": label, tabindex: 0, height: TALL });
  const readout = put(figure, "p", { class: "readout" });
  let spots = null;
  whenResized(plot, (width) => (spots = paint(canvas, spec, values, range, width)));
  plot.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let [best, least] = [-1, 14 ** 2];
    for (let k = 0; k < usable.length; k++) {
      const away = (spots.x[k] - x) ** 2 + (spots.y[k] - y) ** 2;
      if (away < least) [best, least] = [k, away];
    }
    readout.textContent = best < 0 ? "" : about(usable[best]);
  });
  plot.addEventListener("pointerleave", () => (readout.textContent = ""));

  function about(i) {
    const { mu, pi, verdict, step, text } = tokens.points;
    const [was, is] = [Math.exp(mu[i]), Math.exp(pi[i])];
    const numbers = `${tokens.mu} ${number(was)}, π ${number(is)}, ratio ${number(is / was)}, gap ${number(is - was)}`;
    const name = tokens.decided ? `, ${DATA.verdicts[verdict[i]].name}` : "";
    return `‘${DATA.texts[text[i]]}’ at step ${step[i]}${name}: ${numbers}`;
  }

  asTable(figure, (details) => {
    const verdicts = tokens.decided ? ["masked", "share"] : [];
    const heads = [tokens.mu, "tokens", ...verdicts, spec.log ? "median ratio" : "median gap", spec.log ? "highest ratio" : "largest gap"];
    const rows = BINS.slice(1).map((high, bin) => {
      const here = usable.map((i, k) => [Math.exp(tokens.points.mu[i]), k]).filter(([p]) => p >= BINS[bin] && (p < high || high === 1)).map(([, k]) => k);
      const stopped = here.filter((k) => tokens.points.verdict[usable[k]] === 1).length;
      const sorted = here.map((k) => values[k]).sort((a, c) => a - c);
      const most = spec.log ? sorted.at(-1) : sorted.reduce((x, y) => (Math.abs(y) > Math.abs(x) ? y : x), 0);
      const shares = tokens.decided ? [stopped, number(here.length ? stopped / here.length : null, true)] : [];
      return [`${number(BINS[bin])} to ${number(high)}`, here.length, ...shares, number(sorted[sorted.length >> 1]), number(here.length ? most : null)];
    });
    table(details, `${spec.title}, sampled tokens by ${tokens.mu}`, heads, rows);
  });
}

// Fits the range to all but the outermost tokens, which are drawn at the edge.
function fitted(spec, values) {
  const sorted = values.slice().sort();
  const [least, most] = [0.002, 0.998].map((share) => sorted[Math.floor((sorted.length - 1) * share)] ?? spec.calm);
  if (spec.log) return [Math.max(1e-3, Math.min(0.66, least / 1.2)), Math.min(1e3, Math.max(1.5, most * 1.2))];
  const edge = spec.tokens.edge?.on === "gap" ? spec.tokens.edge : null;
  return [Math.max(-1, Math.min(-0.02, -1.3 * (edge?.low ?? 0), 1.1 * least)), Math.min(1, Math.max(0.02, 1.3 * (edge?.high ?? 0), 1.1 * most))];
}

function paint(canvas, spec, values, [low, high], width) {
  const { tokens, usable } = spec;
  const css = getComputedStyle(document.documentElement);
  const colour = (name) => css.getPropertyValue(name).trim();
  const dense = window.devicePixelRatio || 1;
  canvas.width = width * dense;
  canvas.height = TALL * dense;
  canvas.style.height = `${TALL}px`;
  const ink = canvas.getContext("2d");
  ink.scale(dense, dense);
  const box = { left: 46, right: width - 10, top: 8, bottom: TALL - 40 };
  const probabilities = [1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999];
  const least = usable.reduce((x, i) => Math.min(x, tokens.points.mu[i]), 0);
  const [start, end] = [logit(inside(Math.min(0.005, Math.exp(least)))), logit(1 - 1e-5)];
  const x = (p) => box.left + Math.min(1, Math.max(0, (logit(inside(p)) - start) / (end - start))) * (box.right - box.left);
  const share = (v) => (spec.log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
  const y = (v) => box.bottom - Math.min(1, Math.max(0, share(v))) * (box.bottom - box.top);
  ink.font = `11px ${getComputedStyle(document.body).fontFamily}`;

  const between = Math.log10(high / low) < 4 ? [1, 2, 5] : [1];
  const all = [-3, -2, -1, 0, 1, 2].flatMap((power) => between.map((one) => one * 10 ** power));
  const marks = spec.log ? all.filter((v) => v >= low && v <= high) : ticks(low, high, 6);
  ink.textAlign = "right";
  for (const value of marks) {
    line(colour(value === spec.calm ? "--faint" : "--grid"), box.left, y(value), box.right, y(value));
    ink.fillStyle = colour("--soft");
    ink.fillText(number(value), box.left - 6, y(value) + 4);
  }
  ink.textAlign = "center";
  let taken = -Infinity;
  for (const p of probabilities.filter((one) => logit(one) >= start - 0.3 && logit(one) <= end)) {
    const text = p > 0.5 ? String(p) : number(p);
    const half = ink.measureText(text).width / 2;
    line(colour("--grid"), x(p), box.top, x(p), box.bottom);
    if (x(p) - half < taken + 8) continue;
    taken = x(p) + half;
    ink.fillStyle = colour("--soft");
    ink.fillText(text, x(p), box.bottom + 15);
  }
  ink.fillText(`${tokens.mu}, probability when sampled (logit scale)`, (box.left + box.right) / 2, TALL - 8);
  line(colour("--rule"), box.left, box.bottom, box.right, box.bottom);

  const spots = { x: new Float32Array(usable.length), y: new Float32Array(usable.length) };
  usable.forEach((i, k) => ((spots.x[k] = x(Math.exp(tokens.points.mu[i]))), (spots.y[k] = y(values[k]))));
  const known = new Set(tokens.points.verdict);
  for (const code of ORDER.filter((one) => known.has(one))) {
    const size = code === 0 || code === 4 || code === 6 ? 2.2 : 3.4;
    ink.globalAlpha = filled(code) ? 0.55 : code === 4 ? 0.6 : 0.9;
    ink.strokeStyle = ink.fillStyle = colour(INK[code]);
    ink.lineWidth = code === 1 ? 1.4 : 1;
    ink.beginPath();
    usable.forEach((i, k) => tokens.points.verdict[i] === code && mark(ink, code, spots.x[k], spots.y[k], size));
    filled(code) ? ink.fill() : ink.stroke();
  }
  ink.globalAlpha = 1;
  if (tokens.edge) edges();
  return spots;

  function line(style, x1, y1, x2, y2) {
    ink.strokeStyle = style;
    ink.lineWidth = 1;
    ink.beginPath();
    ink.moveTo(x1, y1);
    ink.lineTo(x2, y2);
    ink.stroke();
  }
  // Threshold beyond which the region acts on tokens that are pushed further out.
  function edges() {
    ink.strokeStyle = colour("--ink");
    ink.lineWidth = 1.2;
    ink.setLineDash([5, 4]);
    for (const [by, side] of [[tokens.edge.high, 1], [tokens.edge.low, -1]]) {
      if (by === null) continue;
      ink.beginPath();
      let pen = false;
      for (let px = box.left; px <= box.right; px += 2) {
        const p = 1 / (1 + Math.exp(-(start + ((px - box.left) / (box.right - box.left)) * (end - start))));
        const value = spec.edge(p, by, side);
        const possible = value > low && value < high && (spec.log ? value * p : value + p) <= 1.0001 && (spec.log ? value : value + p) >= 0;
        if (possible) pen ? ink.lineTo(px, y(value)) : ink.moveTo(px, y(value));
        pen = possible;
      }
      ink.stroke();
    }
    ink.setLineDash([]);
  }
}
