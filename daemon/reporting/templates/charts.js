// Draws SVG charts: scatter (with steps and stacked areas), and row and bar charts with a row per name.
const SPACE = { left: 64, right: 14, top: 10, bottom: 46 }, HEIGHT = 400, ROW = 36;

function node(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function figure(value) {
  return Math.abs(value) >= 1000 ? value.toFixed(0) : String(+value.toPrecision(4));
}

// The smallest and largest value; Math.min(...values) fails beyond about 125,000 values.
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low, high];
}

// A scale from values to pixels (time, category, logarithmic or linear) with its ticks as [value, label].
function scaled(values, axis, from, to) {
  if (axis.type === "date") {
    const [low, high] = extent(values.map((value) => Date.parse(value)));
    const at = (value) => from + ((Date.parse(value) - low) / (high - low || 1)) * (to - from);
    const count = Math.max(2, Math.floor(Math.abs(to - from) / 150));
    const ticks = Array.from({ length: count }, (_, n) => new Date(low + ((high - low) * n) / (count - 1)).toISOString());
    return { at, ticks: ticks.map((tick) => [tick, tick.slice(0, 16).replace("T", " ")]) };
  }
  if (values.some((value) => typeof value === "string")) {
    const names = [...new Set(values)], step = (to - from) / names.length;
    return { at: (value) => from + (names.indexOf(value) + 0.5) * step, ticks: names.map((name) => [name, name]), step };
  }
  const log = axis.type === "log", f = log ? Math.log10 : (value) => value, known = values.filter((v) => !log || v > 0);
  let [low, high] = extent(known.map(f));
  if (!log) [low, high] = [Math.min(low, axis.full ? 0 : low), Math.max(high, axis.full ? 0 : high)];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  if (!(axis.full && !log)) low -= room;
  high += room;
  const [least, most] = [low, high], at = (value) => from + ((f(value) - least) / (most - least)) * (to - from);
  if (axis.tickvals) return { at, ticks: axis.tickvals.map((tick) => [tick, figure(tick)]) };
  const ticks = [], near = log && high - low <= 0.7;
  if (near) [low, high] = [10 ** low, 10 ** high]; // round numbers; `at` has its own bounds
  const size = 10 ** Math.floor(Math.log10((high - low) / 4)), step = [1, 2, 5, 10].find((n) => (high - low) / (n * size) <= 6) * size;
  if (log && !near) {
    for (let power = Math.floor(low); power <= high; power++)
      for (const digit of high - low > 3 ? [1] : [1, 2, 5]) {
        const tick = digit * 10 ** power;
        if (f(tick) >= low && f(tick) <= high) ticks.push([tick, figure(tick)]);
      }
  } else
    for (let n = Math.ceil(low / step); n * step <= high; n++) {
      const tick = +(n * step).toPrecision(12);
      ticks.push([tick, figure(tick)]);
    }
  return { at, ticks };
}

