"use strict";
// Trajectories as conversations: a list, and the turns of one path through the tree of the chosen one.

const talks = { shown: [], selected: null, leaf: null };
const TALK_STEP = 60;

function startConversations(given, body) {
  if (!given.trajectories.length) {
    body.append(element("p", { className: "note", textContent: "No trajectories are stored: logging.num_samples is 0, or no rollout has been trained on yet." }));
    return;
  }
  const order = element("select", { ariaLabel: "Order of trajectories" });
  for (const [value, text] of [["", "newest first"], ["turns", "most turns"], ["calls", "most tool calls"], ["low", "lowest reward"], ["high", "highest reward"], ["failed", "failed first"]]) {
    order.append(element("option", { value, textContent: text }));
  }
  const text = element("input", { type: "search", placeholder: "any text", ariaLabel: "Text of a trajectory" });
  const count = element("p", { className: "note", ariaLive: "polite" });
  const list = element("div", { className: "list", role: "listbox", ariaLabel: "Trajectories" });
  const detail = element("article", { className: "detail talk" });
  body.append(
    element("form", { className: "filters" }, element("label", { textContent: "Order " }, order), element("label", { className: "wide", textContent: "Text " }, text)),
    count,
    element("div", { className: "viewer" }, list, detail),
  );
  body.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  const all = given.trajectories.map((each, place) => ({ ...each, place, searched: JSON.stringify([each.prompt, each.turns, each.label, each.failure]).toLowerCase() }));
  const update = () => {
    const orders = {
      "": (a, b) => b.step - a.step || a.place - b.place,
      turns: (a, b) => b.num_turns - a.num_turns || b.step - a.step,
      calls: (a, b) => numCalls(b) - numCalls(a) || b.step - a.step,
      low: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || b.step - a.step,
      high: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || b.step - a.step,
      failed: (a, b) => hasFailed(b) - hasFailed(a) || Boolean(b.failure) - Boolean(a.failure) || b.step - a.step,
    };
    const wanted = text.value.trim().toLowerCase();
    talks.shown = all.filter((each) => !wanted || each.searched.includes(wanted)).sort(orders[order.value]);
    const kept = given.number > all.length ? `, of ${thousands(given.number)} in the run folder` : "";
    count.textContent = `${thousands(talks.shown.length)} of ${thousands(all.length)} trajectories${kept}`;
    if (!talks.shown.includes(talks.selected)) choose(talks.shown[0] || null);
    list.replaceChildren();
    addTalks(list, choose);
  };
  const choose = (talk) => {
    talks.selected = talk;
    talks.leaf = talk ? firstLeaf(talk) : null;
    for (const other of list.querySelectorAll(".entry")) other.ariaSelected = String(talk && Number(other.dataset.place) === talk.place);
    showTalk(detail);
  };
  order.addEventListener("input", update);
  text.addEventListener("input", update);
  update();
}

const numCalls = (talk) => talk.turns.reduce((sum, turn) => sum + turn.messages.reduce((inner, message) => inner + (message.tool_calls || []).length, 0), 0);

/** Answers, paths and an early end of a graded trajectory. */
function shape(talk) {
  const parts = [plural(numAnswers(talk), "answer")];
  if (talk.num_turns > 1 && leaves(talk).length > 1) parts.push(`${leaves(talk).length} paths`);
  if (talk.failure) parts.push(talk.failure.split(":", 1)[0]);
  return parts.join(", ");
}

function addTalks(list, choose) {
  list.querySelector(".more")?.remove();
  const start = list.childElementCount;
  for (const talk of talks.shown.slice(start, start + TALK_STEP)) {
    const last = talk.turns.filter((turn) => turn.sampled).at(-1);
    const excerpt = last ? last.text || (last.messages[0] || {}).content || "" : "";
    const made = element(
      "button",
      { type: "button", className: "entry", role: "option" },
      element("span", { textContent: `rollout ${talk.step}` }),
      element("small", { textContent: hasFailed(talk) ? "failed" : shape(talk) }),
      element("b", { textContent: talk.reward === null ? "" : short(talk.reward) }),
      element("span", { className: "cut", textContent: `${(talk.prompt.at(-1) || {}).content || ""} ${excerpt}` }),
    );
    made.dataset.place = talk.place;
    made.ariaSelected = String(talk === talks.selected);
    made.addEventListener("click", () => choose(talk));
    list.append(made);
  }
  const left = talks.shown.length - list.childElementCount;
  if (left > 0) {
    const more = element("button", { type: "button", className: "more", textContent: `show more (${left})` });
    more.addEventListener("click", () => addTalks(list, choose));
    list.append(more);
  }
}

