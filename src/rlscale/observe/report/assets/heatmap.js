"use strict";
// Distributions of rewards and lengths: a heat map with a column per rollout, and bars for one rollout.

const HEATMAPS = [["reward", "Reward"], ["response_len", "Response length, tokens"]];
const MARGIN = { left: 76, bottom: 22, top: 4 };
const BARS_WIDTH = 260;

function drawDistributions(heatmaps, body) {
  for (const [name, title] of HEATMAPS) {
    const map = heatmaps[name];
    if (map) heatCard(body, title, map);
  }
  if (!body.childElementCount) {
    body.append(element("p", { className: "note", textContent: "No distribution has been recorded: distributions.jsonl is missing or empty." }));
  }
}

function heatCard(parent, title, map) {
  const heat = element("canvas", { role: "img", ariaLabel: `${title} in each rollout` });
  const bars = element("canvas", { role: "img", ariaLabel: `${title} in one rollout` });
  const caption = element("p");
  const holder = element("div", { className: "heat" }, heat, bars);
  parent.append(element("div", { className: "card distribution" }, element("h3", { textContent: title }), holder, caption));
  let chosen = map.steps.length - 1;
  const height = Math.max(120, Math.min(260, 26 * (map.edges.length - 1)) + MARGIN.bottom + MARGIN.top);
  const draw = () => {
    const width = holder.clientWidth || 900;
    const hasWideLayout = width > 600;
    bars.hidden = !hasWideLayout;
    paintHeat(canvasOf(heat, hasWideLayout ? width - BARS_WIDTH - 16 : width, height), map, chosen);
    if (hasWideLayout) paintBars(canvasOf(bars, BARS_WIDTH, height), map, chosen);
    const shade = document.documentElement.classList.contains("dark") ? "brighter" : "darker";
    const one = `rollout ${map.steps[chosen]}, ${total(map, chosen)} samples`;
    caption.textContent = `Each column is a rollout; ${shade} means more samples. ${hasWideLayout ? "Bars" : "Frame"}: ${one}.`;
  };
  redraws.push(draw);
  heat.addEventListener("pointermove", (event) => {
    const [column, bin] = cellAt(heat, map, event);
    if (column === null) return tip.hide();
    if (column !== chosen) {
      chosen = column;
      draw();
    }
    const count = map.counts[column][bin];
    const share = ((100 * count) / total(map, column)).toFixed(0);
    tip.show(event, `rollout ${map.steps[column]}, ${title.toLowerCase()} ${binName(map, bin)}: ${count} samples (${share}%)`);
  });
  heat.addEventListener("pointerleave", tip.hide);
}

const total = (map, column) => map.counts[column].reduce((all, count) => all + count, 0);

function binName(map, bin) {
  return map.labels ? short(map.labels[bin]) : `${short(map.edges[bin])} to ${short(map.edges[bin + 1])}`;
}

/** Drawing context of a canvas, scaled for high-density screens. */
function canvasOf(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "11px system-ui";
  return { context, width, height };
}

/** All bins have the same height, because rewards often have few and unevenly spaced values. */
function binRows(map, height) {
  const rows = map.edges.length - 1;
  const each = (height - MARGIN.bottom - MARGIN.top) / rows;
  return { each, y: (bin) => MARGIN.top + (rows - 1 - bin) * each };
}

function paintHeat({ context, width, height }, map, chosen) {
  const { each, y } = binRows(map, height);
  const wide = (width - MARGIN.left) / map.steps.length;
  context.fillStyle = colour("back");
  context.fillRect(MARGIN.left, MARGIN.top, width - MARGIN.left, height - MARGIN.top - MARGIN.bottom);
  for (let column = 0; column < map.steps.length; column += 1) {
    const samples = total(map, column) || 1;
    map.counts[column].forEach((count, bin) => {
      if (!count) return;
      context.fillStyle = `rgba(${colour("heat")}, ${0.1 + 0.9 * Math.sqrt(count / samples)})`;
      context.fillRect(MARGIN.left + column * wide, y(bin), Math.max(wide - (wide > 4 ? 1 : 0), 0.6), each - 1);
    });
  }
  context.strokeStyle = colour("text");
  context.strokeRect(MARGIN.left + chosen * wide, MARGIN.top, Math.max(wide - 1, 1), height - MARGIN.top - MARGIN.bottom - 1);
  context.fillStyle = colour("soft");
  context.textAlign = "right";
  context.textBaseline = "middle";
  const everyRow = Math.ceil(14 / each);
  for (let bin = 0; bin < map.edges.length - 1; bin += everyRow) {
    const text = map.labels ? short(map.labels[bin]) : `from ${short(map.edges[bin])}`;
    context.fillText(text, MARGIN.left - 6, y(bin) + each / 2);
  }
  context.textAlign = "center";
  const everyColumn = Math.ceil(50 / wide);
  for (let column = 0; column < map.steps.length; column += everyColumn) {
    const x = Math.min(Math.max(MARGIN.left + (column + 0.5) * wide, MARGIN.left + 6), width - 12);
    context.fillText(String(map.steps[column]), x, height - MARGIN.bottom / 2);
  }
}

function paintBars({ context, width, height }, map, chosen) {
  const { each, y } = binRows(map, height);
  const samples = total(map, chosen) || 1;
  const most = Math.max(...map.counts[chosen], 1);
  context.textBaseline = "middle";
  map.counts[chosen].forEach((count, bin) => {
    const long = ((width - 90) * count) / most;
    context.fillStyle = `rgb(${colour("heat")})`;
    context.fillRect(0, y(bin), Math.max(long, count ? 1 : 0), each - 1);
    if (!count || each < 9) return;
    context.fillStyle = colour("soft");
    context.fillText(`${count} (${((100 * count) / samples).toFixed(0)}%)`, long + 6, y(bin) + each / 2);
  });
}

function cellAt(canvas, map, event) {
  const box = canvas.getBoundingClientRect();
  const x = event.clientX - box.left - MARGIN.left;
  const y = event.clientY - box.top - MARGIN.top;
  const column = Math.floor((x / (box.width - MARGIN.left)) * map.steps.length);
  const rows = map.edges.length - 1;
  const bin = rows - 1 - Math.floor((y / (box.height - MARGIN.top - MARGIN.bottom)) * rows);
  const isInside = x >= 0 && column < map.steps.length && bin >= 0 && bin < rows;
  return isInside ? [column, bin] : [null, null];
}

addSection("distributions", drawDistributions);
