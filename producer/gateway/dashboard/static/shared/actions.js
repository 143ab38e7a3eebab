// Actions on a queue. Each asks for confirmation, and then shows its result.

import { post } from "./api.js";
import { confirm, toast } from "./dialog.js";
import { count, shortId } from "./format.js";

async function act(question, path, body, done) {
  const given = await confirm(question);
  if (given === null) return null;
  try {
    const answer = await post(path, typeof body === "function" ? body(given) : body);
    toast(done(answer));
    return answer;
  } catch (error) {
    toast(error.message, "bad");
    return null;
  }
}

const CANCELLED = {
  cancelled: "It is cancelled",
  flagged: "Its worker ends it now",
  finished: "It had already ended",
};

export function cancel(id) {
  return act({
    title: "Cancel this request?",
    text: `${id} ends at once if it waits, and at its next token if it runs. Its output so far is kept.`,
    action: "Cancel the request", danger: true,
  }, "cancel", { id }, ({ status }) => CANCELLED[status] ?? status);
}

const MOVED = {
  changed: "It has moved",
  active: "Nothing changed: a worker already holds it",
  finished: "Nothing changed: it has ended",
};

export function reprioritise(id, priority) {
  return act({
    title: "Change the priority?",
    text: `${id} moves to its place for the new priority. Lower numbers run sooner.`,
    action: "Change it",
    field: { label: "Priority, -1000 to 1000", type: "number", min: -1000, max: 1000, value: priority },
  }, "reprioritise", (given) => ({ id, priority: Number(given) }), ({ status }) => MOVED[status] ?? status);
}

export function pause() {
  return act({
    title: "Pause the queue?",
    text: "New requests are accepted and wait. Running requests finish.",
    action: "Pause", danger: true,
  }, "pause", {}, () => "The queue is paused");
}

export function resume() {
  return act({
    title: "Resume the queue?",
    text: "Workers get waiting requests again.",
    action: "Resume",
  }, "resume", {}, () => "The queue hands out requests again");
}

export function drain(id) {
  return act({
    title: "Drain this worker?",
    text: `${id} claims no more requests, finishes those it has, and exits. A process manager may start it again.`,
    action: "Drain it", danger: true,
  }, "drain", { id }, () => "The worker finishes its requests and exits");
}

export function requeue(ids) {
  const one = ids?.length === 1;
  return act({
    title: one ? "Run this dead letter again?" : "Run all dead letters again?",
    text: `${one ? `${ids[0]} becomes` : "Each becomes"} a new request that runs alone in its worker.`,
    action: "Requeue",
  }, "dead/requeue", ids ? { ids } : { all: true }, ({ requeued }) => {
    const fresh = Object.values(requeued);
    return fresh.length === 1 ? `It runs again as ${shortId(fresh[0])}` : `${count(fresh.length)} run again`;
  });
}

export function purge(ids) {
  const one = ids?.length === 1;
  return act({
    title: one ? "Purge this dead letter?" : "Purge all dead letters?",
    text: `${one ? `${ids[0]} and all data about it` : "They and all data about them"} will be deleted. This cannot be undone.`,
    action: "Purge", danger: true,
  }, "dead/purge", ids ? { ids } : { all: true }, ({ purged }) => `${count(purged)} purged`);
}
