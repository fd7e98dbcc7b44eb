"use strict";
// Trajectories of one group next to each other: rewards around their mean, lengths, times and texts.

function drawGroups(_, body) {
  if (!data.lanes.rollouts.some((rollout) => rollout.groups.length)) {
    body.append(element("p", { className: "note", textContent: "No group has been recorded: see the timelines above." }));
    return;
  }
  const card = element("div", { className: "card" });
  body.append(card);
  onGroupChosen.push((rollout, group) => showGroup(card, rollout, group));
}

function showGroup(card, rollout, group) {
  const rewards = group.trajectories.map((each) => each.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
  const variance = rewards.length ? rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length : null;
  const facts = element("dl", { className: "facts" });
  for (const [label, value] of [
    ["rollout", rollout.step],
    ["group", group.group],
    ["outcome", outcomeName(group.outcome)],
    ["row of the data", group.row + 1],
    ["mean reward", short(mean)],
    ["standard deviation", variance === null ? "–" : short(Math.sqrt(variance))],
  ]) {
    facts.append(element("div", {}, element("dt", { textContent: label }), element("dd", { textContent: String(value) })));
  }
  const members = group.trajectories
    .map((each) => ({ ...each, generated: secondsOf(each, "generate"), tool: secondsOf(each, "tool"), graded: secondsOf(each, "grade") }))
    .sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.id - b.id);
  const columns = [
    { title: "reward", value: (each) => each.reward, signed: true },
    { title: "tokens", value: (each) => each.tokens },
    { title: "generation, s", value: (each) => each.generated },
    { title: "tools, s", value: (each) => each.tool },
    { title: "grading, s", value: (each) => each.graded },
  ].filter(({ value }, i) => i < 2 || members.some((each) => value(each) > 0));
  const table = element("table", { className: "compare" });
  const head = element("tr", {}, element("th", { scope: "col", textContent: "trajectory" }));
  for (const { title } of columns) head.append(element("th", { scope: "col", textContent: title }));
  head.append(element("th", { scope: "col", textContent: "response" }));
  table.append(element("thead", {}, head), element("tbody", {}, ...members.map((each) => memberRow(each, { columns, members, mean }))));
  card.replaceChildren(
    facts,
    element("h3", { textContent: "Prompt" }),
    element("div", { className: "text", textContent: group.prompt }),
    element("div", { className: "compare-box" }, table),
    element("p", { textContent: "The bar of a reward begins at the mean of the group: right of it a trajectory is reinforced, left of it discouraged, by estimators that centre rewards within a group." }),
  );
}

function secondsOf(trajectory, kind) {
  return trajectory.spans.filter((span) => span[0] === kind).reduce((sum, span) => sum + span[2], 0) / 1000;
}

function memberRow(member, { columns, members, mean }) {
  const row = element("tr", {}, element("th", { scope: "row", textContent: member.id }));
  for (const { title, value, signed } of columns) {
    const cell = element("td", { className: "bar-cell" }, element("span", { textContent: value(member) === null ? "–" : short(value(member)) }));
    cell.dataset.label = title;
    cell.append(signed ? signedBar(value(member), mean, members.map(value)) : plainBar(value(member), Math.max(...members.map(value))));
    row.append(cell);
  }
  const notes = [member.status];
  if (member.versions.length === 2) notes.push(`weights ${member.versions[0]} to ${member.versions[1]}`);
  if (member.retries) notes.push(`${member.retries} ${member.retries === 1 ? "retry" : "retries"}`);
  row.append(
    element(
      "td",
      { className: "response" },
      element("div", { className: "clamp", textContent: member.text || "(empty)" }),
      element("small", { className: hasFailed(member) ? "lost" : "", textContent: member.failure || notes.join(", ") }),
    ),
  );
  return row;
}

function plainBar(value, largest) {
  const part = element("i");
  part.style.width = `${largest > 0 ? (100 * value) / largest : 0}%`;
  return element("div", { className: "meter" }, part);
}

/** A bar from the mean to the value; the middle of the meter is the mean. */
function signedBar(value, mean, values) {
  const meter = element("div", { className: "meter signed" });
  if (value === null || mean === null) return meter;
  const reach = Math.max(...values.filter((each) => each !== null).map((each) => Math.abs(each - mean)));
  const share = reach > 0 ? (50 * (value - mean)) / reach : 0;
  const part = element("i", { className: share < 0 ? "below" : "above" });
  part.style.left = `${share < 0 ? 50 + share : 50}%`;
  part.style.width = `${Math.abs(share)}%`;
  meter.append(part);
  return meter;
}

addSection("groups", drawGroups);
