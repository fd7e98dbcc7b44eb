"use strict";
// Draws the page, and redraws it when the theme or the width changes.

function useTheme(name) {
  document.documentElement.classList.toggle("dark", name === "dark");
  byId("theme").textContent = name === "dark" ? "Light" : "Dark";
}

const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
useTheme(state.read().get("theme") || preferred);
byId("theme").addEventListener("click", () => {
  const next = document.documentElement.classList.contains("dark") ? "light" : "dark";
  useTheme(next);
  state.write({ theme: next === preferred ? "" : next });
  redrawAll();
});

// Section links scroll without changing the URL fragment, which stores the filters.
for (const link of document.querySelectorAll("nav a")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    document.querySelector(link.getAttribute("href")).scrollIntoView();
  });
}

for (const { name, draw } of sections) draw(data[name], byId(`${name}-body`));
redrawAll();

let lastWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === lastWidth) return;
  lastWidth = innerWidth;
  redrawAll();
});
document.documentElement.dataset.ready = "true";
