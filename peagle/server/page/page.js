// The race: lanes that record answers, in turns or together, and the replay of what was recorded.

import { Refused, chat, json } from "./api.js";
import { Lane } from "./lane.js";
import { METHODS, NAMES, Record, best, verdict } from "./record.js";
import * as settings from "./settings.js";

const EXAMPLES = {
  code: "Write a Python function is_palindrome(text) that ignores case, spaces and punctuation. Add a docstring and three examples.",
  reasoning: "A baker sells 48 rolls before noon and half as many after noon. Each roll costs 3 dollars, and 15 dollars go to flour. How much is left? Think step by step.",
  chat: "Explain to a ten-year-old why the sky is blue and why sunsets are red.",
};
const ORDER = ["none", "eagle3", "p-eagle"]; // plain first: the others are told as a ratio to it
const FRAME = 120; // milliseconds between drawings while a lane records: the page must not slow what it measures
const WATCH = 1000; // between looks at the server's status during a race
const WARM = { messages: [{ role: "user", content: "Count to 50." }], max_tokens: 48, temperature: 0, stream: true };
const PACES = [1, 0.5, 0.2, 0.1, 0.05, 0.02];
const LONG_ENOUGH = 1.5; // seconds: a replay that would be over sooner is slowed down, and says so

const at = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const lanes = new Map(METHODS.map((method) => [method, new Lane(method, at("track"), at("lanes"))]));
let available = new Set(METHODS);
let records = []; // of the last race
let race = null; // AbortController, while lanes record
let replaying = null; // AbortController, while a replay runs
let paceChosen = false;
const warm = new Set(); // "method K" whose engine has answered before

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
    for (const one of records) await warmUp(one, body, mine.signal);
    if (chosen.mode === "together") await Promise.all(records.map((one) => record(one, body, mine.signal, chosen)));
    else for (const one of records) await record(one, body, mine.signal, chosen);
  } finally {
    clearInterval(timer);
    race = null;
    look();
  }
  await finish(chosen, mine.signal.aborted);
}

function request({ prompt, temperature, tokens, k }) {
  return {
    messages: [{ role: "user", content: prompt }],
    max_tokens: tokens,
    temperature,
    seed: Math.floor(Math.random() * 2 ** 31), // one seed for all lanes: the same dice, so the same answer
    stream: true,
    stream_options: { include_usage: true },
    peagle: { k, trace: true },
  };
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

// An engine is made when it is first asked for, and its first steps are slow: a few tokens that do not count.
async function warmUp(one, body, signal) {
  const lane = lanes.get(one.method), peagle = ask(one, body), name = JSON.stringify(peagle);
  if (warm.has(name) || signal.aborted) return;
  lane.state("warms up");
  try {
    for await (const _ of chat({ ...WARM, peagle }, key(), signal));
    warm.add(name);
    lane.state("waits");
  } catch (error) {
    if (!signal.aborted) broken(one, lane, error);
  }
}

// Plain decoding has no K.
const ask = (one, body) => ({ ...(one.method === "none" ? { trace: true } : body.peagle), method: one.method });

// Run one lane to its end; whatever goes wrong is said in the lane, and the others go on.
async function record(one, body, signal, chosen) {
  const lane = lanes.get(one.method);
  if (signal.aborted) return stop(one, lane);
  if (one.problem) return; // it did not even warm up
  lane.state("runs");
  const sent = performance.now();
  const now = () => (performance.now() - sent) / 1000;
  const draw = () => lane.draw(one, now(), chosen.tokens, plain());
  const timer = setInterval(draw, FRAME);
  try {
    for await (const chunk of chat({ ...body, peagle: ask(one, body) }, key(), signal)) {
      one.add(now(), chunk);
      one.reason = chunk.choices?.[0]?.finish_reason ?? one.reason;
    }
    one.ended = now();
    lane.state(one.reason === "length" ? "done at the limit" : "done");
    say(`${NAMES[one.method]}: ${one.tally.tokens} tokens, ${Math.round(one.tally.speed() ?? 0)} a second.`);
  } catch (error) {
    one.ended = now();
    if (signal.aborted) stop(one, lane);
    else broken(one, lane, error);
  } finally {
    clearInterval(timer);
    draw();
  }
}

function stop(one, lane) {
  one.stopped = true;
  one.ended ??= 0;
  lane.state("stopped");
}

function broken(one, lane, error) {
  if (!(error instanceof Refused)) console.error(error);
  one.ended ??= 0;
  const said = error instanceof Refused ? error.message : "The page failed: see the browser's console.";
  one.cause = said;
  one.problem = one.tally.tokens ? `${said} ${one.tally.tokens} tokens had come.` : said;
  lane.state("failed");
  lane.fail(one.problem);
  warm.clear(); // engines may have died
  if (error.status === 401 || error.status === 403) {
    at("settings").open = true;
    at("key").focus();
  }
}

const plain = () => {
  const found = records.find((one) => one.method === "none");
  return found?.tally.speed() ?? null;
};

async function finish(chosen, aborted) {
  at("estimated").hidden = !records.some((one) => one.estimated);
  const failed = records.filter((one) => one.problem);
  if (!at("model").textContent && !failed.length) greet(); // the key was missing before
  if (failed.length === records.length) tell(failed[0].cause);
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

function how({ mode, temperature, k }) {
  const ran = mode === "turns" ? "in turns, each lane with the machine to itself" : "together, sharing the machine";
  const dice = temperature > 0 ? `temperature ${temperature} with one seed for all` : "greedy";
  return `Recorded ${ran}, after a short warm-up; K ${k}, ${dice}. Speeds are tokens a second after the first chunk; the ratio is to plain decoding.`;
}

// --- replay -----------------------------------------------------------------------------------------------------------

const length = () => Math.max(...records.map((one) => one.tally.last));
const longest = () => Math.max(1, ...records.map((one) => one.tally.tokens));

function redraw() {
  for (const one of records) lanes.get(one.method).draw(one, Infinity, longest(), plain());
}

async function replay() {
  halt();
  const mine = (replaying = new AbortController());
  const told = records.map((one) => lanes.get(one.method).find(".state").textContent);
  if (!paceChosen) at("pace").value = String(PACES.find((pace) => length() / pace >= LONG_ENOUGH) ?? PACES.at(-1));
  for (const one of records) lanes.get(one.method).clear("replays");
  document.body.classList.add("replaying");
  buttons();
  await frames(mine.signal);
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

function frames(signal) {
  const end = length(), most = longest();
  let clock = 0, before = performance.now();
  return new Promise((resolve) => {
    const frame = (now) => {
      clock += (Math.max(0, now - before) / 1000) * Number(at("pace").value);
      before = now;
      if (signal.aborted || clock > end) return resolve();
      const reference = records.find((one) => one.method === "none");
      const speed = reference ? lanes.get("none").tally.speed(Math.min(clock, reference.tally.last)) : null;
      for (const one of records) {
        const lane = lanes.get(one.method);
        lane.draw(one, clock, most, speed);
        if (clock >= one.tally.last && lane.card.dataset.state === "replays") lane.state("done");
      }
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  });
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
