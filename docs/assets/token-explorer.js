// One token under PPO's clip and DPPO's binary masks: verdict, weight and gradient, and the interval of π that each allows.
// The numbers are those of trustrl.functional: tests/site compares them on a grid.
"use strict";

const LIMITS = [1e-4, 1 - 1e-4];
const ROUNDING = 1e-12; // a token exactly at its bound is inside

const CONTROLS = [
  { name: "mu", label: "μ, the sampler's probability of the token", start: 0.6, scale: "odds" },
  { name: "pi", label: "π, its probability now", start: 0.76, scale: "odds" },
  { name: "advantage", label: "A, the advantage", start: 1, min: -2, max: 2, step: 0.1 },
  { name: "delta", label: "δ of Binary TV, in probability", start: 0.3, min: 0.01, max: 0.9, step: 0.01 },
  { name: "deltaKl", label: "δ of Binary KL, in nats", start: 0.05, min: 0.001, max: 1, step: 0.001 },
  { name: "cap", label: "C, DPPO's cap on the weight", start: 2, min: 1, max: 20, step: 0.1, optional: true },
];

const EXAMPLES = {
  "A rare token triples": { mu: 0.0001, pi: 0.0003, advantage: 1 },
  "A frequent token rises": { mu: 0.6, pi: 0.76, advantage: 1 },
  "A token rises far": { mu: 0.4, pi: 0.76, advantage: 1 },
  "The update pulls it back": { mu: 0.4, pi: 0.76, advantage: -1 },
  "A likely token falls": { mu: 0.95, pi: 0.55, advantage: -1 },
};

const binaryKl = (b, p) => b * Math.log(b / p) + (1 - b) * Math.log((1 - b) / (1 - p));

const REGIONS = [
  {
    name: "PPO, clip 0.2/0.28",
    measure: "|π/μ − 1|",
    distance: (s) => Math.abs(s.pi / s.mu - 1),
    bound: (s) => (s.pi > s.mu ? 0.28 : 0.2),
    interval: (s) => [0.8 * s.mu, Math.min(1, 1.28 * s.mu)],
    weight: (s) => s.pi / s.mu,
  },
  {
    name: "DPPO, Binary TV",
    measure: "|π − μ|",
    distance: (s) => Math.abs(s.pi - s.mu),
    bound: (s) => s.delta,
    interval: (s) => [Math.max(0, s.mu - s.delta), Math.min(1, s.mu + s.delta)],
    weight: (s) => Math.min(s.pi / s.mu, s.cap),
  },
  {
    name: "DPPO, Binary KL",
    measure: "KL of μ from π, in nats",
    distance: (s) => binaryKl(s.mu, s.pi),
    bound: (s) => s.deltaKl,
    interval: (s) => [edge(s, 0), edge(s, 1)],
    weight: (s) => Math.min(s.pi / s.mu, s.cap),
  },
];

/** The last π between μ and an end whose KL is at most the bound, by bisection. */
function edge(s, end) {
  let [inside, outside] = [s.mu, end];
  for (let step = 0; step < 60; step++) {
    const middle = (inside + outside) / 2;
    if (binaryKl(s.mu, middle) > s.deltaKl) outside = middle;
    else inside = middle;
  }
  return inside;
}

function decide(region, s) {
  const distance = region.distance(s);
  const outside = distance > region.bound(s) + ROUNDING;
  const further = (s.pi - s.mu) * s.advantage > 0;
  const keep = !(outside && further);
  const weight = region.weight(s);
  return { distance, outside, further, keep, weight, gradient: keep ? weight * s.advantage : 0 };
}

function reason(s, found) {
  if (s.advantage === 0) return "Kept: with A = 0 there is no gradient.";
  const way = s.advantage > 0 ? "up" : "down";
  if (!found.keep) return `Masked: outside the bound, and the update pushes it further ${way}.`;
  if (found.outside) return `Kept: outside the bound, and the update pushes it back ${way}.`;
  return "Kept: inside the bound.";
}

// The page.

const odds = (p) => Math.log(p / (1 - p));
const [FIRST, LAST] = LIMITS.map(odds);
const place = (p) => (100 * (odds(Math.min(Math.max(p, LIMITS[0]), LIMITS[1])) - FIRST)) / (LAST - FIRST);
const short = (x) => (x === 0 ? "0" : Math.abs(x) < 0.001 ? x.toExponential(1) : String(Number(x.toPrecision(3))));

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "rect", "line", "text", "path"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawing(region, s, found) {
  const [low, high] = region.interval(s).map(place);
  const box = { y: 8, height: 12 };
  const parts = [element("rect", { ...box, x: 0, width: 100, class: "free" })];
  if (s.advantage > 0) parts.push(element("rect", { ...box, x: high, width: 100 - high, class: "masked" }));
  if (s.advantage < 0) parts.push(element("rect", { ...box, x: 0, width: low, class: "masked" }));
  parts.push(element("rect", { ...box, x: low, width: Math.max(0.4, high - low), class: "inside" }));
  parts.push(element("line", { x1: place(s.mu), x2: place(s.mu), y1: 5, y2: 23, class: "mu" }));
  parts.push(element("line", { x1: place(s.pi), x2: place(s.pi), y1: 5, y2: 23, class: "pi" }));
  const [from, to] = region.interval(s).map(short);
  const label = `${region.name}: π from ${from} to ${to} is inside. μ is ${short(s.mu)}, π is ${short(s.pi)}, ` +
    (found.keep ? "kept." : "masked.");
  return element("svg", { viewBox: "0 0 100 28", preserveAspectRatio: "none", role: "img", "aria-label": label }, ...parts);
}

