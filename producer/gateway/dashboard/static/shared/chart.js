// Draws lines over the last hour, or over as much of it as there is data for.

import { h, s, show } from "./dom.js";
import { clock, count, duration } from "./format.js";

const MINUTE_MS = 60_000;
const HOUR_MS = 60 * MINUTE_MS;
const LEAST_MS = 5 * MINUTE_MS;
const HEIGHT = 170;
const LEFT = 52;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 22;
/** For a format of values, the units of which an axis has only whole numbers. */
const WHOLE_UNITS = new Map([[duration, [HOUR_MS, MINUTE_MS]], [count, [1]]]);

/** Returns about four round values for an axis, from 0 to at least `most`. */
function ticks(most, format) {
  if (!(most > 0)) return [0, 1];
  const unit = (WHOLE_UNITS.get(format) || []).find((size) => most >= size) || 0;
  const rough = most / 3 / (unit || 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const round = [1, 2, 2.5, 5, 10].map((digit) => digit * power).find((step) => step >= rough);
  const step = unit ? Math.ceil(round) * unit : round;
  const found = [];
  for (let at = 0; at < most + step; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

/**
 * `series` is [{name, of: (sample) => number or null}], with one entry for each line. `format` writes a value as text.
 * Returns {element, draw(samples, now, sampleMs)}.
 */
export function chart(title, series, format) {
  const drawing = s("svg", { role: "img", height: HEIGHT });
  const tip = h("div", { class: "tip", hidden: true });
  const legend = series.length > 1 && h("p", { class: "legend" },
    series.map((line, nth) => h("span", {}, h("i", { class: `swatch line-${nth}` }), line.name)));
  const frame = h("div", { class: "plot" }, drawing, tip);
  const element = h("figure", { class: "card chart" },
    h("figcaption", {}, h("span", {}, title), legend), frame);
  let state = { samples: [], now: Date.now(), sampleMs: 5000 };
  let hovered = null;

  /** How much time the axis shows: whole minutes, so that the oldest end of a full hour has its label. */
  function span() {
    const { samples, now } = state;
    return Math.min(HOUR_MS, Math.max(LEAST_MS, Math.ceil((now - (samples[0]?.at ?? now)) / MINUTE_MS) * MINUTE_MS));
  }

  function place() {
    const width = Math.max(200, frame.clientWidth);
    const { samples, now } = state;
    const values = samples.flatMap((sample) => series.map((line) => line.of(sample))).filter((value) => value != null);
    const steps = ticks(Math.max(0, ...values), format);
    const most = steps.at(-1);
    return {
      width, steps,
      x: (at) => LEFT + (width - LEFT - RIGHT) * (1 - (now - at) / span()),
      y: (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most),
      isEmpty: values.length === 0,
    };
  }

  /** Returns the labels of the time axis, at whole minutes before now. */
  function times({ width, x }) {
    const minutes = span() / MINUTE_MS;
    const step = [1, 2, 5, 10, 15, 30].find((size) => minutes / size <= (width < 460 ? 2 : 5));
    const found = [];
    for (let ago = 0; ago <= minutes; ago += step) {
      const at = x(state.now - ago * MINUTE_MS);
      const anchor = ago === 0 ? "end" : at < LEFT + 30 ? "start" : "middle";
      found.push(s("text", { class: "axis", x: at, y: HEIGHT - 6, "text-anchor": anchor }, ago === 0 ? "now" : `-${ago} min`));
    }
    return found;
  }

  /** Returns the path of a line, with gaps where nothing was measured. A single point is a small circle. */
  function path(line, { x, y }) {
    const measured = state.samples.filter((sample) => line.of(sample) != null);
    const joins = (one, other) => one && other && other.at - one.at <= 2.5 * state.sampleMs;
    return measured.map((sample, nth) => {
      const point = `${x(sample.at).toFixed(1)} ${y(line.of(sample)).toFixed(1)}`;
      if (joins(measured[nth - 1], sample)) return `L${point}`;
      return joins(sample, measured[nth + 1]) ? `M${point}` : `M${point}m-1.5 0a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0-3 0Z`;
    }).join("");
  }

  function redraw() {
    const { samples } = state;
    const at = place();
    drawing.setAttribute("width", at.width);
    drawing.setAttribute("viewBox", `0 0 ${at.width} ${HEIGHT}`);
    const newest = samples.at(-1);
    const values = newest ? series.map((line) => `${line.name} ${format(line.of(newest))}`).join(", ") : "no samples yet";
    drawing.setAttribute("aria-label", `${title} over the last ${duration(span())}; now: ${values}`);
    const shown = hovered !== null && samples[hovered];
    show(drawing,
      at.steps.map((value) => s("g", { class: "grid" },
        s("line", { x1: LEFT, x2: at.width - RIGHT, y1: at.y(value), y2: at.y(value) }),
        s("text", { x: LEFT - 6, y: at.y(value) + 4, "text-anchor": "end" }, format(value)))),
      times(at),
      at.isEmpty
        ? s("text", { class: "axis", x: (LEFT + at.width) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "Nothing was measured in the last hour.")
        : series.map((line, nth) => s("path", { class: `line line-${nth}`, d: path(line, at) })),
      shown && s("line", { class: "cross", x1: at.x(shown.at), x2: at.x(shown.at), y1: TOP, y2: HEIGHT - BOTTOM }));
    tip.hidden = !shown;
    if (shown) {
      show(tip, h("b", {}, clock(shown.at)),
        series.map((line, nth) => h("span", {}, h("i", { class: `swatch line-${nth}` }), `${line.name} ${format(line.of(shown))}`)));
      const x = at.x(shown.at);
      tip.style.left = `${Math.min(Math.max(0, x - tip.offsetWidth / 2), at.width - tip.offsetWidth)}px`;
    }
  }

  drawing.onpointermove = (event) => {
    const { samples, now } = state;
    const width = frame.clientWidth;
    const share = (event.clientX - drawing.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT);
    const at = now - span() * (1 - share);
    const distances = samples.map((sample) => Math.abs(sample.at - at));
    const nearest = distances.indexOf(Math.min(...distances));
    hovered = nearest >= 0 && distances[nearest] < span() / 60 ? nearest : null;
    redraw();
  };
  drawing.onpointerleave = () => {
    hovered = null;
    redraw();
  };
  new ResizeObserver(redraw).observe(frame);
  return {
    element,
    draw(samples, now, sampleMs) {
      state = { samples, now, sampleMs };
      redraw();
    },
  };
}