const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const numAnswers = (talk) => talk.turns.filter((turn) => turn.sampled).length;

function childrenOf(talk, number) {
  return talk.turns.filter((turn) => turn.parent === number);
}

function leaves(talk) {
  const parents = new Set(talk.turns.map((turn) => turn.parent));
  return talk.turns.filter((turn) => !parents.has(turn.number));
}

const firstLeaf = (talk) => leaves(talk)[0] || null;

function pathTo(talk, leaf) {
  const byNumber = new Map(talk.turns.map((turn) => [turn.number, turn]));
  const path = [];
  for (let turn = leaf; turn; turn = turn.parent === null ? null : byNumber.get(turn.parent)) path.push(turn);
  return path.reverse();
}

function showTalk(detail) {
  const talk = talks.selected;
  if (!talk) {
    detail.replaceChildren(element("p", { className: "note", textContent: "No trajectory matches." }));
    return;
  }
  const path = pathTo(talk, talks.leaf);
  const ownPrompt = path[0] && path[0].own_prompt;
  const opening = ownPrompt ? [] : talk.prompt.map((message) => bubble(message, { given: true, note: "prompt" }));
  const hidden = talk.num_turns - talk.turns.length;
  detail.replaceChildren(
    talkFacts(talk),
    ...(talk.failure ? [element("p", { className: "warning", textContent: talk.failure })] : []),
    ...outline(talk, detail),
    element("div", { className: "turns" }, ...opening, ...path.flatMap((turn, i) => [...waitOf(path, i), ...turnBubbles(turn)])),
    ...(hidden > 0 ? [element("p", { className: "note", textContent: `${thousands(hidden)} further turns are not stored.` })] : []),
    legend(),
  );
}

/** False for a run without a trainer. */
const trains = () => Object.keys(data.metrics.columns).some((name) => name.startsWith("train/"));

function talkFacts(talk) {
  const facts = element("dl", { className: "facts" });
  const versions = [...new Set(talk.turns.flatMap((turn) => turn.versions))].sort((a, b) => a - b);
  const sampled = talk.turns.filter((turn) => turn.sampled).reduce((sum, turn) => sum + turn.tokens, 0);
  const end = Math.max(0, ...talk.turns.flatMap((turn) => turn.seconds));
  const rows = [
    ["rollout", talk.step],
    ["trajectory", talk.index],
    ["group", talk.group],
    ["outcome", hasFailed(talk) ? "failed" : trains() ? `trained, ${talk.status}` : talk.status],
    ["reward", talk.reward === null ? "none" : short(talk.reward)],
    ["label", talk.label ?? "none"],
    ["sampled tokens", thousands(sampled)],
    ["weight version", versions.join(", ") || "none"],
  ];
  // A named value may be a text, or true or false.
  const shown = (value) => (value === null || typeof value === "number" ? short(value) : value);
  for (const [name, value] of Object.entries(talk.rewards || {})) rows.push([`reward ${name}`, shown(value)]);
  if (numCalls(talk)) rows.push(["tool calls", numCalls(talk)]);
  if (end > 0) rows.push(["time", `${end.toFixed(1)} s`]);
  for (const [label, value] of rows) {
    facts.append(element("div", {}, element("dt", { textContent: label }), element("dd", { textContent: String(value) })));
  }
  return facts;
}

