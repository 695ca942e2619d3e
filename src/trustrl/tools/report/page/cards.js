// One completion: reward and what went wrong, the prompt, and its tokens or text.
const PORTION = 1500; // tokens of a completion shown at once
const IN_GROUP = 300; // the same in a group, where completions stand side by side
const SHORT = 160; // prompts up to this length are not folded

const distance = (a, b) => (rows, i) => Math.abs(rows[a][i] - rows[b][i]);
const TINTS = {
  verdict: { word: "verdict" },
  log_ratio: { word: "|log π/μ|", needs: ["policy_logp", "behavior_logp"], levels: [0.05, 0.2, 0.5, 1, 2], of: distance("policy_logp", "behavior_logp") },
  gap: { word: "|log π'/μ|, mismatch", needs: ["proximal_logp", "behavior_logp"], levels: [0.001, 0.01, 0.05, 0.2, 1], of: distance("proximal_logp", "behavior_logp") },
  entropy: { word: "entropy, nats", needs: ["entropy"], levels: [0.1, 0.5, 1, 2, 4], of: (rows, i) => rows.entropy[i] },
};

// Adds a card. `look` holds the tint, the matches of the search, and whether the card stands in a group.
function card(area, tokens, one, look) {
  const box = put(area, "article", { class: "sequence" });
  heading(box, tokens, one, look);
  if (!look.inGroup && one.prompt !== undefined) promptOf(box, tokens, one, look.hits);
  if (one.text) marked(put(box, "div", { class: "tokens plain" }), one.text, look.hits?.text);
  if (one.rows) tokensOf(box, tokens, one, look);
  if (!one.text && !one.rows) put(box, "p", { class: "hint" }, "The text of this completion was not recorded.");
}

function heading(box, tokens, one, look) {
  const head = put(box, look.inGroup ? "h4" : "h3");
  const masked = one.stopped === undefined || !tokens.decided ? null
    : !one.stopped && one.changed ? `${one.changed} of ${one.tokens} tokens reweighted` : `${one.stopped} of ${one.tokens} tokens masked`;
  const facts = [
    one.reward !== undefined && `reward ${number(one.reward)}`,
    masked ?? (one.tokens !== undefined && `${one.tokens} tokens`),
    one.advantage !== undefined && `advantage ${number(one.advantage)}`,
  ].filter(Boolean);
  put(head, "b", {}, facts[0] ?? `completion ${one.name}`);
  for (const fact of facts.slice(1)) head.append("  ·  ", fact);
  if (one.stop !== undefined) {
    head.append("  ");
    put(head, "span", { class: one.truncated ? "badge open" : "badge plain" }, one.truncated ? `truncated (${one.stop})` : one.stop);
  }
  const parts = Object.entries(one.rewards ?? {});
  const alone = parts.length === 1 && parts[0][1] === one.reward; // the reward itself, already in the heading
  if (parts.length && !alone) {
    const list = put(box, "ul", { class: "parts", "aria-label": "Reward by component" });
    for (const [name, value] of parts) {
      const item = put(list, "li", {}, `${name} `);
      put(item, "b", {}, number(value));
    }
  }
  const more = [
    !look.inGroup && `step ${one.step}`,
    one.log_ratio !== undefined && `largest |log π/${tokens.mu}| ${number(one.log_ratio)}`,
    one.gap !== undefined && `largest mismatch |log π'/μ| ${number(one.gap)}`,
    !look.inGroup && one.task !== undefined && one.task,
    `sequence ${one.name}`,
  ].filter(Boolean);
  put(box, "p", { class: "sub" }, more.join("  ·  "));
}

function promptOf(box, tokens, one, hits) {
  const text = tokens.prompts[one.prompt];
  if (text.length <= SHORT && !text.trim().includes("\n")) {
    const line = put(box, "p", { class: "prompt" });
    put(line, "span", { class: "label" }, "Prompt ");
    marked(line, text, hits?.prompt);
    return;
  }
  const details = put(box, "details", { class: "prompt" });
  if (hits?.prompt.length) details.open = true;
  const first = text.trim().split("\n")[0];
  put(details, "summary", {}, `Prompt: ${first.length > 90 ? `${first.slice(0, 90)}…` : first}`);
  marked(put(details, "div", { class: "plain" }), text, hits?.prompt);
}

function tokensOf(box, tokens, one, look) {
  const area = put(box, "div", { class: "tokens", role: "group", "aria-label": `Completion ${one.name}: use the arrow keys to move between tokens` });
  const end = one.start + one.rows;
  const first = look.hits ? Math.min(...look.hits.rows, end) : one.start;
  let row = one.start;
  const button = put(box, "button", { type: "button", class: "rest" });
  const portion = (most) => {
    for (const stop = Math.min(end, row + most); row < stop; row++) token(area, tokens, row, look);
    button.hidden = row >= end;
    button.textContent = `Show more of this completion (${(end - row).toLocaleString("en")} tokens left)`;
  };
  button.addEventListener("click", () => portion(PORTION));
  portion(Math.max(look.inGroup ? IN_GROUP : PORTION, Math.min(first, end - 1) - one.start + 200));
}

function token(area, tokens, row, look) {
  const text = wordOf(tokens, row);
  const names = ["t"];
  if (look.tint === "verdict") names.push(`v${tokens.rows.verdict[row]}`);
  else names.push(`h${TINTS[look.tint].levels.filter((level) => TINTS[look.tint].of(tokens.rows, row) >= level).length}`);
  if (/^#\d+$/.test(text)) names.push("ids");
  if (look.hits?.rows.has(row)) names.push("hit");
  put(area, "span", { class: names.join(" "), "data-row": row, tabindex: area.children.length ? -1 : 0 }, text);
  if (text.endsWith("⏎")) area.append("\n");
}

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
