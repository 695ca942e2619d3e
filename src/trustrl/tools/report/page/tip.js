// Numbers of a token, on hover or focus. Arrow keys move between the tokens of a completion.
const POLICIES = [
  ["behavior_logp", "μ, sampler"], ["proximal_logp", "π', trainer at the rollout"], ["policy_logp", "π, at this update"],
];
let hovered = null; // tokens of the chosen run

function numbersOf(tokens, i) {
  const { rows } = tokens;
  const found = [];
  for (const [name, word] of POLICIES) if (rows[name]) found.push([word, number(Math.exp(rows[name][i]))]);
  const was = (rows.behavior_logp ?? rows.proximal_logp)?.[i];
  if (was !== undefined && rows.policy_logp) {
    found.push([`ratio π/${tokens.mu}`, number(Math.exp(rows.policy_logp[i] - was))]);
    found.push([`gap π − ${tokens.mu}`, number(Math.exp(rows.policy_logp[i]) - Math.exp(was))]);
  }
  if (rows.behavior_logp && rows.proximal_logp) found.push(["mismatch log π'/μ", number(rows.proximal_logp[i] - rows.behavior_logp[i])]);
  if (rows.divergence_lower) {
    const upper = rows.divergence_upper ? ` to ${number(rows.divergence_upper[i])}` : "";
    found.push(["divergence", `${number(rows.divergence_lower[i])}${upper}`]);
  }
  if (rows.advantage) found.push(["advantage", number(rows.advantage[i])]);
  if (rows.weight) found.push(["weight", number(rows.weight[i])]);
  if (rows.entropy) found.push(["entropy, nats", number(rows.entropy[i])]);
  found.push(["position", rows.position[i]]);
  return found;
}

function showTip(span) {
  hideTip();
  span.classList.add("on");
  const tip = document.getElementById("tip");
  const i = Number(span.dataset.row);
  const verdict = DATA.verdicts[hovered.rows.verdict[i]];
  const name = hovered.decided ? verdict.name : "";
  tip.replaceChildren();
  const head = put(tip, "p");
  put(head, "span", { class: "token" }, `‘${span.textContent}’`);
  head.append(`  ${name}`);
  if (name) put(tip, "div", {}, verdict.meaning);
  const list = put(tip, "dl");
  const facts = numbersOf(hovered, i);
  for (const [word, value] of facts) {
    put(list, "dt", {}, word);
    put(list, "dd", {}, value);
  }
  span.setAttribute("role", "img");
  span.setAttribute("aria-label", `${span.textContent}, ${name ? `${name}: ` : ""}${facts.map(([word, value]) => `${word} ${value}`).join(", ")}`);
  tip.hidden = false;
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const [wide, tall] = [tip.offsetWidth, tip.offsetHeight];
  const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - wide - 8));
  const above = at.bottom + tall + 10 > window.innerHeight && at.top - tall - 8 > 0;
  tip.style.left = `${left + window.scrollX}px`;
  tip.style.top = `${(above ? at.top - tall - 8 : at.bottom + 8) + window.scrollY}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
  for (const one of document.querySelectorAll("#sequences .on")) one.classList.remove("on");
}

function tipsIn(area) {
  const token = (event) => (event.target instanceof Element ? event.target.closest(".t") : null);
  area.addEventListener("pointerover", (event) => (token(event) ? showTip(token(event)) : hideTip()));
  area.addEventListener("pointerleave", hideTip);
  area.addEventListener("focusin", (event) => token(event) && showTip(token(event)));
  area.addEventListener("focusout", hideTip);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
  area.addEventListener("keydown", (event) => {
    const now = token(event);
    if (!now) return;
    const all = now.parentElement.querySelectorAll(".t");
    const at = [...all].indexOf(now);
    const next = { ArrowRight: all[at + 1], ArrowLeft: all[at - 1], Home: all[0], End: all[all.length - 1] }[event.key];
    if (!next) return;
    event.preventDefault();
    now.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}