function card(region, s) {
  const found = decide(region, s);
  const [from, to] = region.interval(s).map(short);
  const marks = [
    ...[0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999].map((p) => element("span", { style: `left: ${place(p)}%` }, String(p))),
  ];
  const facts = [
    [`${region.measure}`, `${short(found.distance)}, bound ${short(region.bound(s))}`],
    ["π inside", `${from} to ${to}`],
    ["weight", short(found.weight)],
    ["gradient of −loss by log π", short(found.gradient)],
  ];
  return element(
    "section",
    {
      class: found.keep ? "kept" : "stopped", "data-region": region.name, "data-keep": found.keep,
      "data-weight": found.weight, "data-gradient": found.gradient,
    },
    element("h2", {}, region.name),
    element("p", { class: "verdict" }, reason(s, found)),
    drawing(region, s, found),
    element("div", { class: "marks", "aria-hidden": "true" }, ...marks),
    element("dl", {}, ...facts.map(([key, value]) => element("div", {}, element("dt", {}, key), element("dd", {}, value)))),
  );
}

function control({ name, label, start, scale, min, max, step, optional }, changed) {
  const log = scale === "odds";
  const ends = log ? { min: FIRST, max: LAST, step: "any" } : { min, max, step };
  const slider = element("input", { type: "range", ...ends, "aria-label": `${label} (slider)` });
  const bounds = log ? { min: LIMITS[0], max: LIMITS[1], step: "any" } : { min, max, step: "any" };
  const number = element("input", { type: "number", id: `explorer-${name}`, ...bounds });
  const box = element("input", { type: "checkbox", id: `explorer-${name}-on`, "aria-label": "Cap the weight" });
  const set = (value) => {
    number.value = value;
    slider.value = log ? odds(value) : value;
    slider.setAttribute("aria-valuetext", String(value));
  };
  const read = () => {
    if (optional && !box.checked) return Infinity;
    const value = number.value === "" ? NaN : Number(number.value);
    const [least, most] = log ? LIMITS : [min, max];
    return value >= least && value <= most ? value : NaN;
  };
  slider.addEventListener("input", () => {
    const value = Number(slider.value);
    set(log ? Number((1 / (1 + Math.exp(-value))).toPrecision(value > 2 ? 5 : 3)) : value);
    changed();
  });
  number.addEventListener("input", () => {
    if (!Number.isNaN(read()) && number.value !== "") slider.value = log ? odds(Number(number.value)) : number.value;
    changed();
  });
  box.checked = true;
  box.addEventListener("change", () => {
    slider.disabled = number.disabled = !box.checked;
    changed();
  });
  set(start);
  const row = element("div", { class: "control" }, element("label", { for: number.id }, label), slider, number);
  if (optional) row.append(box);
  return { row, set, read };
}

function start(root) {
  const results = element("div", { class: "results" });
  const said = element("p", { class: "said", role: "status" });
  const controls = {};
  const show = () => {
    const s = Object.fromEntries(CONTROLS.map(({ name }) => [name, controls[name].read()]));
    const wrong = CONTROLS.find(({ name }) => Number.isNaN(s[name]));
    if (wrong) {
      const [least, most] = wrong.scale ? LIMITS : [wrong.min, wrong.max];
      said.textContent = `${wrong.label}: must be from ${least} to ${most}.`;
      return;
    }
    said.textContent = REGIONS.map((r) => `${r.name}: ${decide(r, s).keep ? "kept" : "masked"}`).join("; ") + ".";
    results.replaceChildren(...REGIONS.map((region) => card(region, s)));
  };
  const form = element("form", { "aria-label": "The token and the bounds" });
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const settings of CONTROLS) {
    controls[settings.name] = control(settings, show);
    form.append(controls[settings.name].row);
  }
  const buttons = Object.entries(EXAMPLES).map(([name, values]) => {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => {
      for (const [key, value] of Object.entries(values)) controls[key].set(value);
      show();
    });
    return button;
  });
  root.replaceChildren(element("div", { class: "examples", role: "group", "aria-label": "Examples" }, ...buttons), form, said, results);
  show();
}

start(document.getElementById("token-explorer"));
