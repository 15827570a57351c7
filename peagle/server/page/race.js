// The race: lanes record answers, in turns or together, and a replay shows them side by side.

import { readParams, saveParams } from "./address.js";
import { fetchJson } from "./api.js";
import { announce, byId, showText } from "./elements.js";
import { Lane } from "./lane.js";
import { METHODS, NAMES, Record, fastestMethod, verdict } from "./record.js";
import { buildRequest, recordAnswer, warmUp } from "./recording.js";
import { maxTokens, plainSpeed, play, suitableSpeed } from "./replay.js";
import { apiKey, onStatus, updateStatus } from "./server.js";
import * as settings from "./settings.js";
import { activeView } from "./tabs.js";

const EXAMPLES = {
  code: "Write a Python function is_palindrome(text) that ignores case, spaces and punctuation. "
    + "Add a docstring and three examples.",
  reasoning: "A baker sells 48 rolls before noon and half as many after noon. Each roll costs "
    + "3 dollars, and 15 dollars go to flour. How much is left? Think step by step.",
  chat: "Explain to a ten-year-old why the sky is blue and why sunsets are red.",
};
const RACE_ORDER = ["none", "eagle3", "p-eagle"]; // plain first: the others are compared to it
const STATUS_INTERVAL = 1000; // milliseconds during a race; ten times that otherwise

const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const lanes = new Map(
  METHODS.map((method) => [method, new Lane(method, byId("track"), byId("lanes"))]),
);
let availableMethods = new Set(METHODS);
let records = []; // of the last race
let race = null; // AbortController, while lanes record
let replay = null; // AbortController, while a replay runs
let speedChosen = false; // by the user, for replays

const laneOf = (record) => lanes.get(record.method);
const selectedMethods = () =>
  settings.readForm().lanes.filter((method) => availableMethods.has(method));

const showProblem = (problem) => showText(byId("problem"), problem);
const showResult = (sentence) => showText(byId("result"), sentence);

// --- the race ---------------------------------------------------------------------------------

async function runRace() {
  const chosen = settings.readForm();
  const selected = selectedMethods();
  const methods = RACE_ORDER.filter((method) => selected.includes(method));
  if (!chosen.prompt.trim()) {
    showProblem("Type a prompt, or take one of the examples.");
    byId("prompt").focus();
    return;
  }
  if (!methods.length) {
    showProblem("No lane is selected: select one in the settings.");
    byId("settings").open = true;
    return;
  }
  endReplay();
  const controller = new AbortController();
  race = controller;
  records = methods.map((method) => new Record(method));
  prepareRace(chosen, methods);
  await recordLanes(chosen, controller.signal);
  await finishRace(chosen, controller.signal.aborted);
}

async function recordLanes(chosen, signal) {
  const body = buildRequest(chosen);
  const timer = setInterval(() => signal.aborted || refreshStatus(), STATUS_INTERVAL);
  try {
    for (const record of records) await warmUp(record, laneOf(record), body, apiKey(), signal);
    if (chosen.mode === "together") {
      await Promise.all(records.map((record) => recordLane(record, body, signal)));
    } else {
      for (const record of records) await recordLane(record, body, signal);
    }
  } finally {
    clearInterval(timer);
    race = null;
    refreshStatus();
  }
}

async function recordLane(record, body, signal) {
  const currentPlainSpeed = () => plainSpeed(records);
  await recordAnswer(record, laneOf(record), body, apiKey(), signal, currentPlainSpeed);
  if (record.complete) {
    const speed = Math.round(record.totals.speed() ?? 0);
    announce(`${NAMES[record.method]}: ${record.totals.tokens} tokens, ${speed} per second.`);
  }
}

function prepareRace(chosen, methods) {
  showProblem("");
  showResult("");
  byId("estimated").hidden = true;
  byId("replay-controls").hidden = true;
  for (const [method, lane] of lanes) {
    lane.setVisible(methods.includes(method));
    lane.setFastest(false);
    lane.clear("waits");
  }
  const replayNote = reducedMotion.matches ? "" : "; the replay side by side follows";
  byId("race-note").textContent = chosen.mode === "turns"
    ? `Recording in turns, each lane with the machine to itself${replayNote}.`
    : "Running together: the lanes share the machine.";
  scrollToLanes();
  announce(`Race started with ${methods.map((method) => NAMES[method]).join(", ")}.`);
  updateButtons();
}

// On a small screen the lanes are below the form.
function scrollToLanes() {
  const first = [...lanes.values()].find((lane) => !lane.card.hidden);
  if (first.text.getBoundingClientRect().bottom > innerHeight) {
    const behavior = reducedMotion.matches ? "auto" : "smooth";
    byId("race").scrollIntoView({ block: "start", behavior });
  }
}

async function finishRace(chosen, aborted) {
  const failed = records.filter((record) => record.problem);
  byId("estimated").hidden = !records.some((record) => record.estimated);
  if (!byId("model").textContent && !failed.length) showModel(); // the key was missing before
  if (failed.length === records.length) showProblem(failed[0].cause);
  if (failed.some((record) => record.locked)) askForKey();
  showResult(verdict(records));
  for (const [method, lane] of lanes) lane.setFastest(method === fastestMethod(records));
  byId("race-note").textContent = aborted ? "Stopped." : describeRace(chosen);
  drawAll();
  announceResult(failed.length, aborted);
  const replayable = records.filter((record) => record.complete).length > 1;
  byId("replay-controls").hidden = !replayable;
  updateButtons();
  const automatic = chosen.mode === "turns" && !aborted && !reducedMotion.matches;
  if (replayable && automatic) await runReplay();
}

