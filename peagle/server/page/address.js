// The part of the address after #: the settings of both views, so that a link restores them.

const SAVE_DELAY = 200; // milliseconds from a change to the address

let changes = {}; // not saved yet
let timer = 0;

export const readParams = () => new URLSearchParams(location.hash.replace(/^#/, ""));

// Adds the values to the address. Null removes one: defaults are left out to keep it short.
export function saveParams(values) {
  changes = { ...changes, ...values };
  clearTimeout(timer);
  timer = setTimeout(() => {
    const params = readParams();
    for (const [name, value] of Object.entries(changes)) {
      if (value === null) params.delete(name);
      else params.set(name, value);
    }
    changes = {};
    const hash = params.toString() ? `#${params}` : location.pathname + location.search;
    history.replaceState(null, "", hash);
  }, SAVE_DELAY);
}
