// The tools that the model may call: OpenAI's list, typed as JSON.

const NAME = /^[a-zA-Z0-9_-]{1,64}$/;

export const EXAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The current weather of a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string" } },
      required: ["city"],
    },
  },
}];

export class ToolsError extends Error {}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

// An empty text is an empty list. Throws a ToolsError that says what to change.
export function parseTools(text) {
  if (!text.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new ToolsError(`The tools are not valid JSON: ${error.message}.`);
  }
  if (!Array.isArray(tools)) throw new ToolsError("The tools must be a list: [{...}, ...].");
  tools.forEach((tool, i) => checkTool(tool, `Tool ${i + 1}`));
  const names = tools.map((tool) => tool.function.name);
  const repeated = names.find((name, i) => names.indexOf(name) !== i);
  if (repeated) throw new ToolsError(`Two tools have the name ${repeated}: rename one.`);
  return tools;
}

function checkTool(tool, label) {
  if (!isObject(tool) || tool.type !== "function" || !isObject(tool.function)) {
    throw new ToolsError(`${label} must be {"type": "function", "function": {...}}.`);
  }
  const { name, description = "", parameters = {} } = tool.function;
  if (typeof name !== "string" || !NAME.test(name)) {
    throw new ToolsError(`${label} needs a function.name of letters, digits, _ and -.`);
  }
  if (typeof description !== "string") {
    throw new ToolsError(`${label}: the description of ${name} must be a text.`);
  }
  if (!isObject(parameters)) {
    throw new ToolsError(`${label}: the parameters of ${name} must be a JSON schema, {...}.`);
  }
}
