// The server's state, as both views show it, and the API key.

import { fetchJson } from "./api.js";
import { byId } from "./elements.js";

const listeners = [];

export const apiKey = () => byId("key").value.trim();

export const onStatus = (listener) => listeners.push(listener);

// `onError(error)`: the server did not answer.
export async function updateStatus(onError) {
  if (document.hidden) return;
  let status;
  try {
    status = await fetchJson("v1/peagle/status", apiKey());
  } catch (error) {
    onError(error);
    return;
  }
  for (const listener of listeners) listener(status);
}
