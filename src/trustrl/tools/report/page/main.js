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