function announceResult(failures, aborted) {
  const parts = [aborted ? "Stopped." : "", byId("result").textContent];
  if (failures) parts.push(`${failures} lanes failed.`);
  announce(parts.join(" ").trim());
}

function askForKey() {
  byId("settings").open = true;
  byId("key").focus();
}

function describeRace({ mode, temperature, k }) {
  const order = mode === "turns"
    ? "in turns, each lane with the machine to itself"
    : "together, sharing the machine";
  const sampling = temperature > 0 ? `temperature ${temperature} with one seed for all` : "greedy";
  return `Recorded ${order}, after a short warm-up; K ${k}, ${sampling}. Speeds are tokens per `
    + "second after the first chunk; the ratio is to plain decoding.";
}

// --- the replay -------------------------------------------------------------------------------

function drawAll() {
  const tokens = maxTokens(records);
  const speed = plainSpeed(records);
  for (const record of records) laneOf(record).draw(record, Infinity, tokens, speed);
}

async function runReplay() {
  endReplay();
  const controller = new AbortController();
  replay = controller;
  const states = records.map((record) => laneOf(record).find(".state").textContent);
  if (!speedChosen) byId("replay-speed").value = String(suitableSpeed(records));
  for (const record of records) laneOf(record).clear("replays");
  document.body.classList.add("replaying");
  updateButtons();
  await play(records, lanes, controller.signal, () => Number(byId("replay-speed").value));
  if (replay !== controller) return; // a new race has begun
  replay = null;
  document.body.classList.remove("replaying");
  records.forEach((record, i) => {
    laneOf(record).setState(states[i]);
    laneOf(record).showProblem(record.problem);
  });
  drawAll();
  updateButtons();
}

// Ends a replay where it is, because a race or another replay takes the lanes.
function endReplay() {
  replay?.abort();
  replay = null;
  document.body.classList.remove("replaying");
}

function stopAll() {
  race?.abort();
  replay?.abort();
}

// --- the server -------------------------------------------------------------------------------

function refreshStatus() {
  return updateStatus((error) => {
    if (!race && error.status === 401) showProblem(error.message);
  });
}

function showStatus(status) {
  const methods = METHODS.filter((method) => status.methods?.includes(method));
  if (methods.length) setAvailable(new Set(methods));
  for (const [method, lane] of lanes) {
    const engine = findEngine(status, method);
    if (engine) lane.showStatus(engine);
  }
}

// Engines are named by their method, and by K if it is not the server's own: "p-eagle k=3".
function findEngine({ engines = {}, k: serverK }, method) {
  const { k } = settings.readForm();
  if (method === "none" || k === serverK) return engines[method];
  return engines[`${method} k=${k}`] ?? engines[method];
}

function setAvailable(methods) {
  availableMethods = methods;
  for (const box of document.querySelectorAll("[name=lane]")) {
    box.disabled = !methods.has(box.value);
    box.parentElement.title = box.disabled ? "not on this server" : "";
  }
  if (!race && !records.length) showSettings();
}

async function showModel() {
  try {
    const { data } = await fetchJson("v1/models", apiKey());
    if (data?.[0]?.id) byId("model").textContent = `· ${data[0].id}`;
    if (byId("problem").textContent && !records.length) showProblem("");
  } catch (error) {
    showProblem(error.message);
  }
}

// --- the form ---------------------------------------------------------------------------------

function updateButtons() {
  byId("stop").disabled = !race && !replay;
  byId("race-stop").hidden = !race; // the same button, beside the race
  byId("run").textContent = race ? "Racing" : records.length ? "Race again" : "Race";
  byId("run").disabled = Boolean(race);
}

function showSettings() {
  const selected = selectedMethods();
  const summary = settings.summarize({ ...settings.readForm(), lanes: selected });
  byId("settings-summary").textContent = summary;
  if (race || records.length) return;
  for (const [method, lane] of lanes) lane.setVisible(selected.includes(method));
}

function onFormChange() {
  showSettings();
  saveParams(settings.toParams(settings.readForm()));
}

function restoreSettings() {
  settings.writeForm(settings.fromParams(readParams()));
  showSettings();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!race) runRace();
});
byId("form").addEventListener("input", (event) => event.target.id !== "key" && onFormChange());
byId("key").addEventListener("change", () => showModel().then(refreshStatus));
for (const id of ["stop", "race-stop"]) byId(id).addEventListener("click", stopAll);
byId("replay").addEventListener("click", runReplay);
byId("replay-speed").addEventListener("change", () => {
  speedChosen = true;
});
for (const button of document.querySelectorAll("[data-example]")) {
  button.addEventListener("click", () => {
    byId("prompt").value = EXAMPLES[button.dataset.example];
    onFormChange();
    byId("prompt").focus();
  });
}
addEventListener("keydown", (event) => {
  if (activeView() !== "race") return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (!race) runRace();
  } else if (event.key === "Escape") {
    stopAll();
  }
});
addEventListener("hashchange", restoreSettings);
onStatus(showStatus);

restoreSettings();
if (!byId("prompt").value) byId("prompt").value = EXAMPLES.code;
showModel().then(refreshStatus);
setInterval(() => race || refreshStatus(), 10 * STATUS_INTERVAL);
