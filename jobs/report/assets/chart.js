// Charts of the live page and of the report: a line for each run, over steps or over time, that may grow.

import { clean, duration, h, number, svg } from "./dom.js";

const WIDTH = 460, HEIGHT = 190, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 22;
const SPARK_WIDTH = 110, SPARK_HEIGHT = 26;
const MOST_DOTS = 40; // points of a line that are drawn as dots, too
export const MOST_POINTS = 1200;

// Round numbers between low and high, about `count` of them.
export function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(one => one >= rough * 0.75);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
}

function scaleOf(values, isLog) {
  const low = Math.min(...values), high = Math.max(...values);
  if (isLog && low > 0) {
    const [a, b] = [Math.log(low / 1.05), Math.log(high * 1.05)];
    return { low, high, share: value => (Math.log(Math.max(value, low / 1.05)) - a) / (b - a), isLog: true };
  }
  // Values that differ by rounding alone count as equal: no tick fits between them.
  const size = Math.max(Math.abs(low), Math.abs(high));
  const margin = high - low > 1e-9 * size ? 0.05 * (high - low) : 0.1 * size || 1;
  const [a, b] = [low - margin, high + margin];
  return { low: a, high: b, share: value => (value - a) / (b - a), isLog: false };
}

// Neighbours become one point when there are too many.
export function thin(points) {
  if (points.length <= MOST_POINTS) return points;
  const pairs = [];
  for (let at = 0; at < points.length; at += 2) {
    const [one, two] = [points[at], points[at + 1] ?? points[at]];
    pairs.push([(one[0] + two[0]) / 2, (one[1] + two[1]) / 2, (one[2] + two[2]) / 2, Math.min(one[3], two[3]), Math.max(one[4], two[4])]);
  }
  return pairs;
}

// lines: [{label, colour, dash, points: [[step, seconds, mean, low, high], ...]}]
export class Chart {
  constructor(title) {
    this.title = title;
    this.readout = h("p", { class: "readout soft small", "aria-live": "off" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "group",
      onpointermove: event => this.point(event), onpointerleave: () => this.at(null), onkeydown: event => this.key(event) });
    this.node = h("figure", { class: "chartbox" }, h("figcaption", {}, clean(title)), this.plot, this.readout);
    this.cursor = null;
  }

