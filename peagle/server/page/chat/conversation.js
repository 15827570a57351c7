// A conversation as the API takes it. The system prompt is a setting, and comes with each request.

export class Conversation {
  constructor() {
    this.messages = [];
  }

  addQuestion(text) {
    this.messages.push({ role: "user", content: text });
  }

  addAnswer(answer) {
    this.messages.push(answer.message);
  }

  // The results of the last message's calls, in their order.
  addResults(results) {
    this.openCalls.forEach(({ id }, i) => {
      this.messages.push({ role: "tool", tool_call_id: id, content: results[i] });
    });
  }

  // Calls that have no result yet: the conversation cannot go on without.
  get openCalls() {
    return this.messages.at(-1)?.tool_calls ?? [];
  }

  get endsWithQuestion() {
    return this.messages.at(-1)?.role === "user";
  }

  removeQuestion() {
    return this.messages.pop().content;
  }

  // `tools`: as parseTools returns them.
  request({ method, k, temperature, tokens, system, choice }, tools) {
    const prompt = system.trim() ? [{ role: "system", content: system }] : [];
    return {
      messages: [...prompt, ...this.messages],
      max_tokens: tokens,
      temperature,
      stream: true,
      stream_options: { include_usage: true },
      // Plain decoding has no K.
      peagle: { method, trace: true, ...(method === "none" ? {} : { k }) },
      ...(tools.length ? { tools, tool_choice: choice } : {}),
    };
  }
}
