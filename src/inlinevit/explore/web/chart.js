// A line chart as SVG, with a table of its numbers for readers who cannot see it.

const SVG = "http://www.w3.org/2000/svg";
const MARKERS = {
  circle: (x, y) => `M${x - 3.5},${y}a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0`,
  square: (x, y) => `M${x - 3},${y - 3}h6v6h-6z`,
  triangle: (x, y) => `M${x},${y - 4}l4,7h-8z`,
  diamond: (x, y) => `M${x},${y - 4.5}l4,4.5l-4,4.5l-4,-4.5z`,
};

function node(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

function fillOf(line) {
  return line.hollow ? { class: "hollow" } : { fill: line.color };
}

function ticksOf(low, high) {
  const rough = (high - low) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1000; tick += step) ticks.push(tick);
  return ticks;
}

/**
 * Draw lines over layers.
 * @param home The element to fill.
 * @param lines {name, color, dash, marker, values}: one value per layer; null is left out.
 * @param current The layer that is marked.
 * @param choose Called with a layer that was clicked.
 */
export function drawChart(home, lines, current, choose) {
  const width = Math.max(280, home.clientWidth);
  const height = 220;
  const margin = { left: 44, right: 12, top: 10, bottom: 34 };
  const values = lines.flatMap((line) => line.values).filter((value) => value !== null);
  const [low, high] = [Math.min(0, ...values), Math.max(0.05, ...values)];
  const count = Math.max(...lines.map((line) => line.values.length));
  const x = (layer) => margin.left + ((layer + 0.5) / count) * (width - margin.left - margin.right);
  const y = (value) => height - margin.bottom - ((value - low) / (high - low)) * (height - margin.top - margin.bottom);
  const names = lines.map((line) => line.name).join(", ");
  const svg = node("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `Weight of the 3×3 neighbourhood by layer: ${names}. The numbers are in the table below.`,
  });
  const band = (width - margin.left - margin.right) / count;
  svg.append(node("rect", {
    x: x(current) - band / 2, y: margin.top, width: band, height: height - margin.top - margin.bottom,
    class: "current", "data-layer": current,
  }));
  for (const tick of ticksOf(low, high)) {
    svg.append(node("line", { x1: margin.left, x2: width - margin.right, y1: y(tick), y2: y(tick), class: "grid" }));
    svg.append(node("text", { x: margin.left - 6, y: y(tick) + 4, class: "tick end" }, Number(tick.toPrecision(3)).toString()));
  }
  const every = Math.ceil(count / 12);
  for (let layer = 0; layer < count; layer++) {
    if (layer % every === 0 || layer === current) {
      svg.append(node("text", { x: x(layer), y: height - margin.bottom + 16, class: `tick ${layer === current ? "now" : ""}` }, String(layer + 1)));
    }
  }
  svg.append(node("text", { x: (margin.left + width) / 2, y: height - 3, class: "tick" }, "layer"));
  for (const line of lines) {
    const points = line.values.map((value, layer) => [layer, value]).filter(([, value]) => value !== null);
    const path = points.map(([layer, value], i) => `${i ? "L" : "M"}${x(layer)},${y(value)}`).join("");
    svg.append(node("path", { d: path, fill: "none", stroke: line.color, "stroke-width": line.width ?? 1.8, "stroke-dasharray": line.dash }));
    if (!line.marker) continue;
    const marks = points.map(([layer, value]) => MARKERS[line.marker](x(layer), y(value))).join("");
    svg.append(node("path", { d: marks, ...fillOf(line), stroke: line.color, "stroke-width": 1.2 }));
  }
  for (let layer = 0; layer < count; layer++) {
    const hit = node("rect", { x: x(layer) - band / 2, y: 0, width: band, height, class: "hit" });
    hit.addEventListener("click", () => choose(layer));
    svg.append(hit);
  }
  home.replaceChildren(svg, legendOf(lines), tableOf(lines, count));
}

function legendOf(lines) {
  const list = document.createElement("ul");
  list.className = "legend";
  for (const line of lines) {
    const item = document.createElement("li");
    const svg = node("svg", { width: 34, height: 12, "aria-hidden": "true" });
    svg.append(node("path", { d: "M1,6H33", stroke: line.color, "stroke-width": line.width ?? 1.8, "stroke-dasharray": line.dash }));
    if (line.marker) {
      svg.append(node("path", { d: MARKERS[line.marker](17, 6), ...fillOf(line), stroke: line.color }));
    }
    item.append(svg, line.name);
    list.append(item);
  }
  return list;
}

function tableOf(lines, count) {
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = "Numbers";
  const scroll = document.createElement("div");
  scroll.className = "table-scroll";
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const name of ["layer", ...lines.map((line) => line.name)]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = name;
    head.append(cell);
  }
  const body = table.createTBody();
  for (let layer = 0; layer < count; layer++) {
    const row = body.insertRow();
    row.insertCell().textContent = String(layer + 1);
    for (const line of lines) {
      const value = line.values[layer] ?? null;
      row.insertCell().textContent = value === null ? "" : value.toFixed(4);
    }
  }
  scroll.append(table);
  details.append(summary, scroll);
  return details;
}
