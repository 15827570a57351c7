// Settings and prompt: read from the form, and kept in the address. The API key stays in the form.

import { byId } from "./elements.js";
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
export const MAX_TEMPERATURE = 2;
export const MAX_TOKENS = 4096;

const form = byId("form");
const laneBoxes = () => [...form.querySelectorAll("[name=lane]")];

for (let k = 1; k <= MAX_K; k++) byId("k").add(new Option(String(k), String(k)));

export function parseNumber(text, low, high, fallback) {
  const number = text === "" || text === null ? NaN : Number(text);
  return Number.isFinite(number) ? Math.min(high, Math.max(low, number)) : fallback;
}

const parseTemperature = (text) => parseNumber(text, 0, MAX_TEMPERATURE, DEFAULTS.temperature);
const parseTokens = (text) => Math.round(parseNumber(text, 1, MAX_TOKENS, DEFAULTS.tokens));

export function readForm() {
  return {
    prompt: byId("prompt").value,
    k: byId("k").value === "auto" ? "auto" : Number(byId("k").value),
    temperature: parseTemperature(byId("temperature").value),
    tokens: parseTokens(byId("tokens").value),
    lanes: laneBoxes().filter((box) => box.checked).map((box) => box.value),
    mode: form.querySelector("[name=mode]:checked").value,
  };
}

export function writeForm(settings) {
  for (const id of ["prompt", "k", "temperature", "tokens"]) byId(id).value = settings[id];
  for (const box of laneBoxes()) box.checked = settings.lanes.includes(box.value);
  for (const radio of form.querySelectorAll("[name=mode]")) {
    radio.checked = radio.value === settings.mode;
  }
}

// Missing and invalid values of the address get their defaults.
export function fromParams(params) {
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

// For the address: null for what is the default.
export function toParams(settings) {
  const params = {};
  for (const [name, fallback] of Object.entries(DEFAULTS)) {
    const value = String(settings[name]);
    const noLanes = name === "lanes" && value === "";
    params[name] = value === String(fallback) || noLanes ? null : value;
  }
  return params;
}

export function summarize({ k, temperature, tokens, lanes, mode }) {
  const names = lanes.map((lane) => (lane === "none" ? "plain" : NAMES[lane]));
  const order = mode === "turns" ? "in turns" : "together";
  return `${names.join(", ") || "no lane"}, ${order}, K ${k}, temperature ${temperature}, `
    + `${tokens} tokens`;
}
