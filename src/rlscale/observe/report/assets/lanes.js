"use strict";
// Swim lanes of the trajectories of one rollout, in their groups.

const SPAN_KINDS = { queue: "waits", generate: "generates", tool: "tool", grade: "is graded" };

/** Functions that are called with the rollout and the group that a reader chooses. */
const onGroupChosen = [];

function drawLanes({ rollouts, number }, body) {
  const used = rollouts.filter((rollout) => rollout.groups.length);
  if (!used.length) {
    body.append(element("p", { className: "note", textContent: "No timeline has been recorded: logging.num_timelines is 0, or the run has generated nothing yet." }));
    return;
  }
  const given = Number(state.read().get("rollout") ?? NaN);
  const linked = used.findIndex((rollout) => rollout.step === given);
  let chosen = linked >= 0 ? linked : used.length - 1;
  const lanes = element("div", { className: "lanes" });
  const caption = element("p");
  const choose = (place) => {
    chosen = place;
    state.write({ rollout: used[place].step, group: "" });
    show();
  };
  const stepper = makeStepper(used.map((rollout) => rollout.step), chosen, choose);
  const keys = element("ul", { className: "keys lane-keys" });
  for (const [kind, name] of Object.entries(SPAN_KINDS)) {
    if (!used.some((rollout) => hasKind(rollout, kind))) continue;
    keys.append(element("li", {}, element("i", { className: `span ${kind}` }), name));
  }
  body.append(element("div", { className: "card" }, element("div", { className: "controls" }, stepper.element, keys), lanes, caption));
  const show = () => {
    const rollout = used[chosen];
    const wanted = Number(state.read().get("group") ?? NaN);
    const group = rollout.groups.find((each) => each.group === wanted) || widest(rollout.groups);
    drawRollout(lanes, rollout, (each) => {
      state.write({ rollout: rollout.step, group: each.group });
      markGroup(lanes, each);
      for (const listener of onGroupChosen) listener(rollout, each);
    });
    markGroup(lanes, group);
    for (const listener of onGroupChosen) listener(rollout, group);
    const left = rollout.num_groups - rollout.groups.length;
    caption.textContent =
      `Times are from the draw of the first prompt. ${rollout.groups.length} of ${rollout.num_groups} groups` +
      `${left ? ", with the one that was finished last" : ""}. A wait is for an engine before generation, then for the group, the rollout and the trainer. Choose a group to compare its trajectories.` +
      `${used.length < number ? ` The page has ${used.length} of ${thousands(number)} rollouts.` : ""}`;
  };
  // After the other sections exist: they listen.
  redraws.push(show);
}

const hasKind = (rollout, kind) => rollout.groups.some((group) => group.trajectories.some((each) => each.spans.some((span) => span[0] === kind)));

/** The group whose rewards differ most: there is most to compare. */
function widest(groups) {
  const spread = ({ trajectories }) => {
    const rewards = trajectories.map((each) => each.reward).filter((reward) => reward !== null);
    return rewards.length ? Math.max(...rewards) - Math.min(...rewards) : -1;
  };
  return groups.reduce((best, group) => (spread(group) > spread(best) ? group : best));
}

function markGroup(lanes, group) {
  for (const head of lanes.querySelectorAll(".lane-group")) head.ariaPressed = String(Number(head.dataset.group) === group.group);
}

function drawRollout(lanes, rollout, choose) {
  const spans = rollout.groups.flatMap((group) => group.trajectories.flatMap((each) => each.spans));
  const length = Math.max(1, ...spans.map(([, start, ms]) => start + ms));
  lanes.replaceChildren(laneAxis(length));
  for (const group of rollout.groups) {
    const text = `group ${group.group}`;
    const head = element(
      "button",
      { type: "button", className: "lane-group", title: "Compare the trajectories of this group" },
      element("b", { textContent: text }),
      element("span", { className: group.outcome === "trained" ? "" : "dropped", textContent: outcomeName(group.outcome) }),
      element("span", { className: "cut", textContent: group.prompt }),
    );
    head.dataset.group = group.group;
    head.addEventListener("click", () => choose(group));
    lanes.append(head, ...group.trajectories.map((each) => lane(each, length)));
  }
}

function laneAxis(length) {
  const axis = element("div", { className: "lane-axis" });
  const step = niceStep(length / 6);
  for (let at = 0; at <= length; at += step) {
    const tick = element("span", { textContent: at === 0 ? "0 s" : shortSeconds(at) });
    tick.style.left = `${(100 * at) / length}%`;
    // A label at the right end would leave the card.
    if (at > 0.94 * length) tick.className = "at-end";
    axis.append(tick);
  }
  return element("div", { className: "lane lane-head" }, element("span"), axis, element("span", { className: "lane-reward", textContent: "reward" }));
}

/** 1, 2 or 5 times a power of ten, at least `ms`. */
function niceStep(ms) {
  const power = 10 ** Math.floor(Math.log10(ms));
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= ms);
}

const shortSeconds = (ms) => (ms >= 60000 ? `${short(ms / 60000)} min` : ms < 1000 ? `${short(ms)} ms` : `${short(ms / 1000)} s`);

function lane(trajectory, length) {
  const track = element("div", { className: "lane-track" });
  for (const [kind, start, ms] of trajectory.spans) {
    const part = element("i", { className: `span ${kind}` });
    part.style.left = `${(100 * start) / length}%`;
    part.style.width = `max(${(100 * ms) / length}%, ${kind === "queue" ? 0 : 2}px)`;
    part.addEventListener("pointermove", (event) => tip.show(event, element("b", { textContent: `${SPAN_KINDS[kind]} ${shortSeconds(ms)}` }), element("br"), `trajectory ${trajectory.id}, from ${shortSeconds(start)} to ${shortSeconds(start + ms)}`));
    part.addEventListener("pointerleave", tip.hide);
    track.append(part);
  }
  const reward = hasFailed(trajectory) ? "failed" : trajectory.reward === null ? "–" : short(trajectory.reward);
  return element(
    "div",
    { className: "lane" },
    element("span", { className: "lane-name", textContent: trajectory.id }),
    track,
    element("span", { className: `lane-reward${hasFailed(trajectory) ? " lost" : ""}`, title: trajectory.failure || "", textContent: reward }),
  );
}

addSection("lanes", drawLanes);
