// The race: lanes that record answers, in turns or together, and the replay of what was recorded.

import { json } from "./api.js";
import { Lane } from "./lane.js";
import { METHODS, NAMES, Record, best, verdict } from "./record.js";
import { record, request, warmUp } from "./recording.js";
import { fittingPace, longest, plainSpeed, play } from "./replay.js";
import * as settings from "./settings.js";

const EXAMPLES = {
  code: "Write a Python function is_palindrome(text) that ignores case, spaces and punctuation. Add a docstring and three examples.",
  reasoning: "A baker sells 48 rolls before noon and half as many after noon. Each roll costs 3 dollars, and 15 dollars go to flour. How much is left? Think step by step.",
  chat: "Explain to a ten-year-old why the sky is blue and why sunsets are red.",
};
const ORDER = ["none", "eagle3", "p-eagle"]; // plain first: the others are told as a ratio to it
const WATCH = 1000; // between looks at the server's status during a race

const at = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const lanes = new Map(METHODS.map((method) => [method, new Lane(method, at("track"), at("lanes"))]));
let available = new Set(METHODS);
let records = []; // of the last race
let race = null; // AbortController, while lanes record
let replaying = null; // AbortController, while a replay runs
let paceChosen = false;

const key = () => at("key").value.trim();
const entered = () => settings.read().lanes.filter((method) => available.has(method));
const say = (text) => (at("live").textContent = text);

function tell(problem) {
  at("problem").hidden = !problem;
  if (at("problem").textContent !== problem) at("problem").textContent = problem; // or it would be read out again
}

function conclude(sentence) {
  at("result").hidden = !sentence;
  at("result").textContent = sentence;
}

// --- one race ---------------------------------------------------------------------------------------------------------

async function run() {
  const chosen = settings.read();
  const methods = ORDER.filter((method) => entered().includes(method));
  if (!chosen.prompt.trim()) return refuse("Type a prompt, or take one of the examples.", "prompt");
  if (!methods.length) return refuse("Switch a lane on: there is none to race.", "");
  halt();
  const mine = (race = new AbortController());
  const body = request(chosen);
  records = methods.map((method) => new Record(method));
  begin(chosen, methods);
  const timer = watch(mine.signal);
  try {
    for (const one of records) await warmUp(one, lanes.get(one.method), body, key(), mine.signal);
    if (chosen.mode === "together") await Promise.all(records.map((one) => enter(one, body, mine.signal)));
    else for (const one of records) await enter(one, body, mine.signal);
  } finally {
    clearInterval(timer);
    race = null;
    look();
  }
  await finish(chosen, mine.signal.aborted);
}

async function enter(one, body, signal) {
  await record(one, lanes.get(one.method), body, key(), signal, () => plainSpeed(records));
  if (one.whole) say(`${NAMES[one.method]}: ${one.tally.tokens} tokens, ${Math.round(one.tally.speed() ?? 0)} a second.`);
}

function refuse(problem, id) {
  tell(problem);
  if (id) at(id).focus();
  else at("settings").open = true;
}

function begin(chosen, methods) {
  tell("");
  conclude("");
  at("estimated").hidden = at("replay-controls").hidden = true;
  for (const [method, lane] of lanes) {
    lane.show(methods.includes(method));
    lane.best(false);
    lane.clear("waits");
  }
  at("how").textContent = chosen.mode === "turns"
    ? `Recording in turns, each lane with the machine to itself${calm.matches ? "" : "; the replay side by side follows"}.`
    : "Running together: the lanes share the machine.";
  reveal();
  say(`Race started with ${methods.map((method) => NAMES[method]).join(", ")}.`);
  buttons();
}

// Whoever starts a race wants to see it: on a small screen the lanes lie below the form.
function reveal() {
  const first = [...lanes.values()].find((lane) => !lane.card.hidden);
  if (first.text.getBoundingClientRect().bottom > innerHeight)
    at("race").scrollIntoView({ block: "start", behavior: calm.matches ? "auto" : "smooth" });
}

async function finish(chosen, aborted) {
  at("estimated").hidden = !records.some((one) => one.estimated);
  const failed = records.filter((one) => one.problem);
  if (!at("model").textContent && !failed.length) greet(); // the key was missing before
  if (failed.length === records.length) tell(failed[0].cause);
  if (failed.some((one) => one.locked)) wantKey();
  conclude(verdict(records));
  for (const [method, lane] of lanes) lane.best(method === best(records));
  at("how").textContent = aborted ? "Stopped." : how(chosen);
  redraw();
  say([aborted ? "Stopped." : "", at("result").textContent, failed.length ? `${failed.length} lanes failed.` : ""].join(" ").trim());
  const several = records.filter((one) => one.whole).length > 1;
  at("replay-controls").hidden = !several;
  buttons();
  if (several && !aborted && chosen.mode === "turns" && !calm.matches) await replay();
}