  draw(lines, { isTime, isLog }) {
    this.lines = lines.filter(line => line.points.length);
    this.isTime = isTime;
    if (!this.lines.length) {
      this.plot.replaceChildren(h("div", { class: "empty" }, "nothing was logged yet"));
      return;
    }
    this.x = point => isTime ? point[1] : point[0];
    const all = this.lines.flatMap(line => line.points);
    const values = all.map(point => point[2]);
    this.scale = scaleOf(values, isLog);
    const xs = all.map(this.x);
    this.first = Math.min(...xs);
    this.last = Math.max(...xs, this.first + 1);
    this.px = value => LEFT + (value - this.first) / (this.last - this.first) * (WIDTH - LEFT - RIGHT);
    this.py = value => HEIGHT - BOTTOM - Math.min(1, Math.max(0, this.scale.share(value))) * (HEIGHT - TOP - BOTTOM);
    const ends = this.lines.map(line => `${line.label} ${number(line.points.at(-1)[2])}`).join(", ");
    this.plot.setAttribute("aria-label", clean(`${this.title}: last ${ends}. Arrow keys read values.`));
    this.mark = svg("path", { class: "cursor" });
    this.plot.replaceChildren(svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" },
      this.axes(), this.lines.flatMap(line => this.curve(line)), this.mark));
    this.at(this.cursor);
  }

  axes() {
    const { low, high, isLog } = this.scale;
    const decades = isLog ? ticks(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)), 4).filter(Number.isInteger)
      .map(one => 10 ** one).filter(one => one >= low && one <= high) : [];
    const marks = decades.length > 1 ? decades : ticks(low, high, 4);
    const parts = marks.flatMap(value => [
      svg("path", { class: "grid", d: `M${LEFT} ${this.py(value)}H${WIDTH - RIGHT}` }),
      svg("text", { x: LEFT - 6, y: this.py(value) + 3.5, "text-anchor": "end" }, brief(value))]);
    const steps = ticks(this.first, this.last, 4).filter(one => this.isTime || Number.isInteger(one));
    return parts.concat(steps.map(value => svg("text",
      { x: this.px(value), y: HEIGHT - 8, "text-anchor": this.px(value) > WIDTH - 30 ? "end" : "middle" }, this.xLabel(value))));
  }

  xLabel(value) {
    if (this.isTime) return duration(value);
    return value >= 1e6 ? `${value / 1e6}M` : value >= 1e4 ? `${value / 1e3}k` : number(Math.round(value));
  }

  curve(line) {
    const place = (x, y) => `${this.px(x).toFixed(1)},${this.py(y).toFixed(1)}`;
    const points = line.points.map(point => place(this.x(point), point[2])).join(" ");
    const parts = [svg("polyline", { class: `c${line.colour}`, points, "stroke-dasharray": line.dash ? "5 3" : null })];
    if (line.points.length < MOST_DOTS) {
      for (const point of line.points)
        parts.push(svg("circle", { class: `f${line.colour}`, cx: this.px(this.x(point)), cy: this.py(point[2]), r: 2 }));
    } else if (line.points.some(point => point[3] < point[4])) {
      const outline = [...line.points.map(point => place(this.x(point), point[4])),
        ...line.points.toReversed().map(point => place(this.x(point), point[3]))];
      parts.unshift(svg("polygon", { class: `band f${line.colour}`, points: outline.join(" ") }));
    }
    return parts;
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * WIDTH;
    this.at(this.first + (x - LEFT) / (WIDTH - LEFT - RIGHT) * (this.last - this.first));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.lines?.length) return;
    event.preventDefault();
    const xs = this.lines[0].points.map(this.x);
    const now = this.cursor === null ? xs.length - 1 - step : nearest(xs, this.cursor);
    this.readout.setAttribute("aria-live", "polite");
    this.at(xs[Math.min(xs.length - 1, Math.max(0, now + step))]);
  }

  at(value) {
    this.cursor = value;
    if (!this.lines?.length) return;
    this.mark?.setAttribute("d", value === null ? "" : `M${this.px(value)} ${TOP}V${HEIGHT - BOTTOM}`);
    this.readout.replaceChildren(...this.lines.map(line => {
      const near = value === null ? line.points.at(-1) : line.points[nearest(line.points.map(this.x), value)];
      const where = value === null ? "" : ` at ${this.isTime ? duration(near[1]) : `step ${Math.round(near[0])}`}`;
      return h("span", {}, h("i", { class: `mark k${line.colour}${line.dash ? " dash" : ""}` }), `${clean(line.label)} `,
        h("b", {}, number(near[2])), where);
    }));
  }
}

// A small picture of one metric with its last value marked. points: [[step, mean], ...]
export function sparkline(label, points) {
  const steps = points.map(point => point[0]), values = points.map(point => point[1]);
  const first = steps[0], width = Math.max(steps.at(-1) - first, 1);
  const low = Math.min(...values), height = Math.max(...values) - low;
  const places = points.map(([step, value]) => {
    const share = height > 0 ? (value - low) / height : 0.5;
    return [3 + (step - first) / width * (SPARK_WIDTH - 6), SPARK_HEIGHT - 4 - share * (SPARK_HEIGHT - 8)];
  });
  const [x, y] = places.at(-1);
  return svg("svg", { class: "spark", viewBox: `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`, role: "img", "aria-label": clean(label) },
    svg("polyline", { class: "c1", points: places.map(place => place.map(one => one.toFixed(1)).join(",")).join(" ") }),
    svg("circle", { class: "f1", cx: x, cy: y, r: 2.2 }));
}

// A tick's number, as short as it is round.
const brief = value => {
  const size = Math.abs(value);
  return size === 0 || size >= 1e-3 && size < 1e5 ? String(value) : value.toExponential().replace("e+", "e");
};
const nearest = (xs, value) => xs.reduce((best, x, at) => Math.abs(x - value) < Math.abs(xs[best] - value) ? at : best, 0);
