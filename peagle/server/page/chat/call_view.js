// A call of a tool: its name and arguments, folded, and a field for its result.

import { cloneTemplate, submitOnEnter } from "../elements.js";

let count = 0; // of the fields so far, for their ids

export class CallView {
  constructor() {
    this.node = cloneTemplate("call");
    this.field = this.find("textarea");
    this.field.id = `result-${++count}`;
    this.find("label").htmlFor = this.field.id;
    submitOnEnter(this.field);
  }

  find(selector) {
    return this.node.querySelector(selector);
  }

  draw({ name, arguments: text }) {
    this.find(".call-name").textContent = name;
    this.find("pre").textContent = formatArguments(text);
  }

  // `position`: among several calls.
  askResult({ name }, position) {
    this.find("label").textContent = `Result of ${position ? `call ${position}, ` : ""}${name}`;
    this.find(".result").hidden = false;
  }

  get result() {
    return this.field.value;
  }

  // The result can be read, but not changed any more.
  close() {
    this.field.readOnly = true;
  }
}

// Indented if it is complete JSON, as it is otherwise.
function formatArguments(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
