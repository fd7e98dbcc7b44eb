"use strict";
// Outcomes of trajectories: shares of the whole run, counts over rollouts, and every trajectory of one rollout.

const OUTCOME_SHADES = {
  trained: ["#4c78a8"],
  dropped: ["#eda83a", "#c98516", "#8f6a2f", "#e0c16c"],
  failed: ["#e45756", "#b5394a", "#f0938a", "#8c3b5f"],
  open: ["#a8adb5"],
};

function outcomeColours(outcomes) {
  const used = {};
  return Object.fromEntries(
    outcomes.map((outcome) => {
      const shades = OUTCOME_SHADES[outcome.split("/")[0]] || PALETTE;
      const number = (used[shades] = (used[shades] ?? -1) + 1);
      return [outcome, shades[number % shades.length]];
    }),
  );
}

/** "dropped/equal_rewards" as "dropped by equal_rewards". */
const outcomeName = (outcome) => outcome.replace("/", " by ").replace(/^open$/, "not decided yet");

function* idsOf(ranges) {
  for (const each of ranges) {
    const [first, last] = each.split("-").map(Number);
    for (let id = first; id <= (last ?? first); id += 1) yield id;
  }
}

function drawOutcomes(outcomes, body) {
  if (!outcomes.num_pages) {
    body.append(element("p", { className: "note", textContent: "No outcome has been recorded: ledger.jsonl is missing or empty." }));
    return;
  }
  const colours = outcomeColours(outcomes.outcomes);
  const sum = Object.values(outcomes.total).reduce((all, number) => all + number, 0);
  const decided = Math.max(1, sum - (outcomes.total.open || 0));
  const bar = element("div", { className: "totals", role: "img", ariaLabel: "Share of each outcome in the whole run" });
  const keys = element("ul", { className: "keys" });
  for (const outcome of outcomes.outcomes) {
    const part = element("span", { title: `${outcomeName(outcome)}: ${thousands(outcomes.total[outcome])}` });
    part.style.flexGrow = outcomes.total[outcome];
    part.style.background = colours[outcome];
    bar.append(part);
    const swatch = element("i");
    swatch.style.background = colours[outcome];
    const share = outcome === "open" ? "" : ` (${((100 * outcomes.total[outcome]) / decided).toFixed(1)}%)`;
    keys.append(element("li", {}, swatch, `${outcomeName(outcome)} ${thousands(outcomes.total[outcome])}${share}`));
  }
  const card = element("div", { className: "card" }, element("h3", { textContent: `All ${thousands(sum)} trajectories` }), bar, keys);
  body.append(card);
  drawOutcomeCounts(card, outcomes, colours);
  drawOutcomeMap(body, outcomes, colours);
}

/** Stacked bars over rollouts. A run with one outcome has none: every bar would be the same. */
function drawOutcomeCounts(card, { steps, columns, stride }, colours) {
  const names = Object.keys(columns).filter((outcome) => columns[outcome].some(Boolean));
  if (names.length < 2 || steps.length < 2) return;
  const box = element("div");
  card.append(element("h3", { textContent: stride > 1 ? `Trajectories of each ${stride} rollouts` : "Trajectories of each rollout" }), box);
  const sums = names.map((_, k) => steps.map((_, i) => names.slice(0, k + 1).reduce((all, name) => all + columns[name][i], 0)));
  const order = names.map((_, k) => names.length - 1 - k);
  let plot = null;
  redraws.push(() => {
    if (plot) plot.destroy();
    plot = new uPlot(
      {
        width: box.clientWidth || 800,
        height: 180,
        hooks: showLast,
        cursor: { sync: { key: "run" }, points: { show: false }, drag: { x: true, y: false } },
        scales: { x: { time: false, range: (_, low, high) => [low - 0.6 * stride, high + 0.6 * stride] }, y: { range: (_, low, high) => [0, (high || 1) * 1.05] } },
        axes: axes(false),
        series: [
          { label: "rollout", value: (_, at) => (at === null ? "–" : stepName(at)) },
          ...order.map((k) => ({
            label: outcomeName(names[k]),
            fill: colours[names[k]],
            stroke: colours[names[k]],
            width: 0,
            paths: uPlot.paths.bars({ size: [0.85, 60] }),
            points: { show: false },
            value: (_, value, series, i) => (i === null || i === undefined ? "–" : thousands(columns[names[k]][i])),
          })),
        ],
      },
      [steps, ...order.map((k) => sums[k])],
      box,
    );
  });
}

