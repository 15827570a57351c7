// Settings and prompt, as the form shows them and as the address keeps them. The API key is in the form only.

import { METHODS, NAMES } from "./record.js";

export const DEFAULTS = { prompt: "", k: "auto", temperature: 0, tokens: 160, lanes: METHODS, mode: "turns" };
export const MOST_K = 16;

const form = document.getElementById("form");
const field = (id) => document.getElementById(id);
const boxes = () => [...form.querySelectorAll("[name=lane]")];

for (let k = 1; k <= MOST_K; k++) field("k").add(new Option(String(k), String(k)));

const bounded = (text, low, high, otherwise) => {
  const number = text === "" || text === null ? NaN : Number(text);
  return Number.isFinite(number) ? Math.min(high, Math.max(low, number)) : otherwise;
};

export function read() {
  return {
    prompt: field("prompt").value,
    k: field("k").value === "auto" ? "auto" : Number(field("k").value),
    temperature: bounded(field("temperature").value, 0, 2, DEFAULTS.temperature),
    tokens: Math.round(bounded(field("tokens").value, 1, 4096, DEFAULTS.tokens)),
    lanes: boxes().filter((box) => box.checked).map((box) => box.value),
    mode: form.querySelector("[name=mode]:checked").value,
  };
}

export function write(settings) {
  for (const id of ["prompt", "k", "temperature", "tokens"]) field(id).value = settings[id];
  for (const box of boxes()) box.checked = settings.lanes.includes(box.value);
  for (const radio of form.querySelectorAll("[name=mode]")) radio.checked = radio.value === settings.mode;
}

// What an address says; anything it does not say, or says wrongly, is as usual.
export function fromHash(hash) {
  const said = new URLSearchParams(hash.replace(/^#/, ""));
  const k = Number(said.get("k"));
  const lanes = METHODS.filter((method) => said.get("lanes")?.split(",").includes(method));
  return {
    prompt: said.get("prompt") ?? DEFAULTS.prompt,
    k: Number.isInteger(k) && k >= 1 && k <= MOST_K ? k : "auto",
    temperature: bounded(said.get("temperature"), 0, 2, DEFAULTS.temperature),
    tokens: Math.round(bounded(said.get("tokens"), 1, 4096, DEFAULTS.tokens)),
    lanes: lanes.length ? lanes : DEFAULTS.lanes,
    mode: said.get("mode") === "together" ? "together" : "turns",
  };
}

// Only what differs from the defaults, so that an address stays short.
export function toHash(settings) {
  const said = new URLSearchParams();
  for (const [name, usual] of Object.entries(DEFAULTS)) {
    const value = String(settings[name]);
    if (value !== String(usual) && !(name === "lanes" && value === "")) said.set(name, value);
  }
  return said.toString() ? `#${said}` : "";
}

export function told({ k, temperature, tokens, lanes, mode }) {
  const names = lanes.map((lane) => (lane === "none" ? "plain" : NAMES[lane])).join(", ") || "no lane";
  return `${names}, ${mode === "turns" ? "in turns" : "together"}, K ${k}, temperature ${temperature}, ${tokens} tokens`;
}
