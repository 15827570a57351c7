// Settings and prompt: read from the form, and kept in the address. The API key stays in the form.

import { METHODS, NAMES } from "./record.js";

export const DEFAULTS = {
  prompt: "",
  k: "auto",
  temperature: 0,
  tokens: 160,
  lanes: METHODS,
  mode: "turns",
};
export const MAX_K = 16;
const MAX_TEMPERATURE = 2;
const MAX_TOKENS = 4096;

const form = document.getElementById("form");
const field = (id) => document.getElementById(id);
const laneBoxes = () => [...form.querySelectorAll("[name=lane]")];

for (let k = 1; k <= MAX_K; k++) field("k").add(new Option(String(k), String(k)));

function parseNumber(text, low, high, fallback) {
  const number = text === "" || text === null ? NaN : Number(text);
  return Number.isFinite(number) ? Math.min(high, Math.max(low, number)) : fallback;
}

const parseTemperature = (text) => parseNumber(text, 0, MAX_TEMPERATURE, DEFAULTS.temperature);
const parseTokens = (text) => Math.round(parseNumber(text, 1, MAX_TOKENS, DEFAULTS.tokens));

export function readForm() {
  return {
    prompt: field("prompt").value,
    k: field("k").value === "auto" ? "auto" : Number(field("k").value),
    temperature: parseTemperature(field("temperature").value),
    tokens: parseTokens(field("tokens").value),
    lanes: laneBoxes().filter((box) => box.checked).map((box) => box.value),
    mode: form.querySelector("[name=mode]:checked").value,
  };
}

export function writeForm(settings) {
  for (const id of ["prompt", "k", "temperature", "tokens"]) field(id).value = settings[id];
  for (const box of laneBoxes()) box.checked = settings.lanes.includes(box.value);
  for (const radio of form.querySelectorAll("[name=mode]")) {
    radio.checked = radio.value === settings.mode;
  }
}

// Missing and invalid values of the address get their defaults.
export function fromHash(hash) {
  const params = new URLSearchParams(hash.replace(/^#/, ""));
  const k = Number(params.get("k"));
  const lanes = METHODS.filter((method) => params.get("lanes")?.split(",").includes(method));
  return {
    prompt: params.get("prompt") ?? DEFAULTS.prompt,
    k: Number.isInteger(k) && k >= 1 && k <= MAX_K ? k : "auto",
    temperature: parseTemperature(params.get("temperature")),
    tokens: parseTokens(params.get("tokens")),
    lanes: lanes.length ? lanes : DEFAULTS.lanes,
    mode: params.get("mode") === "together" ? "together" : "turns",
  };
}

// Only values that differ from the defaults, so that the address stays short.
export function toHash(settings) {
  const params = new URLSearchParams();
  for (const [name, fallback] of Object.entries(DEFAULTS)) {
    const value = String(settings[name]);
    const noLanes = name === "lanes" && value === "";
    if (value !== String(fallback) && !noLanes) params.set(name, value);
  }
  return params.toString() ? `#${params}` : "";
}

export function summarize({ k, temperature, tokens, lanes, mode }) {
  const names = lanes.map((lane) => (lane === "none" ? "plain" : NAMES[lane]));
  const order = mode === "turns" ? "in turns" : "together";
  return `${names.join(", ") || "no lane"}, ${order}, K ${k}, temperature ${temperature}, `
    + `${tokens} tokens`;
}
