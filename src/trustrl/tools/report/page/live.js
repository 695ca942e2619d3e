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
