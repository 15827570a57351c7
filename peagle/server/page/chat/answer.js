// An answer of the model, assembled from the chunks of its stream.

import { Record, deltaReasoning, exactTexts } from "../record.js";

// A part is what one chunk brought to the thinking or to the text: {texts, rest, accepted, drafted}
// as in the steps of a Record. It has texts only if the chunk holds the text of just these tokens;
// otherwise all of it is `rest`, because it is not known which of its characters were drafts.
export class Answer {
  constructor(method) {
    this.method = method;
    this.record = new Record(method); // times, tokens and drafts
    this.reasoning = []; // parts
    this.content = []; // parts
    this.calls = []; // {index, id, name, arguments}
    this.usage = null;
    this.finishReason = "";
    this.state = "waits"; // waits, runs, done, stopped, failed
    this.problem = "";
  }

  // `t`: seconds since the request was sent.
  add(t, chunk) {
    const { delta = {}, finish_reason: finishReason } = chunk.choices?.[0] ?? {};
    const reasoning = deltaReasoning(delta);
    const content = delta.content ?? "";
    const calls = delta.tool_calls ?? [];
    this.record.add(t, chunk);
    if (reasoning) this.reasoning.push(createPart(reasoning, content ? null : chunk.peagle));
    if (content) this.content.push(createPart(content, reasoning ? null : chunk.peagle));
    for (const call of calls) this.addCall(call);
    if (this.record.steps.length || calls.length) this.state = "runs";
    this.finishReason = finishReason ?? this.finishReason;
    this.usage = chunk.usage ?? this.usage;
  }

  addCall({ index = 0, id, function: called = {} }) {
    let call = this.calls.find((other) => other.index === index);
    if (!call) {
      call = { index, id: `call_${index}`, name: "", arguments: "" };
      this.calls.push(call);
    }
    call.id = id || call.id;
    call.name += called.name ?? "";
    call.arguments += called.arguments ?? "";
  }

  end(state, problem = "") {
    this.state = state;
    this.problem = problem;
  }

  // The calls that can be answered: one that is cut off cannot.
  get finishedCalls() {
    if (this.state !== "done") return [];
    const cut = this.finishReason === "length" && !isJson(this.calls.at(-1)?.arguments);
    return cut ? this.calls.slice(0, -1) : this.calls;
  }

  get text() {
    return joinParts(this.content);
  }

  // A stopped answer continues the conversation if there is something to continue with.
  get usable() {
    return this.state === "done" || (this.state === "stopped" && this.text !== "");
  }

  // The message that the following requests hold.
  get message() {
    const message = { role: "assistant", content: this.text };
    if (this.reasoning.length) message.reasoning_content = joinParts(this.reasoning);
    if (this.finishedCalls.length) {
      message.content ||= null;
      message.tool_calls = this.finishedCalls.map(({ id, name, arguments: text }) =>
        ({ id, type: "function", function: { name, arguments: text } }));
    }
    return message;
  }
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

function createPart(text, trace) {
  const texts = exactTexts(trace?.texts, text);
  if (!texts) return { texts: [], rest: text, accepted: 0, drafted: 0 };
  return { texts, rest: "", accepted: trace.accepted, drafted: trace.drafted };
}

const joinParts = (parts) => parts.map(({ texts, rest }) => texts.join("") + rest).join("");
