// The form of the settings: its summary, the check of the tools, and the API key.

import { byId, showText } from "../elements.js";
import { onStatus } from "../server.js";
import * as settings from "./settings.js";
import { EXAMPLE_TOOLS, ToolsError, parseTools } from "./tools.js";

// Opens the settings at the tools if they cannot be sent.
export function toolsAreValid() {
  const problem = showSettings();
  if (!problem) return true;
  byId("chat-settings").open = true;
  byId("chat-tools").focus();
  return false;
}

export function askForKey() {
  byId("chat-settings").open = true;
  byId("chat-key").focus();
}

// Shows a summary, and what is wrong with the tools. Returns the latter.
function showSettings() {
  const chosen = settings.readSettings();
  let tools = [];
  let problem = "";
  try {
    tools = parseTools(chosen.tools);
  } catch (error) {
    if (!(error instanceof ToolsError)) throw error;
    problem = error.message;
  }
  byId("chat-tools").setAttribute("aria-invalid", String(Boolean(problem)));
  showText(byId("chat-tools-problem"), problem);
  byId("chat-summary").textContent = settings.summarize(chosen, tools.length);
  return problem;
}

function onChange() {
  settings.saveSettings();
  showSettings();
}

function restoreSettings() {
  settings.restoreSettings();
  showSettings();
}

byId("chat-settings-form").addEventListener("input", (event) =>
  event.target.id !== "chat-key" && onChange());
byId("chat-settings-form").addEventListener("submit", (event) => event.preventDefault());
byId("chat-example").addEventListener("click", () => {
  byId("chat-tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
  onChange();
  byId("chat-tools").focus();
});
// Both views have a field for the one key.
byId("key").addEventListener("input", () => {
  byId("chat-key").value = byId("key").value;
});
byId("chat-key").addEventListener("input", () => {
  byId("key").value = byId("chat-key").value;
});
byId("chat-key").addEventListener("change", () => byId("key").dispatchEvent(new Event("change")));
addEventListener("hashchange", restoreSettings);
onStatus((status) => {
  settings.setMethods(status);
  showSettings();
});

restoreSettings();
