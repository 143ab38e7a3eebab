// Writes numbers and times for people.

const NONE = "–";

/** Returns a statistic of a worker; null if its engine does not report it. */
export function reported(stats, name) {
  return stats.untold.split(" ").includes(name) ? null : stats[name];
}

export function count(value) {
  return value == null ? NONE : Math.round(value).toLocaleString("en");
}

/** A number of things, such as `1 token` or `2 tokens`. */
export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** A rate. Rates below 10 have one decimal. */
export function rate(value) {
  if (value == null) return NONE;
  return value > 0 && value < 10 ? value.toFixed(1) : count(value);
}

/** A duration, from milliseconds. No line break comes between a number and its unit. */
export function duration(ms) {
  if (ms == null) return NONE;
  if (ms === 0) return "0\u00a0ms";
  if (ms < 10) return `${ms.toFixed(1)}\u00a0ms`;
  if (ms < 1000) return `${Math.round(ms)}\u00a0ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)}\u00a0s`;
  const minutes = Math.floor(ms / 60_000);
  const seconds = Math.floor((ms % 60_000) / 1000);
  if (minutes < 60) return seconds ? `${minutes}\u00a0min ${seconds}\u00a0s` : `${minutes}\u00a0min`;
  const hours = Math.floor(minutes / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)}\u00a0days`;
  return minutes % 60 ? `${hours}\u00a0h ${minutes % 60}\u00a0min` : `${hours}\u00a0h`;
}

/** How long ago something was, from milliseconds, in whole seconds. */
export function ago(ms) {
  return ms < 1000 ? "now" : `${duration(Math.floor(ms / 1000) * 1000).replace(/\.\d+\s/, "\u00a0")} ago`;
}

/** A time of day, from Unix milliseconds, with the date if it is not today. */
export function clock(at, now = Date.now()) {
  const date = new Date(at);
  if (!at || Number.isNaN(date.getTime())) return NONE; // any program may have written the time
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date(now).toDateString() ? time : `${date.toISOString().slice(0, 10)} ${time}`;
}

export function bytes(value) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (value < 1024) return `${Math.round(value)}\u00a0${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)}\u00a0GiB`;
}

/** The beginning and the end of a long id, because ids of the same time have the same beginning. */
export function shortId(id) {
  return id.length > 22 ? `${id.slice(0, 8)}…${id.slice(-8)}` : id;
}

export function percent(share) {
  if (share > 0 && share < 0.0005) return "<0.1%";
  return `${(share * 100).toFixed(share < 0.1 ? 1 : 0)}%`;
}
