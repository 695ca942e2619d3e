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
