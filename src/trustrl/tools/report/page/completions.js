// Completions of one run: chosen order, groups side by side, search, and portions.
const SEQUENCES = 10; // completions per portion
const GROUPS = 3; // groups per portion
const SORTS = [
  ["stopped", "most masked", (one) => (one.stopped === undefined ? undefined : -one.stopped - one.changed / 1e6)],
  ["log_ratio", "largest |log π/μ|", (one) => minus(one.log_ratio)],
  ["reward", "lowest reward", (one) => one.reward],
  ["best", "highest reward", (one) => minus(one.reward)],
  ["gap", "largest sampler–trainer gap", (one) => minus(one.gap)],
  ["tokens", "longest", (one) => minus(one.tokens)],
  ["truncated", "truncated", (one) => (one.truncated ? 0 : undefined)],
  ["step", "earliest", (one) => one.step],
  ["near", "nearest to the cause", (one) => (near === null ? undefined : Math.abs(one.step - near.step) * 1e6 + (sortOf(near.by)(one) ?? 0))],
];
const sortOf = (wanted) => SORTS.find(([name]) => name === wanted)?.[2] ?? (() => 0);
let near = null; // step and order of the cause whose completions are listed first
const minus = (x) => (x === undefined ? undefined : -x);
const control = (id) => document.getElementById(id);

function completionsOf(tokens) {
  const area = control("sequences");
  if (!area) return;
  hovered = tokens;
  offer(tokens);
  for (const id of ["layout", "sort", "tint", "whole"]) control(id).onchange = () => list(tokens);
  control("search").oninput = () => list(tokens);
  control("search").onkeydown = (event) => {
    if (event.key === "Enter") nextHit(area); // a returned false would cancel all other keys
  };
  list(tokens);
}

// Offers only the orders, colors and layouts that the run has data for.
function offer(tokens) {
  const all = tokens.completions;
  const known = SORTS.filter(([name, , of]) => (name !== "stopped" || tokens.decided) && all.some((one) => of(one) !== undefined));
  options("sort", known.map(([name, word]) => [name, word]));
  const tints = Object.entries(TINTS).filter(([name, one]) => (name === "verdict" ? tokens.decided : one.needs.every((column) => tokens.rows[column])));
  options("tint", tints.map(([name, one]) => [name, one.word]));
  hide("tint", !all.some((one) => one.rows) || !tints.length);
  hide("layout", !all.some((one) => one.group !== undefined));
  control("whole").parentElement.hidden = !all.some((one) => one.rows);
}

function options(id, entries) {
  const select = control(id);
  const before = select.value;
  select.replaceChildren();
  for (const [value, word] of entries) put(select, "option", { value }, word);
  if (entries.some(([value]) => value === before)) select.value = before;
}

function hide(id, hidden) {
  control(id).hidden = hidden;
  document.querySelector(`label[for=${id}]`).hidden = hidden;
}

function list(tokens) {
  const area = control("sequences");
  const more = control("more");
  hideTip();
  area.replaceChildren();
  const of = sortOf(control("sort").value);
  const match = matcher(tokens, control("search").value, control("whole").checked && !control("whole").parentElement.hidden);
  const scored = tokens.completions.map((one) => ({ one, key: of(one) ?? Infinity, hits: match?.(one) }));
  const found = scored.filter(({ hits }) => !hits || hits.count).sort((a, b) => (a.key < b.key ? -1 : a.key > b.key ? 1 : 0));
  const total = found.reduce((sum, { hits }) => sum + (hits?.count ?? 0), 0);
  control("matches").textContent = match ? (found.length ? `${total} in ${found.length} completions; Enter goes to the next` : "nothing found") : "";
  const tint = control("tint").value || "verdict";
  legend(tokens, tint);
  const grouped = control("layout").value === "groups" && !control("layout").hidden;
  const items = grouped ? groupsOf(found, scored) : found;
  let at = 0;
  const portion = () => {
    const end = Math.min(items.length, at + (grouped ? GROUPS : SEQUENCES));
    const room = area.getElementsByClassName("t").length + PORTION;
    for (; at < end && area.getElementsByClassName("t").length < room; at++) {
      if (grouped) groupBox(area, tokens, items[at], tint);
      else card(area, tokens, items[at].one, { tint, hits: items[at].hits, inGroup: false });
    }
    more.hidden = at >= items.length;
    more.textContent = `Show more (${items.length - at} ${grouped ? "groups" : "completions"} left)`;
  };
  more.onclick = portion;
  portion();
}

// Groups in the order of their first completion; all members, also those that do not match the search.
function groupsOf(found, scored) {
  const members = new Map();
  const key = ({ one }) => one.group ?? `single ${one.start} ${one.name}`;
  for (const each of found) members.set(key(each), []);
  for (const each of scored) members.get(key(each))?.push(each);
  for (const each of members.values()) each.sort((a, b) => (a.key < b.key ? -1 : a.key > b.key ? 1 : 0));
  return [...members.values()];
}

