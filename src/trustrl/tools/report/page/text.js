// Completions with the verdict on each token, rendered in portions. Hover or focus shows a token's numbers.
const PORTION = 1500; // tokens per portion
const SEQUENCES = 10; // sequences per portion
const NUMBERS = [
  ["behavior_logp", "μ, sampler", Math.exp], ["proximal_logp", "π', trainer at the rollout", Math.exp], ["policy_logp", "π, at this update", Math.exp],
];

let listening = new AbortController();

function textOf(tokens) {
  listening.abort(); // for the previous run
  listening = new AbortController();
  const area = document.getElementById("sequences");
  const more = document.getElementById("more");
  const tip = document.getElementById("tip");
  area.replaceChildren();
  tip.hidden = true;
  let [sequence, row, here] = [0, 0, null];
  const ends = [];
  tokens.sequences.reduce((sum, one) => (ends.push(sum + one.tokens), sum + one.tokens), 0);

  function portion() {
    const enough = sequence + SEQUENCES;
    for (let room = PORTION; room > 0 && sequence < Math.min(enough, ends.length); room--) {
      if (here === null) here = heading(tokens.sequences[sequence]);
      const verdict = tokens.rows.verdict[row];
      const text = DATA.texts[tokens.rows.text[row]];
      put(here, "span", { class: `t v${verdict}${/^#\d+$/.test(text) ? " ids" : ""}`, "data-row": row, tabindex: here.children.length ? -1 : 0 }, text);
      if (text.endsWith("⏎")) here.append("\n");
      row++;
      while (sequence < ends.length && row >= ends[sequence]) [here, sequence] = [null, sequence + 1];
    }
    const left = tokens.sequences.length - sequence;
    more.hidden = left === 0;
    more.textContent = here ? "Show more of this sequence" : `Show more (${left} sequences left)`;
  }
  function heading(one) {
    const box = put(area, "article", { class: "sequence" });
    const head = put(box, "h3");
    const done = !one.stopped && one.changed ? `${one.changed} of ${one.tokens} tokens reweighted` : `${one.stopped} of ${one.tokens} tokens masked`;
    put(head, "b", {}, done);
    const advantage = tokens.rows.advantage[row];
    head.append(`  ·  step ${one.step}  ·  advantage ${number(advantage)}  ·  sequence ${one.name}`);
    return put(box, "div", { class: "tokens", role: "group", "aria-label": `Sequence ${one.name}: use the arrow keys to move between tokens` });
  }
  more.onclick = portion;
  portion();

  function show(span) {
    hide();
    span.classList.add("on");
    const i = Number(span.dataset.row);
    const verdict = DATA.verdicts[tokens.rows.verdict[i]];
    tip.replaceChildren();
    const head = put(tip, "p");
    put(head, "span", { class: "token" }, `‘${span.textContent}’`);
    head.append(`  ${verdict.name}`);
    put(tip, "div", {}, verdict.meaning);
    const list = put(tip, "dl");
    const facts = numbersOf(tokens, i);
    for (const [name, value] of facts) {
      put(list, "dt", {}, name);
      put(list, "dd", {}, value);
    }
    span.setAttribute("role", "img");
    span.setAttribute("aria-label", `${span.textContent}, ${verdict.name}: ${facts.map(([name, value]) => `${name} ${value}`).join(", ")}`);
    tip.hidden = false;
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const [wide, tall] = [tip.offsetWidth, tip.offsetHeight];
    const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - wide - 8));
    const above = at.bottom + tall + 10 > window.innerHeight && at.top - tall - 8 > 0;
    tip.style.left = `${left + window.scrollX}px`;
    tip.style.top = `${(above ? at.top - tall - 8 : at.bottom + 8) + window.scrollY}px`;
  }
  function hide() {
    tip.hidden = true;
    for (const one of area.querySelectorAll(".on")) one.classList.remove("on");
  }
  const token = (event) => (event.target instanceof Element ? event.target.closest(".t") : null);
  const on = (kind, answer) => area.addEventListener(kind, answer, { signal: listening.signal });
  on("pointerover", (event) => (token(event) ? show(token(event)) : hide()));
  on("pointerleave", hide);
  on("focusin", (event) => token(event) && show(token(event)));
  on("focusout", hide);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide(), { signal: listening.signal });
  on("keydown", (event) => {
    const now = token(event);
    if (!now) return;
    const all = now.parentElement;
    const next = {
      ArrowRight: now.nextElementSibling, ArrowLeft: now.previousElementSibling, Home: all.firstElementChild, End: all.lastElementChild,
    }[event.key];
    if (!next) return;
    event.preventDefault();
    now.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

function numbersOf(tokens, i) {
  const { rows } = tokens;
  const found = [];
  for (const [name, word, change] of NUMBERS) if (rows[name]) found.push([word, number(change(rows[name][i]))]);
  const was = (rows.behavior_logp ?? rows.proximal_logp)?.[i];
  if (was !== undefined) {
    found.push([`ratio π/${tokens.mu}`, number(Math.exp(rows.policy_logp[i] - was))]);
    found.push([`gap π − ${tokens.mu}`, number(Math.exp(rows.policy_logp[i]) - Math.exp(was))]);
  }
  if (rows.divergence_lower) {
    const upper = rows.divergence_upper ? ` to ${number(rows.divergence_upper[i])}` : "";
    found.push(["divergence", `${number(rows.divergence_lower[i])}${upper}`]);
  }
  found.push(["advantage", number(rows.advantage[i])], ["weight", number(rows.weight[i])]);
  if (rows.entropy) found.push(["entropy, nats", number(rows.entropy[i])]);
  found.push(["position", rows.position[i]]);
  return found;
}
