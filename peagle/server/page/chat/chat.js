// The chat: a conversation with the model, one answer at a time.

import { RequestError, streamChat } from "../api.js";
import { announce, byId, cloneTemplate, showText, submitOnEnter } from "../elements.js";
import { apiKey } from "../server.js";
import { activeView } from "../tabs.js";
import { Answer } from "./answer.js";
import { AnswerView } from "./answer_view.js";
import { Conversation } from "./conversation.js";
import { readSettings } from "./settings.js";
import { askForKey, toolsAreValid } from "./settings_form.js";
import { parseTools } from "./tools.js";

const REDRAW_INTERVAL = 100; // milliseconds
const SCROLL_MARGIN = 120; // pixels from the end within which the page follows the answer

const log = byId("chat-log");
const prompt = byId("chat-prompt");
let conversation = new Conversation();
let stream = null; // AbortController, while an answer arrives

const showProblem = (problem) => showText(byId("chat-problem"), problem);

// --- messages ---------------------------------------------------------------------------------

function sendQuestion() {
  const text = prompt.value.trim();
  if (stream || !text || !toolsAreValid()) return;
  if (conversation.openCalls.length) {
    showProblem("Type the results of the calls above and continue, or begin a new chat.");
    log.querySelector(".answer:last-child .result textarea").focus();
    return;
  }
  log.querySelector(".answer:last-child .retry")?.setAttribute("hidden", "");
  conversation.addQuestion(text);
  const node = cloneTemplate("question");
  node.querySelector(".words").textContent = text;
  log.append(node);
  prompt.value = "";
  requestAnswer();
}

async function requestAnswer() {
  const chosen = readSettings();
  const body = conversation.request(chosen, parseTools(chosen.tools));
  const answer = new Answer(chosen.method);
  const view = new AnswerView(answer, log);
  const controller = new AbortController();
  stream = controller;
  showProblem("");
  updateButtons();
  scrollToEnd();
  await receive(answer, view, body, controller.signal);
  if (stream !== controller) return; // a new conversation has begun
  stream = null;
  updateButtons();
  finishAnswer(answer, view);
}

async function receive(answer, view, body, signal) {
  const sent = performance.now();
  const now = () => (performance.now() - sent) / 1000;
  const draw = () => followEnd(() => view.draw(now()));
  const timer = setInterval(draw, REDRAW_INTERVAL);
  try {
    for await (const chunk of streamChat(body, apiKey(), signal)) answer.add(now(), chunk);
    answer.end("done");
  } catch (error) {
    if (signal.aborted) answer.end("stopped");
    else answer.end("failed", describeError(error));
  } finally {
    clearInterval(timer);
    draw();
  }
}

function describeError(error) {
  if (error.status === 401 || error.status === 403) askForKey();
  if (error instanceof RequestError) return error.message;
  console.error(error);
  return "The page failed: see the browser's console.";
}

function finishAnswer(answer, view) {
  if (answer.usable) conversation.addAnswer(answer);
  if (conversation.openCalls.length) {
    followEnd(() => view.askResults((results) => sendResults(view, results)));
  } else if (!answer.usable) {
    const edit = conversation.endsWithQuestion ? () => editQuestion(view) : null;
    followEnd(() => view.offerRetry(() => resend(view), edit));
  }
  announceAnswer(answer);
}

// The whole answer at once: screen readers lose track of a text that grows by tokens.
function announceAnswer(answer) {
  const calls = answer.finishedCalls.map(({ name }) => `The model calls ${name}: type its result.`);
  const ending = { stopped: "Stopped.", failed: answer.problem }[answer.state] ?? "";
  announce([answer.text, ...calls, ending].filter(Boolean).join(" "));
}

function sendResults(view, results) {
  if (stream || !toolsAreValid()) return;
  view.closeResults();
  conversation.addResults(results);
  prompt.focus();
  requestAnswer();
}

// --- answers that failed ----------------------------------------------------------------------

function resend(view) {
  if (stream || !toolsAreValid()) return;
  view.node.remove();
  prompt.focus();
  requestAnswer();
}

function editQuestion(view) {
  if (stream) return;
  view.node.previousElementSibling.remove();
  view.node.remove();
  prompt.value = [conversation.removeQuestion(), prompt.value].filter(Boolean).join("\n");
  updateButtons();
  prompt.focus();
}

// --- the form ---------------------------------------------------------------------------------

function followEnd(change) {
  const { scrollHeight, scrollTop, clientHeight } = document.documentElement;
  const follow = scrollHeight - scrollTop - clientHeight < SCROLL_MARGIN;
  change();
  if (follow && activeView() === "chat") scrollToEnd();
}

const scrollToEnd = () => scrollTo(0, document.documentElement.scrollHeight);

function updateButtons() {
  byId("chat-send").disabled = Boolean(stream);
  byId("chat-stop").disabled = !stream;
  byId("chat-new").disabled = !log.childElementCount;
  byId("chat-empty").hidden = log.childElementCount > 0;
}

function startConversation() {
  stream?.abort();
  stream = null;
  conversation = new Conversation();
  log.replaceChildren();
  showProblem("");
  updateButtons();
  prompt.focus();
}

submitOnEnter(prompt);
byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sendQuestion();
});
byId("chat-stop").addEventListener("click", () => stream?.abort());
byId("chat-new").addEventListener("click", startConversation);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && activeView() === "chat" && !event.isComposing) stream?.abort();
});

updateButtons();
