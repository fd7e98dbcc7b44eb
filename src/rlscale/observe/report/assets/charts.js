"use strict";
// Curves of metrics, drawn by uPlot.

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
  { title: "Staleness, updates", series: [["staleness/mean", "mean"], ["staleness/max", "oldest token"]] },
];

const hasValues = (name) => (data.metrics.columns[name] || []).some((value) => value !== null);

/** Rounding errors count as 0: a curve of them shows nothing. */
const isZero = (name) => data.metrics.columns[name].every((value) => value === null || Math.abs(value) < 1e-12);

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

/** A card with a chart. The chart is redrawn when the theme or the width changes. Curves that are 0 are not drawn. */
function chartCard(parent, { title, series, log = false }) {
  const drawn = series.filter(([name]) => hasValues(name) && !isZero(name));
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

/** Without a pointer over a chart, the legend shows the last place where the first curve has a value. */
const showLast = {
  setCursor: [
    (plot) => {
      if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: lastPlace(plot) });
    },
  ],
  ready: [(plot) => setTimeout(() => plot.setLegend({ idx: lastPlace(plot) }))],
};

function lastPlace(plot) {
  const place = plot.data[1].findLastIndex((value) => value !== null);
  return place >= 0 ? place : plot.data[0].length - 1;
}

function drawCurves() {
  for (const chart of CHARTS) chartCard(byId("curves-grid"), chart);
  const shown = new Set(CHARTS.flatMap((chart) => chart.series.map(([name]) => name)));
  const known = Object.keys(data.metrics.columns).filter(hasValues);
  const zero = known.filter(isZero);
  const others = known.filter((name) => !shown.has(name) && !isZero(name));
  if (zero.length) byId("curves-zero").textContent = `Not drawn, because they are 0 in every rollout: ${zero.join(", ")}.`;
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

addSection("curves", drawCurves);
