"use strict";
// Seconds of each phase, of the whole run and of each step.

function drawTime({ steps, phases, step, total }, body) {
  if (!steps.length) {
    body.append(element("p", { className: "note", textContent: "No step has timings yet." }));
    return;
  }
  const names = Object.keys(phases);
  const sum = names.reduce((all, name) => all + total[name], 0);
  const bar = element("div", { className: "totals", role: "img", ariaLabel: "Share of each phase in the whole run" });
  const keys = element("ul", { className: "keys" });
  for (const name of names) {
    const part = element("span", { title: `${name}: ${short(total[name])} s` });
    part.style.flexGrow = total[name];
    part.style.background = PHASE_COLOURS[name];
    bar.append(part);
    const swatch = element("i");
    swatch.style.background = PHASE_COLOURS[name];
    keys.append(element("li", {}, swatch, `${name} ${total[name].toFixed(1)} s (${((100 * total[name]) / sum).toFixed(0)}%)`));
  }
  const box = element("div");
  const overlaps = steps.some((_, i) => names.reduce((all, name) => all + phases[name][i], 0) > step[i] * 1.02);
  const card = element("div", { className: "card" }, element("h3", { textContent: "Whole run" }), bar, keys, element("h3", { textContent: "Seconds of each step" }), box);
  if (overlaps) card.append(element("p", { textContent: "Generation overlaps with training, so the phases sum to more than the step (dark line)." }));
  body.append(card);
  drawStack(box, { steps, phases, step, names });
}

/** Stacked bars: the highest sum is drawn first; the next one covers it. */
function drawStack(box, { steps, phases, step, names }) {
  const sums = names.map((_, k) => steps.map((_, i) => names.slice(0, k + 1).reduce((all, name) => all + phases[name][i], 0)));
  const order = names.map((_, k) => names.length - 1 - k);
  let plot = null;
  redraws.push(() => {
    if (plot) plot.destroy();
    plot = new uPlot(
      {
        width: box.clientWidth || 800,
        height: 240,
        hooks: showLast,
        cursor: { sync: { key: "run" }, points: { show: false }, drag: { x: true, y: false } },
        scales: { x: { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] }, y: { range: (_, low, high) => [0, (high || 1) * 1.05] } },
        axes: axes(false),
        series: [
          { label: "rollout", value: (_, at) => (at === null ? "–" : stepName(at)) },
          ...order.map((k) => ({
            label: names[k],
            fill: PHASE_COLOURS[names[k]],
            stroke: PHASE_COLOURS[names[k]],
            width: 0,
            paths: uPlot.paths.bars({ size: [0.85, 60] }),
            points: { show: false },
            value: (_, value, series, i) => (i === null || i === undefined ? "–" : `${short(phases[names[k]][i])} s`),
          })),
          { label: "step", stroke: colour("text"), width: 1.2, points: { show: false }, value: (_, value) => (value === null ? "–" : `${short(value)} s`) },
        ],
      },
      [steps, ...order.map((k) => sums[k]), step],
      box,
    );
  });
}

addSection("time", drawTime);
