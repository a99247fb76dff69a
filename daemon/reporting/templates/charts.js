// Draws charts as SVG: scatter (with bars of error, steps, stacked areas), box, bar (horizontal, stacked) and icicle.
const SPACE = { left: 64, right: 14, top: 10, bottom: 46 }, HEIGHT = 400, ROW = 26;

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

// The least and the largest value; Math.min(...values) fails beyond about 125,000 of them.
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low, high];
}

// A scale from values to pixels: of times, of categories, logarithmic or linear, with its ticks as [value, label].
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

function axes(svg, x, y, width, height, layout, left) {
  const grid = { stroke: "var(--line)" }, text = { fill: "currentColor", "font-size": 12 };
  const turned = x.step && x.ticks.some(([, label]) => label.length * 7 > x.step);
  for (const [tick, label] of y.ticks) {
    node("line", { ...grid, x1: left, x2: width - SPACE.right, y1: y.at(tick), y2: y.at(tick) }, svg);
    node("text", { ...text, x: left - 8, y: y.at(tick) + 4, "text-anchor": "end" }, svg, short(label, left / 7 - 1));
  }
  x.ticks.forEach(([tick, label], place) => {
    const at = x.at(tick), bottom = height - SPACE.bottom;
    if (!x.step) node("line", { ...grid, x1: at, x2: at, y1: SPACE.top, y2: bottom }, svg);
    if (layout.xaxis.showticklabels === false) return;
    const shown = node("text", { ...text, x: at, y: bottom + (turned && place % 2 ? 32 : 17), "text-anchor": at > width - 60 ? "end" : "middle" }, svg);
    shown.textContent = turned ? short(label, (2 * x.step) / 7) : label;
    node("title", {}, shown, label);
  });
  const titles = [layout.xaxis.title, layout.yaxis.title].map((title) => (title || {}).text || "");
  node("text", { ...text, x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, svg, titles[0]);
  node("text", { ...text, transform: `translate(14 ${height / 2}) rotate(-90)`, "text-anchor": "middle" }, svg, titles[1]);
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

function scatter(svg, chart, width, height) {
  const stacked = {}, traces = chart.data.map((trace) => {
    if (!trace.stackgroup) return trace;
    const under = trace.x.map((_, n) => stacked[n] || 0), y = trace.y.map((value, n) => (stacked[n] = under[n] + value));
    return { ...trace, y, under };
  });
  const ends = (t) => t.error_y ? t.y.flatMap((v, n) => [v - t.error_y.arrayminus[n], v + t.error_y.array[n]]) : t.y;
  const { xaxis, yaxis } = chart.layout, full = traces.some((trace) => trace.under);
  const x = scaled(traces.flatMap((trace) => trace.x), xaxis, SPACE.left, width - SPACE.right);
  const y = scaled(traces.flatMap(ends), { ...yaxis, full }, height - SPACE.bottom, SPACE.top);
  const labels = []; // where the names of lines stand: one that would cover another is left to the legend
  axes(svg, x, y, width, height, chart.layout, SPACE.left);
  traces.forEach((trace) => {
    const part = node("g", { "data-name": trace.name }, svg), colour = trace.colour;
    const hv = (trace.line || {}).shape === "hv";
    const line = (values) => values.map((value, n) => (n ? (hv ? `H${x.at(trace.x[n])}V` : `L${x.at(trace.x[n])} `) : `M${x.at(trace.x[n])} `) + y.at(value)).join("");
    if (trace.under) {
      const back = trace.x.map((at, n) => `L${x.at(trace.x[Math.min(n + 1, trace.x.length - 1)])} ${y.at(trace.under[n])}L${x.at(at)} ${y.at(trace.under[n])}`);
      node("title", {}, node("path", { d: line(trace.y) + back.reverse().join("") + "Z", fill: colour, "fill-opacity": 0.6 }, part), trace.name);
    } else if (trace.mode.includes("lines")) node("path", { d: line(trace.y), fill: "none", stroke: colour, "stroke-width": 1.5 }, part);
    const end = trace.x.length - 1, beside = { x: x.at(trace.x[end]) - 6, y: y.at(trace.y[end]) - 8, fill: "currentColor" };
    const free = !labels.some(([left, top]) => Math.abs(left - beside.x) < 250 && Math.abs(top - beside.y) < 14);
    if (trace.label && free && labels.push([beside.x, beside.y])) node("text", { ...beside, "font-size": 12, "text-anchor": "end" }, part, trace.label);
    if (trace.mode.includes("markers")) trace.y.forEach((value, n) => {
      const bar = trace.error_y;
      if (bar) node("path", { d: `M${x.at(trace.x[n])} ${y.at(value - bar.arrayminus[n])}V${y.at(value + bar.array[n])}`, stroke: colour, "stroke-width": 2, opacity: 0.6 }, part);
      mark(part, trace, x.at(trace.x[n]), y.at(value), colour, `${trace.text ? trace.text[n] : trace.name}\n${trace.x[n]}, ${figure(value)}`);
    });
  });
}

function boxes(svg, chart, width, height) {
  const x = scaled(chart.data.map((trace) => trace.name), chart.layout.xaxis, SPACE.left, width - SPACE.right);
  const y = scaled(chart.data.flatMap((trace) => trace.y), chart.layout.yaxis, height - SPACE.bottom, SPACE.top);
  axes(svg, x, y, width, height, chart.layout, SPACE.left);
  for (const trace of chart.data) {
    const sorted = [...trace.y].sort((a, b) => a - b), at = x.at(trace.name), half = Math.min(x.step / 4, 24);
    const quantile = (q) => { const n = q * (sorted.length - 1), low = Math.floor(n); return sorted[low] + (n - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]); };
    const [low, middle, high] = [0.25, 0.5, 0.75].map((q) => y.at(quantile(q)));
    const box = node("path", { d: `M${at - half} ${low}H${at + half}V${high}H${at - half}ZM${at - half} ${middle}H${at + half}`, fill: trace.colour, "fill-opacity": 0.25, stroke: trace.colour }, svg);
    node("title", {}, box, trace.name);
    for (const value of trace.y) mark(svg, { marker: { size: 5 } }, at, y.at(value), trace.colour, `${trace.name}\n${figure(value)}`);
  }
}

function bars(svg, chart, width, height) {
  const left = Math.min(220, width / 3), names = chart.data.flatMap((trace) => trace.y), sums = {}, starts = {};
  for (const trace of chart.data) trace.y.forEach((name, n) => (sums[name] = (sums[name] || 0) + trace.x[n]));
  const y = scaled(names, {}, SPACE.top, height - SPACE.bottom);
  const x = scaled([0, ...Object.values(sums)], { full: true }, left, width - SPACE.right);
  axes(svg, x, y, width, height, chart.layout, left);
  for (const trace of chart.data)
    trace.y.forEach((name, n) => {
      const from = starts[name] || 0, to = (starts[name] = from + trace.x[n]), text = (trace.text || [])[n] || "";
      const at = { x: x.at(from), y: y.at(name) - y.step * 0.4, width: Math.max(0, x.at(to) - x.at(from)), height: y.step * 0.8 };
      node("title", {}, node("rect", { ...at, fill: trace.colour }, svg), `${name} ${trace.name || ""}\n${figure(trace.x[n])} ${text}`);
      const inside = text.length * 7 < at.width;
      const beside = { x: inside ? at.x + at.width - 6 : at.x + at.width + 6, "text-anchor": inside ? "end" : "start" };
      if (text) node("text", { ...beside, y: y.at(name) + 4, "font-size": 12, fill: inside ? "#fff" : "currentColor" }, svg, text);
    });
}

function icicle(svg, chart, width, height) {
  const { ids, parents, labels, values, text } = chart.data[0], place = Object.fromEntries(ids.map((id, n) => [id, n]));
  const total = [...values];
  for (let n = ids.length - 1; n > 0; n--) total[place[parents[n]]] += total[n];
  const root = +(svg.parentNode.dataset.root || 0), depths = { [root]: 0 }, start = { [root]: 0 }, next = { [root]: 0 };
  for (let n = root + 1; n < ids.length; n++) {
    const parent = place[parents[n]];
    if (depths[parent] === undefined) continue;
    depths[n] = depths[parent] + 1;
    start[n] = next[n] = next[parent];
    next[parent] += total[n];
  }
  const rows = Math.max(...Object.values(depths)) + 1, tall = Math.max(18, Math.min(ROW, height / rows));
  svg.setAttribute("height", rows * tall + 4);
  svg.setAttribute("viewBox", `0 0 ${width} ${rows * tall + 4}`);
  for (const n in depths) {
    const wide = (total[n] / total[root]) * width, x = (start[n] / total[root]) * width, y = depths[n] * tall;
    if (wide < 1) continue;
    const share = `${((100 * total[n]) / total[0]).toFixed(1)} %`, fill = +n ? COLOURS[depths[n] % COLOURS.length] : "#8888";
    const part = node("g", { style: "cursor:pointer" }, svg);
    node("rect", { x, y, width: Math.max(0.5, wide - 1), height: tall - 1, fill, "fill-opacity": 0.75 }, part);
    node("title", {}, part, `${labels[n]}\n${text[n]}, ${share}`);
    const label = `${labels[n]} ${text[n]}`;
    if (wide > 30) node("text", { x: x + 4, y: y + tall / 2 + 4, "font-size": 11, fill: "currentColor" }, part, short(label, wide / 6.6));
    part.addEventListener("click", () => {
      svg.parentNode.dataset.root = +n === root ? place[parents[n]] ?? 0 : n;
      draw();
    });
  }
}

function legend(chart, below) {
  const named = chart.data.filter((trace) => trace.name && trace.showlegend !== false && trace.type !== "icicle" && trace.type !== "box");
  if (named.length < 2) return;
  for (const trace of named) {
    const entry = document.createElement("span"), spot = document.createElement("i");
    spot.style.background = (trace.marker || {}).symbol === "x" ? BAD : trace.colour;
    entry.append(spot, trace.name);
    below.append(entry);
  }
}

function draw() {
  charts.forEach((chart, place) => {
    if (!chart.data.length) return;
    const holder = document.getElementById("chart" + place), width = Math.max(320, holder.clientWidth), kind = chart.data[0].type;
    const colours = {};
    chart.data = chart.data.map((trace) => {
      const name = (trace.name || "").split(": ")[0];
      colours[name] ??= trace.colour ?? COLOURS[Object.keys(colours).length % COLOURS.length];
      return { ...trace, colour: colours[name] };
    });
    const rows = new Set(chart.data.flatMap((trace) => (kind === "bar" ? trace.y : []))).size;
    const height = kind === "bar" ? SPACE.top + SPACE.bottom + rows * ROW : HEIGHT;
    const svg = node("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
    const below = document.createElement("div");
    below.className = "legend";
    below.tabIndex = 0; // it may scroll
    holder.replaceChildren(svg, below);
    ({ bar: bars, box: boxes, icicle })[kind] ? ({ bar: bars, box: boxes, icicle })[kind](svg, chart, width, height) : scatter(svg, chart, width, height);
    legend(chart, below);
  });
}
