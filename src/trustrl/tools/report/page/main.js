// Draws the charts, and the tokens and completions of one run at a time.
viewControls();
for (const chart of DATA.charts) lineChart(chart);
for (const canvas of document.querySelectorAll("canvas.shape")) legendMark(canvas);

const area = document.getElementById("sequences");
if (area) tipsIn(area);
for (const button of document.querySelectorAll("button.find")) {
  button.addEventListener("click", () => area && findToken(button.textContent));
}
const picker = document.getElementById("run");
const firstRun = DATA.tokens.findIndex((one) => one !== null);
if (picker) picker.addEventListener("change", () => choose(Number(picker.value)));
if (firstRun >= 0) choose(picker ? Number(picker.value) : firstRun);
for (const link of document.querySelectorAll("a[data-step]")) link.addEventListener("click", () => follow(link.dataset));
live();
addEventListener("hashchange", reveal);
reveal();

// Opens the folded part that a link leads into.
function reveal() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target && target.closest("details:not([open])");
  if (!folded) return;
  folded.open = true;
  target.scrollIntoView();
}

function choose(run) {
  for (const part of document.querySelectorAll("[data-run]")) part.hidden = Number(part.dataset.run) !== run;
  const packed = DATA.tokens[run];
  const tokens = { ...packed, points: packed.points && unpacked(packed.points), rows: unpacked(packed.rows) };
  for (const box of document.querySelectorAll(".scatters")) box.hidden = !tokens.points;
  if (tokens.points) scatterPair(tokens);
  completionsOf(tokens);
}

// Shows the run of a cause, and lists the completions nearest to its step first.
function follow({ to, step, by }) {
  near = { step: Number(step), by };
  if (picker) picker.value = to;
  choose(Number(to));
  if (!area || ![...control("sort").options].some((option) => option.value === "near")) return;
  control("sort").value = "near";
  control("sort").dispatchEvent(new Event("change"));
}

function legendMark(canvas) {
  const code = Number(canvas.dataset.code);
  const draw = () => {
    const dense = window.devicePixelRatio || 1;
    canvas.width = canvas.height = 14 * dense;
    canvas.style.width = canvas.style.height = "14px";
    const ink = canvas.getContext("2d");
    ink.scale(dense, dense);
    ink.strokeStyle = ink.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(INK[code]).trim();
    ink.lineWidth = 1.5;
    ink.beginPath();
    mark(ink, code, 7, 7, 4);
    filled(code) ? ink.fill() : ink.stroke();
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

// A page that reloads itself keeps scroll, zoom, choices and open parts. It waits while it is hidden or paused.
function live() {
  const box = document.getElementById("live");
  if (!box) return;
  const pause = document.getElementById("live-pause");
  const state = document.getElementById("live-state");
  const said = state.textContent;
  const key = `trustrl ${location.pathname}`;
  const parts = () => [...document.querySelectorAll("details")];
  const inputs = () => [...document.querySelectorAll("select[id], input[id]")];
  let paused = false;

  function kept(change) {
    try {
      return change(sessionStorage);
    } catch {
      return null; // a browser that stores nothing for local files
    }
  }
  const before = JSON.parse(kept((store) => store.getItem(key)) ?? "null");
  if (before) {
    for (const one of inputs()) {
      const value = before.inputs[one.id];
      if (value === undefined) continue;
      if (one.type === "checkbox") one.checked = value;
      else if (one.tagName !== "SELECT" || [...one.options].some((option) => option.value === value)) one.value = value;
      one.dispatchEvent(new Event(one.type === "search" ? "input" : "change"));
    }
    if (before.zoom) zoomTo(...before.zoom);
    parts().forEach((one, i) => i < before.open.length && (one.open = before.open[i]));
    requestAnimationFrame(() => scrollTo({ top: before.scroll, behavior: "instant" }));
  }
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Resume" : "Pause";
    state.textContent = paused ? "Paused." : said;
    box.classList.toggle("paused", paused);
  });
  setInterval(() => {
    if (paused || document.hidden) return;
    const now = {
      scroll: window.scrollY,
      zoom: view.from === -Infinity ? null : [view.from, view.to],
      inputs: Object.fromEntries(inputs().map((one) => [one.id, one.type === "checkbox" ? one.checked : one.value])),
      open: parts().map((one) => one.open),
    };
    kept((store) => store.setItem(key, JSON.stringify(now)));
    location.reload();
  }, Number(box.dataset.seconds) * 1000);
}
