"use strict";
// Sample viewer: filters, a list, and one sample with its tokens.

const FILTERS = ["from", "to", "low", "high", "status", "text", "order", "colour"];
const LIST_STEP = 100;

const samples = data.samples.samples.map((sample, place) => ({
  ...sample,
  place,
  mask: unroll(sample.loss_mask),
  versions: unroll(sample.weight_versions),
  searched: [sample.prompt, sample.response, sample.label || ""].join("\n").toLowerCase(),
  diff: meanDifference(sample),
}));

/** [[7, 2], [8, 1]] as [7, 7, 8]. */
function unroll(runs) {
  return runs.flatMap(([value, count]) => Array(count).fill(value));
}

function difference(sample, i) {
  const engine = sample.engine_logprobs && sample.engine_logprobs[i];
  const trainer = sample.trainer_logprobs[i];
  return engine === null || engine === undefined || trainer === null ? null : trainer - engine;
}

function meanDifference(sample) {
  const known = sample.token_ids.map((_, i) => difference(sample, i)).filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + Math.abs(value), 0) / known.length : null;
}

function chosenFilters() {
  const form = byId("filters");
  return Object.fromEntries(FILTERS.map((name) => [name, form.elements[name].value.trim()]));
}

function matching(filters) {
  const number = (text) => (text === "" ? null : Number(text));
  const [from, to, low, high] = ["from", "to", "low", "high"].map((name) => number(filters[name]));
  const text = filters.text.toLowerCase();
  const found = samples.filter(
    (sample) =>
      (from === null || sample.step >= from) &&
      (to === null || sample.step <= to) &&
      (low === null || (sample.reward !== null && sample.reward >= low)) &&
      (high === null || (sample.reward !== null && sample.reward <= high)) &&
      (!filters.status || sample.status === filters.status) &&
      (!text || sample.searched.includes(text)),
  );
  const orders = {
    "": (a, b) => b.step - a.step || a.place - b.place,
    oldest: (a, b) => a.place - b.place,
    low: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || b.step - a.step,
    high: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || b.step - a.step,
    diff: (a, b) => (b.diff ?? -1) - (a.diff ?? -1),
  };
  return found.sort(orders[filters.order]);
}

let shown = [];
let selected = null;

function updateSamples() {
  const filters = chosenFilters();
  shown = matching(filters);
  if (!shown.includes(selected)) selected = shown[0] || null;
  const kept = data.samples.number > samples.length ? `, of ${thousands(data.samples.number)} in the run folder` : "";
  byId("samples-count").textContent = samples.length ? `${thousands(shown.length)} of ${thousands(samples.length)} samples${kept}` : "";
  byId("list").replaceChildren();
  addEntries();
  showSample();
}

function addEntries() {
  const list = byId("list");
  list.querySelector(".more")?.remove();
  const start = list.childElementCount;
  for (const sample of shown.slice(start, start + LIST_STEP)) list.append(entry(sample));
  const left = shown.length - list.childElementCount;
  if (left > 0) {
    const more = element("button", { type: "button", className: "more", textContent: `show more (${left})` });
    more.addEventListener("click", addEntries);
    list.append(more);
  }
}

function entry(sample) {
  const made = element(
    "button",
    { type: "button", className: "entry", role: "option" },
    element("span", { textContent: `rollout ${sample.step}` }),
    element("small", { textContent: sample.status }),
    element("b", { textContent: sample.reward === null ? "" : short(sample.reward) }),
    element("span", { className: "cut", textContent: `${sample.prompt} ${sample.response}` }),
  );
  made.ariaSelected = String(sample === selected);
  made.addEventListener("click", () => {
    selected = sample;
    for (const other of byId("list").querySelectorAll(".entry")) other.ariaSelected = String(other === made);
    state.write({ sample: sample.place });
    showSample();
  });
  return made;
}

function showSample() {
  const detail = byId("detail");
  if (!selected) {
    const text = samples.length ? "No sample matches." : "No samples are stored: logging.num_samples is 0, or no rollout has been trained on yet.";
    detail.replaceChildren(element("p", { className: "note", textContent: text }));
    return;
  }
  const sample = selected;
  const facts = element("dl", { className: "facts" });
  const versions = [...new Set(sample.versions)];
  for (const [label, value] of [
    ["rollout", sample.step],
    ["sample", sample.index],
    ["group", sample.group],
    ["status", sample.status],
    ["reward", sample.reward === null ? "none" : short(sample.reward)],
    ["label", sample.label ?? "none"],
    ["tokens", sample.token_ids.length],
    ["weight version", versions.join(", ")],
    ["logprob difference", sample.diff === null ? "not recorded" : short(sample.diff)],
  ]) {
    facts.append(element("div", {}, element("dt", { textContent: label }), element("dd", { textContent: String(value) })));
  }
  const mode = chosenFilters().colour;
  const answer = element("div", { className: "text", id: "tokens" }, ...tokenElements(sample, mode));
  detail.replaceChildren(
    facts,
    element("h3", { textContent: "Prompt" }),
    element("div", { className: "text", textContent: sample.prompt }),
    element("h3", { textContent: "Answer, token by token" }),
    answer,
    scale(sample, mode),
  );
  answer.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".token");
    if (token) tip.show(event, ...tokenTip(sample, Number(token.dataset.i)));
    else tip.hide();
  });
  answer.addEventListener("pointerleave", tip.hide);
}