/** One cell for each trajectory of a rollout, a block for each group. */
function drawOutcomeMap(body, outcomes, colours) {
  const pages = outcomes.pages.map((page) => ({ step: page.step, cells: pageCells(page, outcomes) }));
  let chosen = pages.length - 1;
  const canvas = element("canvas", { role: "img", ariaLabel: "Outcome of every trajectory of the rollout" });
  const holder = element("div", { className: "outcome-map" }, canvas);
  const caption = element("p");
  const found = element("output");
  const stepper = makeStepper(pages.map((page) => page.step), chosen, (place) => {
    chosen = place;
    draw();
  });
  const search = element("input", { type: "number", min: "0", placeholder: "id", ariaLabel: "Id of a trajectory" });
  const row = element("div", { className: "controls" }, stepper.element, element("label", {}, "Find trajectory ", search), found);
  body.append(element("div", { className: "card outcome-card" }, element("h3", { textContent: "Every trajectory of a rollout" }), row, holder, caption));
  let marked = null;
  let cells = { columns: 1, side: 10, places: [] };
  const draw = () => {
    cells = paintOutcomes(canvas, holder, pages[chosen].cells, { colours, groupSize: outcomes.group_size, marked });
    const shown = pages.length < outcomes.num_pages ? ` The page has ${pages.length} of ${thousands(outcomes.num_pages)} rollouts.` : "";
    caption.textContent = `Rollout ${pages[chosen].step}: ${thousands(pages[chosen].cells.length)} trajectories, a block for each group.${shown}`;
  };
  redraws.push(draw);
  search.addEventListener("input", () => {
    marked = search.value === "" ? null : Number(search.value);
    // The last page that has it: earlier ones may have it as open.
    const place = marked === null ? -1 : pages.findLastIndex((page) => page.cells.some((cell) => cell.id === marked));
    if (place >= 0) {
      chosen = place;
      stepper.set(place);
    }
    const cell = place < 0 ? null : pages[place].cells.find((each) => each.id === marked);
    found.textContent = marked === null ? "" : cell ? `${outcomeName(cell.outcome)}, rollout ${pages[place].step}` : pages.length < outcomes.num_pages ? "not in the rollouts of this page" : "there is none";
    draw();
  });
  canvas.addEventListener("pointermove", (event) => {
    const cell = cellUnder(event, cells);
    if (!cell) return tip.hide();
    tip.show(event, `trajectory ${cell.id}, group ${Math.floor(cell.id / outcomes.group_size)}: ${outcomeName(cell.outcome)}`);
  });
  canvas.addEventListener("pointerleave", tip.hide);
}

function pageCells(page, { outcomes }) {
  const cells = [];
  for (const outcome of outcomes) for (const id of idsOf(page[outcome] || [])) cells.push({ id, outcome });
  return cells.sort((a, b) => a.id - b.id);
}

/** Blocks of groups from left to right; returns where each cell is. */
function paintOutcomes(canvas, holder, cells, { colours, groupSize, marked }) {
  const width = holder.clientWidth || 600;
  const side = cells.length > 4000 ? 5 : cells.length > 1000 ? 8 : 12;
  // A block of a group is a column of at most 16 cells, or several.
  const high = Math.min(groupSize, 16);
  const blockWide = Math.ceil(groupSize / high) * side + 4;
  const perRow = Math.max(1, Math.floor(width / blockWide));
  const groups = [...new Set(cells.map((cell) => Math.floor(cell.id / groupSize)))];
  const numRows = Math.ceil(groups.length / perRow);
  const rowHigh = high * side + 6;
  const { context } = canvasOf(canvas, width, Math.max(side, numRows * rowHigh));
  const placeOf = new Map(groups.map((group, place) => [group, place]));
  const places = cells.map((cell) => {
    const place = placeOf.get(Math.floor(cell.id / groupSize));
    const within = cell.id % groupSize;
    const x = (place % perRow) * blockWide + Math.floor(within / high) * side;
    const y = Math.floor(place / perRow) * rowHigh + (within % high) * side;
    context.fillStyle = colours[cell.outcome];
    context.fillRect(x, y, side - 1, side - 1);
    if (cell.id === marked) {
      context.strokeStyle = colour("text");
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, side + 1, side + 1);
    }
    return { x, y, cell };
  });
  return { side, places };
}

function cellUnder(event, { side, places }) {
  const box = event.target.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  return places.find((place) => x >= place.x && x < place.x + side && y >= place.y && y < place.y + side)?.cell;
}

addSection("outcomes", drawOutcomes);
