"""The page's style sheet and script, which are part of the page: it loads nothing else."""

from __future__ import annotations

COLORS = {
    "text": "#1b1f24",
    "muted": "#57606a",
    "paper": "#ffffff",
    "ground": "#f6f8fa",
    "line": "#d0d7de",
    "accent": "#0059a3",
    "good": "#0b5c2b",
    "good-ground": "#e3f5e8",
    "warn": "#7a4100",
    "warn-ground": "#fff3d6",
    "bad": "#9c1c1c",
    "bad-ground": "#fdecec",
}
TEXTS = (
    *(("text", "paper"), ("text", "ground"), ("muted", "paper"), ("muted", "ground")),
    *(("accent", "paper"), ("accent", "ground"), ("paper", "accent")),
    *(("good", "good-ground"), ("warn", "warn-ground"), ("bad", "bad-ground")),
)
"""Pairs of colors, a text's and the one behind it; the tests check their contrast."""

_VARIABLES = "".join(f"--{name}:{value};" for name, value in COLORS.items())

STYLE = (
    f"""
:root {{ {_VARIABLES} color-scheme: light; }}
"""
    + """
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 16px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
header, main, footer { max-width: 1500px; margin: 0 auto; padding: 0 1rem; }
header { display: flex; flex-wrap: wrap; align-items: center; gap: .4rem 1rem;
  padding-top: .9rem; padding-bottom: .4rem; }
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 .5rem; }
header p { margin: 0; }
#connection { margin-left: auto; color: var(--muted); }
#connection.lost { color: var(--bad); background: var(--bad-ground); padding: .1rem .6rem;
  border-radius: .3rem; }
button { font: inherit; color: var(--accent); background: var(--paper);
  border: 1px solid var(--accent); border-radius: .3rem; padding: .25rem .7rem; cursor: pointer; }
button:hover { color: var(--paper); background: var(--accent); }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
.mark { display: inline-block; padding: .1rem .6rem; border-radius: .3rem;
  border: 1px solid var(--line); background: var(--paper); color: var(--muted); }
.good { color: var(--good); background: var(--good-ground); border-color: var(--good); }
.warn { color: var(--warn); background: var(--warn-ground); border-color: var(--warn); }
section { margin: .9rem 0; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem;
  margin: 0; }
dl > div, figure, section[aria-labelledby] { background: var(--paper);
  border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
dt { color: var(--muted); font-size: .9rem; overflow-wrap: anywhere; }
dd { margin: 0; }
.value { font-size: 1.6rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.note { color: var(--muted); font-size: .9rem; display: block; }
progress { display: block; width: 100%; height: .6rem; accent-color: var(--accent); }
#faults:empty { display: none; }
#faults ul { margin: 0; padding: .6rem .9rem .6rem 2rem; color: var(--bad);
  background: var(--bad-ground); border-radius: .5rem; }
#figures { display: grid; gap: .9rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figure h2 { position: absolute; width: 1px; height: 1px; overflow: hidden;
  clip-path: inset(50%); white-space: nowrap; }
figure a { display: block; }
figure img { display: block; width: 100%; height: auto; }
figure p { margin: .5rem 0 0; color: var(--muted); font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); font-size: .9rem; padding-bottom: .3rem; }
th, td { padding: .3rem .7rem; text-align: left; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
thead th { color: var(--muted); font-weight: 600; font-size: .9rem; }
.figure, thead th:nth-child(n+3):nth-child(-n+7) { text-align: right; }
.events { margin: 0; padding: 0; list-style: none; }
.events li { padding: .25rem 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
.events li:last-child { border-bottom: 0; }
.when { color: var(--muted); font-variant-numeric: tabular-nums; margin-right: .5rem; }
footer { color: var(--muted); font-size: .9rem; padding-bottom: 1rem; overflow-wrap: anywhere; }
"""
)

SCRIPT = """
"use strict";
const every = 2000, body = document.body.dataset;
const connection = document.getElementById("connection");
const pause = document.getElementById("pause");
let paused = false, failures = 0;
function setStatus(text, lost) {
  if (connection.textContent !== text) connection.textContent = text;
  connection.classList.toggle("lost", lost);
}
function update(page) {
  document.title = page.title;
  for (const part of page.querySelectorAll("[data-live]")) {
    const own = document.getElementById(part.id);
    if (own.innerHTML !== part.innerHTML) own.replaceChildren(...part.childNodes);
  }
  for (const part of page.querySelectorAll("figure")) {
    const own = document.getElementById(part.id);
    if (own.dataset.version === part.dataset.version) continue;
    own.dataset.version = part.dataset.version;
    const image = own.querySelector("img"), other = part.querySelector("img");
    image.alt = other.alt;
    image.src = other.getAttribute("src");
    own.querySelector("source").srcset = part.querySelector("source").srcset;
  }
  body.version = page.body.dataset.version;
  body.figures = page.body.dataset.figures;
}
async function load(address) {
  const answer = await fetch(address, {cache: "no-store"});
  if (!answer.ok) throw new Error(answer.status);
  return answer;
}
async function poll() {
  if (paused || document.hidden) return;
  try {
    const state = await (await load("state.json")).json();
    if (state.version !== body.version || state.figures !== body.figures) {
      const text = await (await load("update.html")).text();
      update(new DOMParser().parseFromString(text, "text/html"));
    }
    failures = 0;
    setStatus(state.minutes ? `live; nothing new for ${state.minutes} min` : "live", false);
  } catch {
    failures += 1;
    if (failures > 1) setStatus("no answer: the job or the connection to it has ended", true);
  }
}
async function watch() {
  await poll();
  setTimeout(watch, every);
}
pause.hidden = false;
pause.addEventListener("click", () => {
  paused = !paused;
  pause.textContent = paused ? "Resume updates" : "Pause updates";
  if (paused) setStatus("paused", false); else poll();
});
document.addEventListener("visibilitychange", poll);
setTimeout(watch, every);
"""
