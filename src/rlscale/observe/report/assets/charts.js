"use strict";
// Curves and the phases of each step, drawn by uPlot.

const CHARTS = [
  { title: "Reward", series: [["reward/mean", "training"], ["eval/reward_mean", "held-out"]] },
  { title: "Loss", series: [["train/loss", "loss"]] },
  { title: "Response length, tokens", series: [["response_len/mean", "mean"], ["response_len/max", "longest"]] },
  { title: "|trainer - engine| logprob", series: [["logprob_diff/mean", "mean"], ["logprob_diff/max", "largest"], ["logprob_diff/stale_mean", "tokens of older weights"]], log: true },
  { title: "KL divergence", series: [["train/kl", "from the old policy"], ["train/kl_loss", "from the reference"]] },
  { title: "Entropy, nats", series: [["train/entropy", "entropy"]] },
  { title: "Gradient norm", series: [["train/grad_norm", "before clipping"]] },
  { title: "Learning rate", series: [["train/lr", "rate"]] },
  { title: "Throughput, tokens/s", series: [["throughput/tokens_per_s", "whole step"]] },
  { title: "Shares", series: [["train/pg_clipfrac", "tokens clipped"], ["truncated/ratio", "samples cut off"], ["reward/flat_groups", "groups with equal rewards"]] },
  { title: "Pass rates", series: [["passrate/pass@1", "pass@1"], ["passrate/pass@2", "pass@2"], ["passrate/pass@4", "pass@4"], ["passrate/pass@8", "pass@8"], ["passrate/pass@16", "pass@16"]] },
  { title: "Staleness, updates", series: [["staleness/mean", "mean"], ["staleness/max", "oldest token"]], unlessZero: true },
];

const hasValues = (name) => (data.metrics.columns[name] || []).some((value) => value !== null);

function axes(log) {
  const base = { stroke: colour("soft"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid"), width: 1, size: 4 }, font: "11px system-ui" };
  return [
    { ...base, size: 26, gap: 2, space: 55, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? stepName(tick) : "")) },
    { ...base, grid: { ...base.grid, filter: (_, ticks) => (log ? ticks.map((tick) => (isPowerOfTen(tick) ? tick : null)) : ticks) }, size: 58, gap: 4, values: (_, ticks) => ticks.map((tick) => (tick === null || (log && !isPowerOfTen(tick)) ? "" : short(tick))) },
  ];
}

function isPowerOfTen(value) {
  return Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;
}

function range(low, high) {
  if (low === null || high === null) return [0, 1];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.5;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

/** A card with a chart. The chart is redrawn when the theme or the width changes. */
function chartCard(parent, { title, series, log = false, unlessZero = false }) {
  const drawn = series.filter(([name]) => hasValues(name) && !(unlessZero && !data.metrics.columns[name].some(Boolean)));
  if (!drawn.length) return;
  const box = element("div");
  const card = element("div", { className: "card" }, element("h3", { textContent: title }), box);
  card.title = drawn.map(([name]) => `${name}: ${data.meanings[name] || ""}`).join("\n");
  parent.append(card);
  const positive = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
  const values = [data.metrics.steps, ...drawn.map(([name]) => positive(data.metrics.columns[name]))];
  let plot = null;
  redraws.push(() => {
    if (plot) plot.destroy();
    plot = new uPlot(
      {
        width: box.clientWidth || 400,
        height: 190,
        hooks: showLast,
        cursor: { sync: { key: "run" }, points: { size: 6 }, drag: { x: true, y: false } },
        scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: log ? { distr: 3 } : { range: (_, low, high) => range(low, high) } },
        axes: axes(log),
        series: [
          { label: "rollout", value: (_, step) => (step === null ? "–" : stepName(step)) },
          ...drawn.map(([name, label], i) => ({
            label,
            stroke: PALETTE[i % PALETTE.length],
            width: 1.6,
            spanGaps: true,
            points: { show: data.metrics.columns[name].filter((value) => value !== null).length <= 40, size: 5 },
            value: (_, value) => short(value),
          })),
        ],
      },
      values,
      box,
    );
  });
}

/** Without a pointer over a chart, the legends show the last values. */
const showLast = {
  setCursor: [
    (plot) => {
      if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: plot.data[0].length - 1 });
    },
  ],
  ready: [(plot) => setTimeout(() => plot.setLegend({ idx: plot.data[0].length - 1 }))],
};

function drawCurves() {
  for (const chart of CHARTS) chartCard(byId("curves-grid"), chart);
  const shown = new Set(CHARTS.flatMap((chart) => chart.series.map(([name]) => name)));
  const others = Object.keys(data.metrics.columns).filter((name) => !shown.has(name) && hasValues(name));
  const { stride, steps } = data.metrics;
  if (!steps.length) byId("curves-note").textContent = "No rollout has been recorded yet.";
  else if (stride > 1) byId("curves-note").textContent = `Each point is the mean of ${stride} rollouts. Drag to zoom in, double-click to zoom out.`;
  else byId("curves-note").textContent = "Drag to zoom in, double-click to zoom out.";
  byId("more").hidden = !others.length;
  byId("more").addEventListener("toggle", () => {
    if (byId("more-grid").childElementCount) return;
    const first = redraws.length;
    for (const name of others) chartCard(byId("more-grid"), { title: name, series: [[name, "value"]] });
    for (const redraw of redraws.slice(first)) redraw();
  });
}

function drawTime() {
  const { steps, phases, step, total } = data.phases;
  const body = byId("time-body");
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
