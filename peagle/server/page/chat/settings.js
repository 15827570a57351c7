// The settings of the chat: read from their fields, and kept in the address under the fields' ids.

import { readParams, saveParams } from "../address.js";
import { byId } from "../elements.js";
import { METHODS, NAMES } from "../record.js";
import { MAX_K, MAX_TEMPERATURE, MAX_TOKENS, parseNumber } from "../settings.js";

const DEFAULTS = {
  "chat-method": "",
  "chat-k": "auto",
  "chat-temperature": "0",
  "chat-tokens": "512",
  "chat-choice": "auto",
  "chat-system": "",
  "chat-tools": "",
};

let ownMethod = METHODS[0]; // what the server uses for requests without a method
let chosenMethod = ""; // by the user; empty: the server's own

for (let k = 1; k <= MAX_K; k++) byId("chat-k").add(new Option(String(k), String(k)));
showMethods(METHODS);

const fieldNumber = (id, low, high) =>
  parseNumber(byId(id).value, low, high, Number(DEFAULTS[id]));

export function readSettings() {
  const k = byId("chat-k").value;
  return {
    method: byId("chat-method").value,
    k: k === "auto" ? k : Number(k),
    temperature: fieldNumber("chat-temperature", 0, MAX_TEMPERATURE),
    tokens: Math.round(fieldNumber("chat-tokens", 1, MAX_TOKENS)),
    choice: byId("chat-choice").value,
    system: byId("chat-system").value,
    tools: byId("chat-tools").value,
  };
}

export function saveSettings() {
  const isOwn = byId("chat-method").value === ownMethod;
  chosenMethod = isOwn ? "" : byId("chat-method").value;
  saveParams(Object.fromEntries(Object.entries(DEFAULTS).map(([id, fallback]) => {
    const value = id === "chat-method" ? chosenMethod : byId(id).value;
    return [id, value === fallback ? null : value];
  })));
}

export function restoreSettings() {
  const params = readParams();
  for (const [id, fallback] of Object.entries(DEFAULTS)) {
    const field = byId(id);
    field.value = params.get(id) ?? fallback;
    if (id !== "chat-method" && !field.value) field.value = fallback; // no such option, no number
  }
  chosenMethod = params.get("chat-method") ?? "";
  selectMethod();
}

// Offers what the server has: its `methods`, and `method` as the default.
export function setMethods({ methods, method }) {
  if (!methods?.length) return;
  const previous = ownMethod;
  ownMethod = method ?? methods[0];
  const shown = [...byId("chat-method").options].map((option) => option.value);
  const known = METHODS.filter((name) => methods.includes(name));
  const sorted = [...known, ...methods.filter((name) => !known.includes(name))];
  // An open list must not be rebuilt by each poll.
  if (String(shown) !== String(sorted)) showMethods(sorted);
  else if (ownMethod !== previous) selectMethod();
}

function showMethods(methods) {
  const options = methods.map((method) => new Option(NAMES[method] ?? method, method));
  byId("chat-method").replaceChildren(...options);
  selectMethod();
}

function selectMethod() {
  const offered = [...byId("chat-method").options].map((option) => option.value);
  byId("chat-method").value = offered.includes(chosenMethod) ? chosenMethod : ownMethod;
}

export function summarize({ method, k, temperature, tokens, system }, toolCount) {
  const parts = [NAMES[method] ?? method];
  if (method !== "none") parts.push(`K ${k}`);
  parts.push(`temperature ${temperature}`, `${tokens} tokens`);
  if (system.trim()) parts.push("system prompt");
  if (toolCount) parts.push(`${toolCount} ${toolCount === 1 ? "tool" : "tools"}`);
  return parts.join(", ");
}
