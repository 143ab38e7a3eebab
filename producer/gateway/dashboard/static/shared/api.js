// Sends requests to the gateway. The API key is stored for this tab only, and sent as a header.

const BASE = "dashboard/api/";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const stored = (name) => ({
  get: () => sessionStorage.getItem(name),
  set: (text) => sessionStorage.setItem(name, text),
  forget: () => sessionStorage.removeItem(name),
});

export const key = stored("promptq-key");

/** The queue that this tab shows; null is the gateway's own. */
export const queue = stored("promptq-queue");

const withQueue = (query) => new URLSearchParams({ ...query, ...(queue.get() && { queue: queue.get() }) });

let onRefused = () => {};

/** Sets the function that is called with the error when the gateway refuses the key. */
export function whenRefused(handler) {
  onRefused = handler;
}

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(BASE + path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the gateway does not answer");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const error = new ApiError(response.status, body.error?.message ?? response.statusText);
  if (response.status === 401 || response.status === 403) onRefused(error);
  throw error;
}

export async function get(path, query = {}) {
  return (await send(`${path}?${withQueue(query)}`)).json();
}

export async function post(path, body = {}) {
  const headers = { "Content-Type": "application/json" };
  return (await send(`${path}?${withQueue({})}`, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

/** A warning without the server's advice to try again, because the page does so by itself. */
export const notLive = (error) => `Not live: ${error.message.split("; try again")[0]}. Trying again.`;

/** Returns whether the gateway refused a request, so that a new try would fail, too. */
const isRefusal = (error) => error instanceof ApiError && error.status >= 400 && error.status < 500;

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;
const SILENCE_MS = 40_000;

/** Resolves when the page is visible. Hidden pages hold no connection: browsers allow six to a gateway for all tabs. */
function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", () => resolve(visible()), { once: true });
  });
}

/**
 * Reads server-sent events, and reconnects after a break. Uses fetch, because an EventSource sends no headers.
 * `on` has a function for each kind of event. `on.begun()` and `on.broken(error)` report connections and breaks.
 * If `isOver()` is true when the stream ends, it does not reconnect. Returns a function that closes the stream.
 */
export function stream(path, query, on, isOver = () => false) {
  let control;
  let closed = false;
  const stopIfHidden = () => document.hidden && control?.abort();
  document.addEventListener("visibilitychange", stopIfHidden);

  async function readOnce() {
    control = new AbortController();
    const response = await send(`${path}?${withQueue(query)}`, { signal: control.signal });
    on.begun?.();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffered = "";
    for (;;) {
      const silent = setTimeout(() => control.abort(), SILENCE_MS);
      const { value, done } = await reader.read().finally(() => clearTimeout(silent));
      if (done) return;
      buffered += value;
      const parts = buffered.split("\n\n");
      buffered = parts.pop();
      for (const part of parts) if (!closed) dispatch(part);
    }
  }

  function dispatch(text) {
    const fields = Object.fromEntries(text.split("\n").map((line) => {
      const at = line.indexOf(": ");
      return [line.slice(0, at), line.slice(at + 2)];
    }));
    if (fields.event) on[fields.event]?.(JSON.parse(fields.data));
  }

  async function run() {
    let wait = FIRST_WAIT_MS;
    while (!closed) {
      await visible();
      if (closed) return;
      const began = Date.now();
      try {
        await readOnce();
        if (isOver()) return;
      } catch (error) {
        if (closed || (isOver() && !(error instanceof ApiError))) return;
        if (document.hidden) continue;
        on.broken?.(error);
        if (isRefusal(error)) return;
      }
      if (Date.now() - began > LONGEST_WAIT_MS) wait = FIRST_WAIT_MS;
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(LONGEST_WAIT_MS, wait * 2);
    }
  }

  run();
  return () => {
    closed = true;
    document.removeEventListener("visibilitychange", stopIfHidden);
    control?.abort();
  };
}

/**
 * Opens a stream that passes the whole state of a page to `show` once a second. `more` has functions for other events.
 * The frame shows a warning while no new state comes. Returns a function that closes the stream.
 */
export function live(kind, query, frame, show, more = {}) {
  return stream(`live/${kind}`, query, {
    ...more,
    [kind]: (state) => {
      frame.warn(null);
      show(state);
    },
    unreachable: () => frame.warn("The queue cannot be reached at the moment. The data below is old."),
    broken: (error) => frame.warn(isRefusal(error) ? error.message : notLive(error)),
    begun: () => frame.warn(null),
  });
}