function wantKey() {
  at("settings").open = true;
  at("key").focus();
}

function how({ mode, temperature, k }) {
  const ran = mode === "turns" ? "in turns, each lane with the machine to itself" : "together, sharing the machine";
  const dice = temperature > 0 ? `temperature ${temperature} with one seed for all` : "greedy";
  return `Recorded ${ran}, after a short warm-up; K ${k}, ${dice}. Speeds are tokens a second after the first chunk; the ratio is to plain decoding.`;
}

// --- replay -----------------------------------------------------------------------------------------------------------

function redraw() {
  for (const one of records) lanes.get(one.method).draw(one, Infinity, longest(records), plainSpeed(records));
}

async function replay() {
  halt();
  const mine = (replaying = new AbortController());
  const told = records.map((one) => lanes.get(one.method).find(".state").textContent);
  if (!paceChosen) at("pace").value = String(fittingPace(records));
  for (const one of records) lanes.get(one.method).clear("replays");
  document.body.classList.add("replaying");
  buttons();
  await play(records, lanes, mine.signal, () => Number(at("pace").value));
  if (replaying !== mine) return; // a new race has begun
  replaying = null;
  document.body.classList.remove("replaying");
  records.forEach((one, i) => {
    lanes.get(one.method).state(told[i]);
    lanes.get(one.method).fail(one.problem);
  });
  redraw();
  buttons();
}

// --- the server -------------------------------------------------------------------------------------------------------

function watch(signal) {
  return setInterval(() => signal.aborted || look(), WATCH);
}

async function look() {
  if (document.hidden) return;
  let body;
  try {
    body = await json("v1/peagle/status", key());
  } catch (error) {
    if (!race && error.status === 401) tell(error.message);
    return;
  }
  const there = METHODS.filter((method) => body.methods?.includes(method));
  if (there.length) offer(new Set(there));
  for (const [method, lane] of lanes) {
    const engine = engineOf(body, method);
    if (engine) lane.status(engine);
  }
}

// Engines are named by their method, and by K where it is not the server's own: "p-eagle", "p-eagle k=3".
function engineOf({ engines = {}, k: usual }, method) {
  const { k } = settings.read();
  return method === "none" || k === usual ? engines[method] : (engines[`${method} k=${k}`] ?? engines[method]);
}

function offer(methods) {
  available = methods;
  for (const box of document.querySelectorAll("[name=lane]")) {
    box.disabled = !methods.has(box.value);
    box.parentElement.title = box.disabled ? "not on this server" : "";
  }
  if (!race && !records.length) arrange();
}

async function greet() {
  try {
    const { data } = await json("v1/models", key());
    if (data?.[0]?.id) at("model").textContent = `· ${data[0].id}`;
    if (at("problem").textContent && !records.length) tell("");
  } catch (error) {
    tell(error.message);
  }
}

// --- the form ---------------------------------------------------------------------------------------------------------

function buttons() {
  at("stop").disabled = !race && !replaying;
  at("halt").hidden = !race; // the same, where the race is
  at("run").textContent = race ? "Racing" : records.length ? "Race again" : "Race";
  at("run").disabled = Boolean(race);
}

// A replay ends where it is: something else takes the lanes.
function halt() {
  replaying?.abort();
  replaying = null;
  document.body.classList.remove("replaying");
}

function stopAll() {
  race?.abort();
  replaying?.abort();
}

function arrange() {
  const chosen = settings.read();
  at("told").textContent = settings.told({ ...chosen, lanes: entered() });
  if (!race && !records.length) for (const [method, lane] of lanes) lane.show(entered().includes(method));
}

let later = 0;
function changed() {
  arrange();
  clearTimeout(later);
  later = setTimeout(() => history.replaceState(null, "", settings.toHash(settings.read()) || location.pathname + location.search), 200);
}

function restore() {
  settings.write(settings.fromHash(location.hash));
  arrange();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!race) run();
});
at("form").addEventListener("input", (event) => event.target.id !== "key" && changed());
at("key").addEventListener("change", () => greet().then(look));
for (const id of ["stop", "halt"]) at(id).addEventListener("click", stopAll);
at("replay").addEventListener("click", replay);
at("pace").addEventListener("change", () => (paceChosen = true));
for (const button of document.querySelectorAll("[data-example]"))
  button.addEventListener("click", () => {
    at("prompt").value = EXAMPLES[button.dataset.example];
    changed();
    at("prompt").focus();
  });
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (!race) run();
  } else if (event.key === "Escape") stopAll();
});
addEventListener("hashchange", restore);

restore();
if (!at("prompt").value) at("prompt").value = EXAMPLES.code;
greet().then(look);
setInterval(() => race || look(), 10 * WATCH);
