// Draws the charts, and the tokens of one run at a time.
const KINDS = { position: Int32Array, step: Int32Array, text: Int32Array, verdict: Int8Array };
const unpacked = (columns) => Object.fromEntries(Object.entries(columns).map(([name, x]) => [name, unpack(x, KINDS[name] ?? Float32Array)]));

for (const chart of DATA.charts) lineChart(chart);
for (const canvas of document.querySelectorAll("canvas.shape")) legendMark(canvas);

const picker = document.getElementById("run");
if (picker) {
  picker.addEventListener("change", () => choose(Number(picker.value)));
  choose(Number(picker.value));
}

function choose(run) {
  for (const part of document.querySelectorAll("[data-run]")) part.hidden = Number(part.dataset.run) !== run;
  const packed = DATA.tokens[run];
  const tokens = { ...packed, points: unpacked(packed.points), rows: unpacked(packed.rows) };
  scatterPair(tokens);
  textOf(tokens);
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