function* tokenElements(sample, mode) {
  for (let i = 0; i < sample.tokens.length; i += 1) {
    if (i === 0 || sample.versions[i] !== sample.versions[i - 1]) {
      yield element("span", { className: "version", textContent: `v${sample.versions[i]}`, title: `generated by weight version ${sample.versions[i]}` });
    }
    yield tokenElement(sample, i, mode);
  }
}

function tokenElement(sample, i, mode) {
  const made = element("span", { className: "token" });
  made.dataset.i = i;
  if (!sample.mask[i]) made.classList.add("outside");
  const text = sample.tokens[i];
  // A line end shows a mark and breaks the line. A token without text shows a mark to hover over.
  for (const part of text.split(/(\n)/)) {
    if (part === "\n") made.append(element("span", { className: "mark", textContent: "↵" }), "\n");
    else if (part) made.append(part);
  }
  if (!text) made.append(element("span", { className: "mark", textContent: "∅" }));
  made.style.background = tokenColour(sample, i, mode);
  return made;
}

/** 0 up to 1 % of the warning limit, 0.7 at the limit, 1 far above it. */
function intensity(size) {
  if (!size) return 0;
  return Math.min(1, Math.max(0, 0.35 * (2 + Math.log10(size / data.diff_limit))));
}

function tokenColour(sample, i, mode) {
  if (mode === "mask") return sample.mask[i] ? `rgba(${colour("up")}, 0.25)` : "transparent";
  if (mode === "version") {
    const hue = (sample.versions[i] * 67) % 360;
    return `hsl(${hue} 70% 50% / 0.28)`;
  }
  if (mode === "probability") {
    const logprob = sample.engine_logprobs ? sample.engine_logprobs[i] : sample.trainer_logprobs[i];
    return logprob === null ? "transparent" : `rgba(${colour("amber")}, ${0.75 * (1 - Math.exp(logprob))})`;
  }
  const value = difference(sample, i);
  if (value === null) return "transparent";
  return `rgba(${colour(value < 0 ? "down" : "up")}, ${0.75 * intensity(Math.abs(value))})`;
}

function tokenTip(sample, i) {
  const engine = sample.engine_logprobs ? sample.engine_logprobs[i] : null;
  const trainer = sample.trainer_logprobs[i];
  const withProbability = (value) => (value === null || value === undefined ? "not recorded" : `${value.toFixed(5)} (p = ${Math.exp(value).toPrecision(3)})`);
  const value = difference(sample, i);
  const rows = [
    ["token", `${sample.token_ids[i]}, position ${i} in the answer`],
    ["engine logprob", sample.mask[i] ? withProbability(engine) : "none, not sampled"],
    ["trainer logprob", withProbability(trainer)],
    ["difference", value === null ? "not recorded" : value.toExponential(2)],
    ["weight version", sample.versions[i]],
    ["loss mask", sample.mask[i] ? "1, trained on" : "0, not trained on"],
  ];
  const table = element("table");
  for (const [label, text] of rows) {
    table.append(element("tr", {}, element("td", { textContent: label }), element("td", { textContent: String(text) })));
  }
  return [element("b", { textContent: JSON.stringify(sample.tokens[i]) }), table];
}

/** Legend of the token colours. */
function scale(sample, mode) {
  const box = element("div", { className: "scale" });
  const add = (text, background, className = "token") => {
    const made = element("span", { className, textContent: text });
    made.style.background = background;
    box.append(made);
  };
  if (mode === "mask") add("trained on", `rgba(${colour("up")}, 0.25)`);
  else if (mode === "version") box.append("One colour for each weight version.");
  else if (mode === "probability") {
    for (const p of [0.99, 0.5, 0.1, 0.01]) add(`p = ${p}`, `rgba(${colour("amber")}, ${0.75 * (1 - p)})`);
  } else {
    box.append("trainer below engine");
    for (const [sign, power] of [["down", 0], ["down", -0.523], ["down", -1], ["up", -1], ["up", -0.523], ["up", 0]]) {
      const size = data.diff_limit * 10 ** power;
      add(size.toExponential(0), `rgba(${colour(sign)}, ${0.75 * intensity(size)})`);
    }
    const alarm = data.has_diff_limit ? `; the warning limit of the mean is ${short(data.diff_limit)}` : "";
    box.append(`above engine${alarm}`);
  }
  if (sample.mask.includes(0)) add("not trained on", "transparent", "token outside");
  return box;
}

function startSamples() {
  const form = byId("filters");
  for (const status of [...new Set(samples.map((sample) => sample.status))].sort()) {
    form.elements.status.append(element("option", { value: status, textContent: status }));
  }
  byId("samples").classList.toggle("empty", !samples.length);
  const given = state.read();
  for (const name of FILTERS) if (given.has(name)) form.elements[name].value = given.get(name);
  selected = samples[Number(given.get("sample") ?? NaN)] || null;
  form.addEventListener("input", () => {
    state.write(chosenFilters());
    updateSamples();
  });
  form.addEventListener("reset", () =>
    setTimeout(() => {
      state.write(Object.fromEntries([...FILTERS, "sample"].map((name) => [name, ""])));
      updateSamples();
    }),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  updateSamples();
  redraws.push(showSample);
}

addSection("samples", startSamples);