/** The tree, if it has several paths: one row for each, with its turns as marks. */
function outline(talk, detail) {
  const ends = leaves(talk);
  if (ends.length < 2) return [];
  const box = element("div", { className: "paths", role: "radiogroup", ariaLabel: "Paths of the tree" });
  const drawn = new Set();
  ends.forEach((leaf, place) => {
    const path = pathTo(talk, leaf);
    const row = element("button", { type: "button", className: "path", role: "radio" });
    row.ariaChecked = String(leaf === talks.leaf);
    const kind = path[0].own_prompt ? "own prompt" : place === 0 ? "path" : "branch";
    row.append(element("span", { className: "name", textContent: `${place + 1} ${kind}` }));
    for (const turn of path) {
      const mark = element("i", { className: turn.sampled ? "sampled" : "given", title: turn.sampled ? "answer" : "given" });
      // Turns of an earlier row are shown faintly: they exist once.
      if (drawn.has(turn.number)) mark.classList.add("shared");
      drawn.add(turn.number);
      row.append(mark);
    }
    row.addEventListener("click", () => {
      talks.leaf = leaf;
      showTalk(detail);
      detail.querySelector(`.path[aria-checked="true"]`)?.focus();
    });
    box.append(row);
  });
  return [element("h3", { textContent: `Tree of ${plural(talk.turns.length, "turn")}, ${plural(ends.length, "path")}` }), box];
}

/** The time between two answers, in which tools ran or the agent worked. */
function waitOf(path, i) {
  const turn = path[i];
  if (!turn.seconds.length) return [];
  const before = path.slice(0, i).reverse().find((each) => each.seconds.length);
  if (!before) return [];
  const wait = turn.seconds[0] - before.seconds[1];
  return wait >= 0.05 ? [element("p", { className: "wait", textContent: `${wait.toFixed(wait < 1 ? 2 : 1)} s between the answers` })] : [];
}

function turnBubbles(turn) {
  const role = turn.own_prompt ? "prompt" : turn.sampled ? "assistant" : "given";
  const messages = turn.messages.length ? turn.messages : turn.text || turn.sampled ? [{ role, content: turn.text }] : [];
  return messages.map((message, i) => bubble(message, { turn: i === messages.length - 1 ? turn : null, given: !turn.sampled, note: turn.own_prompt ? "own prompt" : "" }));
}

function bubble(message, { turn = null, given, note }) {
  const head = element("header", {}, element("b", { textContent: message.name ? `${message.role} ${message.name}` : message.role }));
  const add = (text, className = "") => head.append(element("span", { textContent: text, className }));
  if (note) add(note);
  if (turn) {
    add(plural(turn.tokens, "token"));
    if (turn.sampled) {
      add(turn.trained === turn.tokens ? "trained" : turn.trained ? `${turn.trained} trained` : "not trained", turn.trained ? "trained" : "");
      if (turn.versions.length) add(`v${turn.versions.join(", v")}`);
    }
    if (turn.seconds.length) add(`${turn.seconds[0].toFixed(1)} to ${turn.seconds[1].toFixed(1)} s`);
  }
  const made = element("div", { className: `bubble ${given ? "given" : "sampled"} ${turn && turn.trained ? "learned" : ""}` }, head);
  if (message.reasoning_content) {
    made.append(element("details", {}, element("summary", { textContent: "reasoning" }), element("div", { className: "body", textContent: message.reasoning_content })));
  }
  if (message.content) made.append(element("div", { className: "body", textContent: message.content }));
  for (const call of message.tool_calls || []) {
    made.append(element("div", { className: "call" }, element("b", { textContent: call.name }), element("code", { textContent: prettyJson(call.arguments) })));
  }
  if (!message.content && !message.reasoning_content && !(message.tool_calls || []).length) {
    made.append(element("div", { className: "body none", textContent: "no text" }));
  }
  return made;
}

function prettyJson(text) {
  try {
    const value = JSON.parse(text);
    return JSON.stringify(value, null, text.length > 60 ? 1 : 0);
  } catch {
    return text;
  }
}

function legend() {
  const box = element("div", { className: "scale" });
  for (const [className, text] of [["given", "given to the model"], ["sampled", "sampled, not trained"], ["sampled learned", "sampled and trained"]]) {
    box.append(element("span", { className: `mark ${className}`, textContent: text }));
  }
  return box;
}

addSection("conversations", startConversations);