// The name of a row is drawn above the row, where it can use the whole width.
function axes(svg, x, y, width, height, layout, left) {
  const grid = { stroke: "var(--line)" }, text = { fill: "currentColor", "font-size": 12 };
  for (const [tick, label] of y.ticks) {
    if (!y.step) node("line", { ...grid, x1: left, x2: width - SPACE.right, y1: y.at(tick), y2: y.at(tick) }, svg);
    const at = y.step ? { x: left, y: y.at(tick) - 4 } : { x: left - 8, y: y.at(tick) + 4, "text-anchor": "end" };
    node("text", { ...text, ...at }, svg, label);
  }
  for (const [tick, label] of x.ticks) {
    const at = x.at(tick), bottom = height - SPACE.bottom;
    node("line", { ...grid, x1: at, x2: at, y1: SPACE.top, y2: bottom }, svg);
    node("text", { ...text, x: at, y: bottom + 17, "text-anchor": "middle" }, svg, label);
  }
  const titles = [layout.xaxis.title, layout.yaxis.title].map((title) => (title || {}).text || "");
  node("text", { ...text, x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, svg, titles[0]);
  node("text", { ...text, transform: `translate(14 ${height / 2}) rotate(-90)`, "text-anchor": "middle" }, svg, titles[1]);
}

// Moves each text into the drawing, shortens it if it is too wide, and drops it if it would overlap an earlier text.
function fit(svg) {
  const { left, right, width } = svg.getBoundingClientRect(), kept = [];
  const texts = [...svg.querySelectorAll("text")].map((text) => [text, text.getBoundingClientRect()]);
  for (const [text, box] of texts) {
    if (box.width > width) text.textContent = short(text.textContent, (0.9 * text.textContent.length * width) / box.width);
    const wide = Math.min(box.width, width), from = Math.max(left, Math.min(box.left, right - wide));
    if (from !== box.left) text.setAttribute("x", +text.getAttribute("x") + from - box.left);
    const isFree = kept.every((one) => from + wide < one.from || from > one.to || box.bottom < one.top || box.top > one.bottom);
    isFree ? kept.push({ from, to: from + wide, top: box.top, bottom: box.bottom }) : text.remove();
  }
}

function short(text, room) {
  return text.length > room ? text.slice(0, Math.max(1, room - 1)) + "…" : text;
}

const SHAPES = {
  circle: (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
  diamond: (x, y, r) => `M${x} ${y - 1.3 * r}l${1.3 * r} ${1.3 * r}l${-1.3 * r} ${1.3 * r}l${-1.3 * r} ${-1.3 * r}Z`,
  triangle: (x, y, r) => `M${x} ${y - 1.2 * r}l${1.2 * r} ${2.2 * r}h${-2.4 * r}Z`,
  rect: (x, y, r) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
  pin: (x, y, r) => `M${x} ${y + 1.3 * r}l${-r} ${-1.6 * r}a${r} ${r} 0 1 1 ${2 * r} 0Z`,
};

function mark(parent, trace, x, y, colour, title) {
  const marker = trace.marker || {}, r = (marker.size || 8) / 2;
  const ring = { cx: x, cy: y, r, fill: "none", stroke: colour, "stroke-width": 2 };
  const cross = { d: `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`, stroke: BAD, "stroke-width": 2 };
  const made = marker.symbol === "x" ? node("path", cross, parent)
    : marker.symbol ? node("circle", ring, parent)
    : node("path", { d: SHAPES[trace.shape || "circle"](x, y, r), fill: colour }, parent);
  node("title", {}, made, title);
}

function marks(parent, trace, x, y) {
  trace.y.forEach((value, n) => {
    const at = x.at(trace.x[n]), top = y.at(value) + (y.step || 0) / 4, bar = trace.error_x;
    const ends = bar && `M${x.at(trace.x[n] - bar.arrayminus[n])} ${top}H${x.at(trace.x[n] + bar.array[n])}`;
    if (bar) node("path", { d: ends, stroke: trace.colour, "stroke-width": 2, opacity: 0.6 }, parent);
    const words = y.step ? figure(trace.x[n]) : `${trace.x[n]}, ${figure(value)}`;
    mark(parent, trace, at, top, trace.colour, `${trace.text ? trace.text[n] : trace.name}\n${words}`);
  });
}

function scatter(svg, chart, width, height) {
  const stacked = {}, traces = chart.data.map((trace) => {
    if (!trace.stackgroup) return trace;
    const under = trace.x.map((_, n) => stacked[n] || 0), y = trace.y.map((value, n) => (stacked[n] = under[n] + value));
    return { ...trace, y, under };
  });
  const { xaxis, yaxis } = chart.layout, full = traces.some((trace) => trace.under);
  const x = scaled(traces.flatMap((trace) => trace.x), xaxis, SPACE.left, width - SPACE.right);
  const y = scaled(traces.flatMap((trace) => trace.y), { ...yaxis, full }, height - SPACE.bottom, SPACE.top);
  axes(svg, x, y, width, height, chart.layout, SPACE.left);
  for (const trace of traces) {
    const part = node("g", { "data-name": trace.name }, svg), colour = trace.colour;
    const hv = (trace.line || {}).shape === "hv";
    const line = (values) => values.map((value, n) => (n ? (hv ? `H${x.at(trace.x[n])}V` : `L${x.at(trace.x[n])} `) : `M${x.at(trace.x[n])} `) + y.at(value)).join("");
    if (trace.under) {
      const back = trace.x.map((at, n) => `L${x.at(trace.x[Math.min(n + 1, trace.x.length - 1)])} ${y.at(trace.under[n])}L${x.at(at)} ${y.at(trace.under[n])}`);
      node("title", {}, node("path", { d: line(trace.y) + back.reverse().join("") + "Z", fill: colour, "fill-opacity": 0.6 }, part), trace.name);
    } else if (trace.mode.includes("lines")) node("path", { d: line(trace.y), fill: "none", stroke: colour, "stroke-width": 1.5 }, part);
    const end = trace.x.length - 1, beside = { x: x.at(trace.x[end]) - 6, y: y.at(trace.y[end]) - 8, fill: "currentColor" };
    if (trace.label) node("text", { ...beside, "font-size": 12, "text-anchor": "end" }, part, trace.label);
    if (trace.mode.includes("markers")) marks(part, trace, x, y);
  }
}

// Marks in the row of their name, with error bars.
function rows(svg, chart, width, height) {
  const ends = ({ x, error_x: bar }) => x.flatMap((v, n) => (bar ? [v - bar.arrayminus[n], v + bar.array[n]] : [v]));
  const x = scaled(chart.data.flatMap(ends), chart.layout.xaxis, SPACE.right, width - SPACE.right);
  const y = scaled(chart.data.flatMap((trace) => trace.y), {}, SPACE.top, height - SPACE.bottom);
  axes(svg, x, y, width, height, chart.layout, SPACE.right);
  for (const trace of chart.data) {
    const part = node("g", { "data-name": trace.name }, svg);
    marks(part, trace, x, y);
  }
}

function bars(svg, chart, width, height) {
  const names = chart.data.flatMap((trace) => trace.y), sums = {}, starts = {}, notes = {};
  for (const trace of chart.data) trace.y.forEach((name, n) => (sums[name] = (sums[name] || 0) + trace.x[n]));
  for (const trace of chart.data) (trace.text || []).forEach((text, n) => (notes[trace.y[n]] = text));
  const y = scaled(names, {}, SPACE.top, height - SPACE.bottom);
  y.ticks = y.ticks.map(([name]) => [name, notes[name] ? `${name}: ${notes[name]}` : name]);
  const x = scaled([0, ...Object.values(sums)], { full: true }, SPACE.right, width - SPACE.right);
  axes(svg, x, y, width, height, chart.layout, SPACE.right);
  for (const trace of chart.data)
    trace.y.forEach((name, n) => {
      const from = starts[name] || 0, to = (starts[name] = from + trace.x[n]);
      const at = { x: x.at(from), y: y.at(name), width: Math.max(0, x.at(to) - x.at(from)), height: y.step * 0.4 };
      node("title", {}, node("rect", { ...at, fill: trace.colour }, svg), `${name} ${trace.name || ""}\n${figure(trace.x[n])}`);
    });
}

function legend(chart, below) {
  const named = chart.data.filter((trace) => trace.name && trace.showlegend !== false);
  if (named.length < 2) return;
  for (const trace of named) {
    const entry = document.createElement("span"), spot = node("svg", { width: 14, height: 14, "aria-hidden": true }, entry);
    mark(spot, trace, 7, 7, trace.colour, trace.name);
    entry.append(trace.name);
    below.append(entry);
  }
}

function draw() {
  charts.forEach((chart, place) => {
    const holder = document.getElementById("chart" + place), width = Math.max(320, holder.clientWidth), kind = chart.data[0].type;
    const colours = {};
    chart.data = chart.data.map((trace) => {
      const name = (trace.name || "").split(": ")[0];
      colours[name] ??= trace.colour ?? COLOURS[Object.keys(colours).length % COLOURS.length];
      return { ...trace, colour: colours[name] };
    });
    const kinds = { bar: bars, row: rows }, names = new Set(chart.data.flatMap((trace) => trace.y));
    const height = ["bar", "row"].includes(kind) ? SPACE.top + SPACE.bottom + names.size * ROW : HEIGHT;
    const svg = node("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
    const below = document.createElement("div");
    below.className = "legend";
    below.tabIndex = 0; // it may scroll
    holder.replaceChildren(svg, below);
    (kinds[kind] || scatter)(svg, chart, width, height);
    fit(svg);
    legend(chart, below);
  });
}