function groupBox(area, tokens, members, tint) {
  const box = put(area, "section", { class: "group" });
  const { one, hits } = members[0];
  const rewards = members.map((each) => each.one.reward).filter((reward) => reward !== undefined);
  const head = put(box, "h3");
  put(head, "b", {}, `${members.length} ${members.length === 1 ? "completion" : "completions"}`);
  head.append(`  ·  step ${one.step}`);
  if (one.task !== undefined) head.append(`  ·  ${one.task}`);
  if (rewards.length) {
    const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
    const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    head.append(`  ·  rewards ${number(low)} to ${number(high)}, mean ${number(mean)}`);
    if (low === high && rewards.length > 1) put(head, "span", { class: "badge open" }, "equal rewards: no gradient");
  }
  if (one.prompt !== undefined) {
    const prompt = put(box, "div", { class: "question", tabindex: 0, role: "region", "aria-label": "Prompt" });
    put(prompt, "span", { class: "label" }, "Prompt ");
    marked(prompt, tokens.prompts[one.prompt], hits?.prompt);
  }
  const row = put(box, "div", { class: "members", tabindex: 0, role: "region", "aria-label": `Completions of this group: ${members.length}, side by side` });
  for (const each of members) card(row, tokens, each.one, { tint, hits: each.hits, inGroup: true });
}

function legend(tokens, tint) {
  const box = control("text-legend");
  box.replaceChildren();
  const known = tokens.rows.verdict ? new Set(tokens.rows.verdict) : new Set();
  const entries = tint !== "verdict"
    ? ["", ...TINTS[tint].levels].map((level, i) => [`h${i}`, i ? `≥ ${level}` : `${TINTS[tint].word} < ${TINTS[tint].levels[0]}`])
    : DATA.verdicts.map((one, code) => [`v${code}`, one.name]).filter((_, code) => code < 2 || known.has(code));
  box.hidden = !tokens.rows.text?.length || (tint === "verdict" && !tokens.decided);
  for (const [name, word] of entries) put(put(box, "li"), "span", { class: `t ${name}` }, word);
}

// Scrolls to the next match below the one that was visited last.
function nextHit(area) {
  const all = [...area.querySelectorAll(".hit, mark")];
  if (!all.length) return;
  const at = all.findIndex((one) => one.classList.contains("here"));
  all[at]?.classList.remove("here");
  const next = all[(at + 1) % all.length];
  next.classList.add("here");
  next.scrollIntoView({ block: "center", inline: "center" });
}

// Searches for a token of the table of most masked tokens.
function findToken(text) {
  control("search").value = text;
  control("whole").checked = true;
  control("search").dispatchEvent(new Event("input"));
  control("text").scrollIntoView();
  control("search").focus({ preventScroll: true });
}

// Search in prompts and completions. A match is a set of rows, or ranges of characters in a text without rows.
function matcher(tokens, query, whole) {
  const wanted = query.trim().toLowerCase();
  if (!wanted) return null;
  return (one) => {
    const found = { rows: new Set(), text: [], prompt: [], count: 0 };
    if (whole) {
      for (let row = one.start; row < one.start + one.rows; row++) {
        if (wordOf(tokens, row).trim().toLowerCase() === wanted) found.rows.add(row);
      }
      found.count = found.rows.size;
      return found;
    }
    if (one.rows) {
      for (const [from, to] of rangesOf(lowered(tokens, one), wanted)) {
        found.count++;
        for (let row = rowAt(one, from); row < one.start + one.rows && one.offsets[row - one.start] < to; row++) found.rows.add(row);
      }
    }
    if (one.text) found.text = rangesOf(one.text.toLowerCase(), wanted);
    if (one.prompt !== undefined) found.prompt = rangesOf(tokens.prompts[one.prompt].toLowerCase(), wanted);
    found.count += found.text.length + found.prompt.length;
    return found;
  };
}

const wordOf = (tokens, row) => DATA.texts[tokens.rows.text[row]];

// Text of a completion's rows in lower case, computed once with the offset of each row in it.
function lowered(tokens, one) {
  if (one.offsets) return one.lower;
  [one.offsets, one.lower] = [[], ""];
  for (let row = one.start; row < one.start + one.rows; row++) {
    one.offsets.push(one.lower.length);
    one.lower += wordOf(tokens, row).toLowerCase();
  }
  return one.lower;
}

function rowAt(one, offset) {
  let [low, high] = [0, one.offsets.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (one.offsets[middle] <= offset) low = middle;
    else high = middle - 1;
  }
  return one.start + low;
}

function rangesOf(text, wanted) {
  const found = [];
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) found.push([at, at + wanted.length]);
  return found;
}

// Appends a text with its matches marked.
function marked(parent, text, ranges) {
  let at = 0;
  for (const [from, to] of ranges ?? []) {
    parent.append(text.slice(at, from));
    put(parent, "mark", {}, text.slice(from, to));
    at = to;
  }
  parent.append(text.slice(at));
}
