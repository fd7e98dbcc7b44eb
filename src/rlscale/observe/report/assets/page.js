"use strict";
// Shared by the other scripts: the data, functions that create elements, colours, and the state in the URL.

const data = JSON.parse(document.getElementById("data").textContent);

/** An element with properties and children. Text is inserted as text, never as HTML. */
function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const PALETTE = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b"];
const PHASE_COLOURS = { rollout: "#4c78a8", train: "#f58518", sync: "#54a24b", eval: "#b279a2", save: "#9d755d", other: "#a8adb5" };

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function stepName(step) {
  return step < 0 ? "before" : String(step);
}

// The URL fragment stores filters and theme, so that a link to the file reproduces the view.
const state = {
  read: () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : ""),
  write(changes) {
    const parameters = state.read();
    for (const [name, value] of Object.entries(changes)) {
      if (value === "" || value === null) parameters.delete(name);
      else parameters.set(name, value);
    }
    history.replaceState(null, "", `#${parameters}`);
  },
};

const tip = {
  show(event, ...children) {
    const box = byId("tip");
    box.replaceChildren(...children);
    box.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
    const below = event.clientY + 18;
    const top = below + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : below;
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${Math.max(4, top)}px`;
  },
  hide() {
    byId("tip").hidden = true;
  },
};

// Each script of a section adds the function that draws it; `start.js` calls them in this order.
const sections = [];

function addSection(name, draw) {
  sections.push({ name, draw });
}

// Canvases must be redrawn when the theme or the width changes.
const redraws = [];

function redrawAll() {
  for (const redraw of redraws) redraw();
}

/** Whether a trajectory has no reward. One whose turns or tokens were used up is graded and trained. */
const hasFailed = ({ failure }) => Boolean(failure) && !/^(policy|budget): /.test(failure);

const thousands = (number) => number.toLocaleString("en");

/** Chooses one of some rollouts: a slider, and buttons to the neighbours. `set` does not call `choose`. */
function makeStepper(steps, first, choose) {
  const slider = element("input", { type: "range", min: "0", max: String(steps.length - 1), ariaLabel: "Rollout" });
  slider.value = String(first);
  const label = element("b");
  const before = element("button", { type: "button", textContent: "‹", ariaLabel: "Rollout before" });
  const after = element("button", { type: "button", textContent: "›", ariaLabel: "Rollout after" });
  const show = () => {
    const place = Number(slider.value);
    label.textContent = `rollout ${steps[place]}`;
    before.disabled = place === 0;
    after.disabled = place === steps.length - 1;
  };
  const set = (place) => {
    slider.value = String(place);
    show();
  };
  const move = (by) => {
    set(Number(slider.value) + by);
    choose(Number(slider.value));
  };
  before.addEventListener("click", () => move(-1));
  after.addEventListener("click", () => move(1));
  slider.addEventListener("input", () => move(0));
  show();
  const made = element("span", { className: "stepper" }, label, before, after);
  if (steps.length > 2) made.insertBefore(slider, after);
  return { element: made, set };
}
