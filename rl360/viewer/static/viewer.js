// Keys, the token colour switch, and fetching a live page again. Nothing from a run is ever put into markup here: what
// the server sends was escaped there, and parsed documents run no scripts.
"use strict";

const POLL_RUNNING_MS = 3000;
const POLL_ENDED_MS = 15000;

function follow(rel) {
  const link = document.querySelector(`nav.arrows a[rel=${rel}]`);
  if (link) location.href = link.href;
}

function colourBy(name) {
  const box = document.getElementById("token-box");
  if (!box) return;
  box.className = `by-${name}`;
  const address = new URL(location.href);
  address.searchParams.set("colour", name);
  history.replaceState(null, "", address);
}

function toggleColour() {
  const box = document.getElementById("token-box");
  if (box) colourBy(box.classList.contains("by-mask") ? "logprob" : "mask");
}

const KEYS = {
  n: () => follow("next"),
  ArrowRight: () => follow("next"),
  p: () => follow("prev"),
  ArrowLeft: () => follow("prev"),
  u: () => follow("up"),
  m: toggleColour,
  "/": () => document.querySelector("#filter input")?.focus(),
  "?": () => document.getElementById("keys").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (document.getElementById("keys").open || !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  KEYS[event.key]();
});

document.addEventListener("click", (event) => {
  const link = event.target.closest("a.switch");
  if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    colourBy(link.dataset.colour);
  } else if (event.target.id === "keys-button") {
    document.getElementById("keys").showModal();
  }
});

// Empty fields stay out of the address.
document.addEventListener("submit", (event) => {
  for (const field of event.target.querySelectorAll("input, select")) if (!field.value) field.disabled = true;
});
window.addEventListener("pageshow", () => {
  for (const field of document.querySelectorAll("#filter [disabled]")) field.disabled = false;
});

async function refresh() {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const what of ["main", "header"]) {
    const open = [...document.querySelectorAll(`${what} details`)].map((one) => one.open);
    document.querySelector(what).replaceWith(document.adoptNode(fresh.querySelector(what)));
    document.querySelectorAll(`${what} details`).forEach((one, i) => { if (i < open.length) one.open = open[i]; });
  }
  document.body.dataset.stamp = fresh.body.dataset.stamp ?? "";
}

async function watch() {
  let wait = POLL_ENDED_MS;
  try {
    const answer = await (await fetch("/stamp")).json();
    if (answer.running) wait = POLL_RUNNING_MS;
    const busy = document.hidden || document.activeElement?.closest("form") || document.querySelector("dialog[open]");
    if (answer.stamp !== document.body.dataset.stamp && !busy) await refresh();
  } catch {
    // The viewer was stopped: ask again later.
  }
  if (document.body.dataset.stamp) setTimeout(watch, wait);
}

if (document.body.dataset.stamp) setTimeout(watch, POLL_RUNNING_MS);
