"use strict";
// Starts of the run, each with the reason for its end.

function drawEnds({ starts, number }, body) {
  if (!starts.length) {
    body.append(element("p", { className: "note", textContent: "No provenance.json in the run folder: the starts of the run are not known." }));
    return;
  }
  if (number > starts.length) body.append(element("p", { className: "note", textContent: `The last ${starts.length} of ${number} starts.` }));
  const list = element("ol", { className: "card ends" });
  for (const [i, start] of starts.entries()) list.append(endEntry(start, number - starts.length + i + 1));
  body.append(list);
}

function endEntry({ start, seconds, rollouts, state, title, text }, number) {
  const facts = [`start ${number}`, `${start.slice(0, 16).replace("T", " ")} UTC`];
  if (seconds !== null) facts.push(`${duration(seconds)} long`);
  facts.push(rollouts === null ? "no rollout" : rollouts[0] === rollouts[1] ? `rollout ${rollouts[0]}` : `rollouts ${rollouts[0]} to ${rollouts[1]}`);
  const made = element(
    "li",
    { className: state },
    element("b", { textContent: title[0].toUpperCase() + title.slice(1) }),
    element("span", { className: "facts-line", textContent: facts.join(" · ") }),
  );
  if (text) made.append(element("pre", { textContent: text }));
  return made;
}

/** 75 as "1 min 15 s". */
function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

addSection("ends", drawEnds);
