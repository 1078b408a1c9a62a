// The page: what is chosen, and how that is shown.

import { drawChart } from "./chart.js";
import { onSchemeChange, stylesOf } from "./colors.js";
import { openSource, ReadableError } from "./data.js";
import { drawLegend, drawMap, drawPicture } from "./drawing.js";

const $ = (id) => document.getElementById(id);
const MEAN = -1;
const NAMES = { softmax: "softmax", linear: "linear", inline: "InLine" };

const app = {
  source: null,
  picture: null,
  image: null, // the decoded picture of the reference model
  sample: 0,
  mode: "models", // or "kinds": the attentions on the queries and keys of one model
  model: 0,
  layer: 0,
  head: MEAN,
  query: [0.5, 0.5], // as fractions of height and width, so that it stays where it is when the map changes
  probe: null,
  columns: [],
  side: 0,
  ready: false,
  abort: new AbortController(), // of the requests about the picture
};

// --- What is chosen ---------------------------------------------------------------------------------------------

const models = () => app.source.state.models;
const reference = () => (app.mode === "kinds" ? app.model : 0);
const layersOf = (model) => app.picture.models[model].layers;
const referenceLayer = () => layersOf(reference())[app.layer];

/** The layer of a model that stands beside the chosen one: the same, or the one at the same relative depth. */
function layerFor(model) {
  const [own, all] = [layersOf(model).length, layersOf(reference()).length];
  return own === all ? app.layer : Math.round((app.layer * (own - 1)) / Math.max(1, all - 1));
}

function placeOn(size, query = app.query) {
  return query.map((part, axis) => Math.min(size[axis] - 1, Math.max(0, Math.floor(part * size[axis]))));
}

function setQuery(row, column) {
  const { size } = referenceLayer();
  app.query = [(row + 0.5) / size[0], (column + 0.5) / size[1]];
  app.probe = null;
}

/** Rows or columns of the map on which there are queries: all of them, or those that were written to a file. */
function steps(axis) {
  const layer = referenceLayer();
  if (!layer.queries) return Array.from({ length: layer.size[axis] }, (_, i) => i);
  return [...new Set(layer.queries.map((query) => query[axis]))].sort((a, b) => a - b);
}

function moved(value, axis, by) {
  const choices = steps(axis);
  const nearest = choices.reduce((best, one, i) => (Math.abs(one - value) < Math.abs(choices[best] - value) ? i : best), 0);
  return choices[Math.min(choices.length - 1, Math.max(0, nearest + by))];
}

// --- Messages ---------------------------------------------------------------------------------------------------

function showMessage(text) {
  $("message-text").textContent = text;
  $("message").hidden = false;
}

function hideMessage() {
  $("message").hidden = true;
}

function report(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof ReadableError)) console.error(error);
  showMessage(error instanceof ReadableError ? error.message : `Something went wrong in this page: ${error.message}`);
}

// --- Pictures ---------------------------------------------------------------------------------------------------

async function open(load, sample = null) {
  document.body.classList.add("busy");
  hideMessage();
  // The server keeps one picture: what is still asked about the old one would be refused.
  app.abort.abort();
  app.abort = new AbortController();
  pending?.abort();
  try {
    const picture = await load();
    app.picture = picture;
    app.sample = sample;
    app.side = 0;
    app.probe = null;
    for (const button of $("samples").children) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.index) === sample));
    }
    prepareControls();
    await showPicture();
    await refresh();
    showPredictions();
    showLocality();
  } catch (error) {
    report(error);
    // The old picture stays, with what was not measured yet.
    localities.clear();
    if (app.columns.length) showLocality();
  } finally {
    document.body.classList.remove("busy");
  }
}

const openSample = (index) => open(() => app.source.openSample(index), index);
const openFile = (file) => open(() => app.source.openFile(file));

async function showPicture() {
  const image = new Image();
  image.src = app.picture.models[reference()].picture;
  await image.decode();
  app.image = image;
}

function prepareSamples() {
  const { samples } = app.source.state;
  $("samples").replaceChildren(...samples.map((sample, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.index = index;
    button.title = sample.title;
    button.setAttribute("aria-label", `Sample: ${sample.title}`);
    const image = document.createElement("img");
    image.src = app.source.sampleAddress(index);
    image.alt = "";
    image.loading = "lazy";
    button.append(image);
    button.addEventListener("click", () => openSample(index));
    return button;
  }));
}

// --- Controls ---------------------------------------------------------------------------------------------------

function option(value, text) {
  const made = document.createElement("option");
  made.value = value;
  made.textContent = text;
  return made;
}

function prepareViews() {
  const several = models().length > 1;
  const kinds = models().map((model, index) => option(`kinds-${index}`, `attentions on q, k of ${model.label}`));
  $("view").replaceChildren(...(several ? [option("models", "each model's own attention")] : []), ...kinds);
  app.mode = several ? "models" : "kinds";
}

function prepareControls() {
  const count = layersOf(reference()).length;
  app.layer = Math.min(app.layer, count - 1);
  $("layer").max = count - 1;
  const heads = Math.max(...shownModels().map((model) => layersOf(model)[layerFor(model)].heads));
  if (app.head >= heads) app.head = MEAN;
  const choices = [option(MEAN, "mean of all"), ...Array.from({ length: heads }, (_, i) => option(i, `${i + 1} of ${heads}`))];
  $("head").replaceChildren(...choices);
  syncControls();
}

function syncControls() {
  const layer = referenceLayer();
  $("view").value = app.mode === "models" ? "models" : `kinds-${app.model}`;
  $("layer").value = app.layer;
  $("layer").setAttribute("aria-valuetext", layer.name);
  const total = app.picture.models[reference()].locality?.layers.length ?? layersOf(reference()).length;
  $("layer-text").textContent = `${(layer.number ?? app.layer) + 1} of ${total}`;
  $("head").value = app.head;
  const hasLocal = shownModels().some((model) => layersOf(model)[layerFor(model)].local);
  $("local").disabled = !hasLocal;
  $("local").parentElement.title = hasLocal ? "" : "These layers have no local residual.";
}

const shownModels = () => (app.mode === "kinds" ? [app.model] : models().map((_, index) => index));

async function changeView(value) {
  app.mode = value === "models" ? "models" : "kinds";
  if (app.mode === "kinds") app.model = Number(value.split("-")[1]);
  prepareControls();
  await showPicture();
  await refresh();
  showLocality();
}

function changeLayer(layer) {
  const count = layersOf(reference()).length;
  app.layer = Math.min(count - 1, Math.max(0, layer));
  app.probe = null;
  prepareControls();
  showLocality();
  return refresh();
}

function changeHead(by) {
  const count = $("head").options.length;
  app.head = ((app.head + 1 + by + count) % count) - 1;
  syncControls();
  draw();
}

// --- Rows of the query ------------------------------------------------------------------------------------------

let pending = null;

/** Fetch the rows of the query and draw them; of several calls while one is under way, only the last is answered. */
async function refresh() {
  pending?.abort();
  const controller = new AbortController();
  pending = controller;
  const wanted = shownModels().map((model) => {
    const layer = layerFor(model);
    const query = placeOn(layersOf(model)[layer].size);
    return app.source.rows(app.picture, model, layer, query, app.mode === "models", controller.signal).then((answer) =>
      answer.columns.map((column) => ({ ...column, model, layer, size: answer.size, query: answer.query })));
  });
  try {
    const found = (await Promise.all(wanted)).flat();
    if (controller.signal.aborted) return;
    app.columns = found;
    const [first] = found;
    // Files have some of the queries only: the page shows the one that was found.
    if (referenceLayer().queries) setQueryKeepingProbe(...first.query);
    prepareMaps();
    draw();
    announce();
    app.ready = true;
    document.body.dataset.ready = String(Number(document.body.dataset.ready ?? 0) + 1);
  } catch (error) {
    report(error);
  }
}

function setQueryKeepingProbe(row, column) {
  const { probe } = app;
  setQuery(row, column);
  app.probe = probe;
}

function clippedHead(column) {
  return app.head === MEAN ? MEAN : Math.min(app.head, column.heads - 1);
}

function meanOf(rows) {
  const mean = new Float32Array(rows[0].length);
  for (const row of rows) for (let i = 0; i < mean.length; i++) mean[i] += row[i] / rows.length;
  return mean;
}

/** The weights of a column for the chosen head: of the attention, of the convolution, and of both together. */
function valuesOf(column) {
  const head = clippedHead(column);
  const attention = head === MEAN ? meanOf(column.weights) : column.weights[head];
  const local = new Float32Array(attention.length);
  column.local?.places.forEach((place, i) => {
    const weights = column.local.weights.map((some) => some[i]);
    local[place] = head === MEAN ? weights.reduce((a, b) => a + b, 0) / weights.length : weights[head];
  });
  const isAdded = column.local !== null && $("local").checked;
  return { attention, local, isAdded, total: isAdded ? attention.map((value, i) => value + local[i]) : attention };
}

function confusedOf(column) {
  if (column.confused === null) return null;
  const head = clippedHead(column);
  if (head !== MEAN) return column.confused[head];
  // For the mean: those that all heads confuse.
  const sets = column.confused.slice(1).map((some) => new Set(some));
  return column.confused[0].filter((place) => sets.every((set) => set.has(place)));
}

function prepareMaps() {
  const key = app.columns.map((column) => `${column.model} ${column.kind}`).join();
  if ($("maps").dataset.key === key) return;
  $("maps").dataset.key = key;
  $("maps").replaceChildren(...app.columns.map((column, index) => {
    const card = document.createElement("figure");
    card.className = "map";
    card.innerHTML = `
      <figcaption><strong class="map-title"></strong> <span class="badge" hidden></span>
        <span class="map-subtitle hint"></span></figcaption>
      <canvas class="map-canvas" role="img"></canvas>
      <canvas class="map-legend" aria-hidden="true"></canvas>
      <div class="map-scale"><span></span><span></span><span></span></div>
      <p class="map-probe"></p>
      <dl class="map-facts"></dl>`;
    const canvas = card.querySelector(".map-canvas");
    canvas.addEventListener("click", (event) => choose(event, canvas, app.columns[index].size));
    canvas.addEventListener("pointermove", (event) => hover(event, canvas, app.columns[index].size));
    canvas.addEventListener("pointerleave", () => unhover());
    return card;
  }));
}

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 0.001 && size < 1000 ? size.toPrecision(3) : size.toExponential(1);
  return `${value < 0 ? "−" : "+"}${text}`;
}

function draw() {
  const size = referenceLayer().size;
  const query = placeOn(size);
  drawPicture($("picture-canvas"), app.image, size, query, app.probe && placeOn(size, app.probe));
  $("query-text").textContent = `Query: row ${query[0] + 1} of ${size[0]}, column ${query[1] + 1} of ${size[1]}`;
  const prepared = app.columns.map((column) => {
    const values = valuesOf(column);
    const center = $("uniform").checked ? column.uniform : 0;
    let limit = 0;
    for (const value of values.total) if (!Number.isNaN(value)) limit = Math.max(limit, Math.abs(value - center));
    return { column, ...values, center, limit: limit || 1e-12 };
  });
  const largest = Math.max(...prepared.map((one) => one.limit));
  prepared.forEach((one, index) => drawColumn($("maps").children[index], one, $("same").checked ? largest : one.limit));
}

function drawColumn(card, { column, attention, local, isAdded, total, center }, limit) {
  const { size } = column;
  const model = models()[column.model];
  const layer = layersOf(column.model)[column.layer];
  const confused = confusedOf(column);
  const head = clippedHead(column);
  const query = app.mode === "models" ? placeOn(size) : column.query;
  const probe = app.probe && placeOn(size, app.probe);
  const title = app.mode === "models" ? model.label : column.name;
  card.querySelector(".map-title").textContent = title;
  const badge = card.querySelector(".badge");
  badge.hidden = !column.own || app.mode === "models";
  badge.textContent = "the model's own";
  const headText = head === MEAN ? "mean of heads" : `head ${head + 1} of ${column.heads}`;
  const kind = app.mode === "models" && NAMES[column.kind] !== title ? `${NAMES[column.kind] ?? column.kind} · ` : "";
  card.querySelector(".map-subtitle").textContent = `${kind}${layer.name} · ${headText}`;
  const canvas = card.querySelector(".map-canvas");
  drawMap(canvas, { values: total, size, query: column.query, probe, confused: confused ?? [], center, limit });
  drawLegend(card.querySelector(".map-legend"));
  const labels = [center - limit, center, center + limit].map((value) => number(value));
  [...card.querySelector(".map-scale").children].forEach((span, i) => { span.textContent = labels[i]; });
  const place = probe ?? query;
  const at = place[0] * size[1] + place[1];
  const where = probe ? `row ${place[0] + 1}, column ${place[1] + 1}` : "query itself";
  let text = `${where}: ${Number.isNaN(total[at]) ? "outside of the window" : number(total[at])}`;
  if (isAdded && local[at] !== 0) text += ` = ${number(attention[at])} attention ${number(local[at])} local`;
  card.querySelector(".map-probe").textContent = text;
  const near = nearSum(total, size, column.query);
  const strongest = total.reduce((best, value, i) => (Math.abs(value) > Math.abs(total[best]) || Number.isNaN(total[best]) ? i : best), 0);
  const facts = [
    ["3×3 around it", number(near.sum)],
    ["if uniform", number(near.count * column.uniform)],
    ["strongest", `${number(total[strongest])} at ${Math.floor(strongest / size[1]) + 1}, ${(strongest % size[1]) + 1}`],
  ];
  if (column.prefix[0]?.length) {
    const sums = column.prefix.map((some) => some.reduce((a, b) => a + b, 0));
    facts.push(["class token", number(head === MEAN ? sums.reduce((a, b) => a + b, 0) / sums.length : sums[head])]);
  }
  const some = confused === null ? "not computed" : confused.length === 0 ? "none" : `${confused.length}${head === MEAN ? " in all heads" : ""}`;
  facts.push(["confused queries", some]);
  const list = card.querySelector(".map-facts");
  list.replaceChildren(...facts.flatMap(([name, value]) => {
    const [term, detail] = [document.createElement("dt"), document.createElement("dd")];
    [term.textContent, detail.textContent] = [name, value];
    if (name === "confused queries" && confused?.length) detail.className = "has-confused";
    return [term, detail];
  }));
  canvas.setAttribute("aria-label", `${title}, ${layer.name}, ${headText}: ${facts.map((fact) => fact.join(" ")).join("; ")}`);
}

function nearSum(values, size, [row, column]) {
  let sum = 0;
  let count = 0;
  for (let i = Math.max(0, row - 1); i <= Math.min(size[0] - 1, row + 1); i++) {
    for (let j = Math.max(0, column - 1); j <= Math.min(size[1] - 1, column + 1); j++) {
      const value = values[i * size[1] + j];
      if (Number.isNaN(value)) continue;
      sum += value;
      count += 1;
    }
  }
  return { sum, count };
}

function announce() {
  const { size, name } = referenceLayer();
  const [row, column] = placeOn(size);
  const found = app.columns.map((one) => `${app.mode === "models" ? models()[one.model].label : one.name}: ${confusedOf(one)?.length ?? "unknown"} confused`);
  $("status").textContent = `Query row ${row + 1}, column ${column + 1}; ${name}; ${found.join(", ")}`;
}

// --- Clicks and hovering ----------------------------------------------------------------------------------------

function fractionOf(event, element) {
  const box = element.getBoundingClientRect();
  return [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width].map((part) => Math.min(0.999999, Math.max(0, part)));
}

function choose(event, element, size) {
  const [row, column] = placeOn(size, fractionOf(event, element));
  // The middle of the patch that was clicked, wherever that is on the reference map.
  app.query = [(row + 0.5) / size[0], (column + 0.5) / size[1]];
  app.probe = null;
  refresh();
}

function hover(event, element, size) {
  if (event.pointerType !== "mouse" || !app.ready) return;
  const [row, column] = placeOn(size, fractionOf(event, element));
  const probe = [(row + 0.5) / size[0], (column + 0.5) / size[1]];
  if (app.probe && probe[0] === app.probe[0] && probe[1] === app.probe[1]) return;
  app.probe = probe;
  draw();
}

function unhover() {
  if (app.probe === null) return;
  app.probe = null;
  draw();
}

// --- Locality ---------------------------------------------------------------------------------------------------

const localities = new Map();

async function localityOf(model) {
  const { picture } = app;
  const key = `${picture.image} ${model}`;
  if (!localities.has(key)) {
    for (const old of localities.keys()) if (!old.startsWith(`${picture.image} `)) localities.delete(old);
    localities.set(key, app.source.locality(picture, model, app.abort.signal));
  }
  return localities.get(key);
}

async function showLocality() {
  const { picture } = app;
  const shown = shownModels();
  if (!$("locality").firstChild) $("locality").textContent = "measuring…";
  try {
    const found = await Promise.all(shown.map(localityOf));
    if (picture !== app.picture || shown.join() !== shownModels().join()) return;
    const chosen = referenceLayer().number ?? app.layer;
    drawChart($("locality"), localityLines(shown, found), chosen, (layer) => changeLayer(nearestLayer(layer)));
  } catch (error) {
    report(error);
  }
}

function nearestLayer(number) {
  return layersOf(reference()).reduce((best, layer, i, all) =>
    (Math.abs((layer.number ?? i) - number) < Math.abs((all[best].number ?? best) - number) ? i : best), 0);
}

function localityLines(shown, found) {
  const gray = { color: getComputedStyle(document.documentElement).getPropertyValue("--muted").trim(), dash: "1 3", width: 1.2 };
  const lines = [{ name: "uniform", ...gray, values: found[0].layers.map((layer) => layer.uniform) }];
  if (app.mode === "kinds") {
    const kinds = Object.keys(found[0].layers[0].weights);
    const styles = stylesOf(kinds);
    kinds.forEach((kind, i) => lines.push({ name: NAMES[kind] ?? kind, ...styles[i], values: found[0].layers.map((layer) => layer.weights[kind] ?? null) }));
    addTotal(lines, found[0], layersOf(shown[0])[0].attention, "with local residual");
    return lines;
  }
  const own = shown.map((model) => layersOf(model)[0].attention);
  const styles = stylesOf(own);
  shown.forEach((model, i) => {
    lines.push({ name: models()[model].label, ...styles[i], values: found[i].layers.map((layer) => layer.weights[own[i]] ?? null) });
    addTotal(lines, found[i], own[i], `${models()[model].label} with local residual`);
  });
  return lines;
}

function addTotal(lines, found, kind, name) {
  if (found.layers.every((layer) => Math.abs(layer.total - (layer.weights[kind] ?? layer.total)) < 1e-9)) return;
  const own = lines[lines.length - 1].name === (NAMES[kind] ?? kind) ? lines[lines.length - 1] : lines.find((line) => line.name === (NAMES[kind] ?? kind)) ?? lines[lines.length - 1];
  lines.push({ ...own, name, hollow: true, width: 2.6, values: found.layers.map((layer) => layer.total) });
}

// --- Hiding the neighbourhood -----------------------------------------------------------------------------------

function showPredictions() {
  const sides = app.picture.models[0].sides.filter((side) => app.picture.models.every((model) => model.sides.includes(side)));
  const choices = [0, ...sides];
  $("sides").replaceChildren(...choices.map((side) => {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("role", "radio");
    button.setAttribute("aria-checked", String(side === app.side));
    button.tabIndex = side === app.side ? 0 : -1;
    button.dataset.side = side;
    button.textContent = side ? `${side}×${side}` : "nothing";
    button.addEventListener("click", () => hide(side));
    return button;
  }));
  const reason = app.picture.models.find((model) => model.no_sides)?.no_sides;
  fillPredictions(app.picture.models.map((model) => [model.prediction]), reason);
}

async function hide(side) {
  app.side = side;
  for (const button of $("sides").children) {
    const isChosen = Number(button.dataset.side) === side;
    button.setAttribute("aria-checked", String(isChosen));
    button.tabIndex = isChosen ? 0 : -1;
  }
  const { picture } = app;
  if (!side) return fillPredictions(picture.models.map((model) => [model.prediction]));
  $("predictions").classList.add("waiting");
  try {
    const found = await Promise.all(picture.models.map((_, model) => app.source.hidden(picture, model, side, app.abort.signal)));
    if (picture !== app.picture || side !== app.side) return;
    fillPredictions(picture.models.map((model, i) => [model.prediction, found[i].near, found[i].random]));
  } catch (error) {
    report(error);
  } finally {
    $("predictions").classList.remove("waiting");
  }
}

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function fillPredictions(rows, reason = "") {
  const table = element("table", "", "predictions");
  const head = table.createTHead().insertRow();
  const around = app.side ? `${app.side}×${app.side} hidden` : "";
  for (const name of ["model", "prediction", ...(app.side ? [around, "random hidden"] : [])].slice(0, rows[0].length + 1)) {
    const cell = element("th", name);
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  rows.forEach((predictions, index) => {
    const row = body.insertRow();
    const name = element("th", models()[index].label);
    name.scope = "row";
    row.append(name);
    for (const prediction of predictions) row.append(predictionCell(prediction, predictions[0]));
  });
  $("predictions").replaceChildren(table);
  if (reason) $("predictions").append(element("p", `Nothing can be hidden: ${reason}.`, "hint"));
}

function predictionCell(prediction, before) {
  const cell = element("td");
  if (!prediction.length) {
    cell.textContent = "no finite output";
    return cell;
  }
  prediction.slice(0, 3).forEach((one, i) => {
    const line = element("div", "", i ? "guess" : "guess best");
    const bar = element("span", "", "bar");
    bar.style.width = `${Math.max(1, 100 * one.probability)}%`;
    line.append(bar, element("span", one.class, "guess-name"), element("span", `${(100 * one.probability).toFixed(1)} %`, "guess-value"));
    cell.append(line);
  });
  if (prediction !== before && before.length) {
    const changed = prediction[0].index !== before[0].index;
    const now = prediction.find((one) => one.index === before[0].index);
    const points = changed ? 0 : (now.probability - before[0].probability) * 100;
    const text = changed ? "changed" : `${points < 0 ? "−" : "+"}${Math.abs(points).toFixed(1)} points`;
    cell.append(element("div", text, changed ? "change changed" : "change"));
  }
  return cell;
}

// --- Events -----------------------------------------------------------------------------------------------------

function toggle(id) {
  if ($(id).disabled) return;
  $(id).checked = !$(id).checked;
  draw();
}

function moveQuery(axis, by, isProbe) {
  const { size } = referenceLayer();
  if (isProbe) {
    const place = placeOn(size, app.probe ?? app.query);
    place[axis] = Math.min(size[axis] - 1, Math.max(0, place[axis] + by));
    app.probe = [(place[0] + 0.5) / size[0], (place[1] + 0.5) / size[1]];
    draw();
    $("status").textContent = [...document.querySelectorAll(".map")].map((card) =>
      `${card.querySelector(".map-title").textContent}: ${card.querySelector(".map-probe").textContent}`).join("; ");
    return;
  }
  const place = placeOn(size);
  place[axis] = moved(place[axis], axis, by);
  setQuery(...place);
  refresh();
}

const ARROWS = { ArrowLeft: [1, -1], ArrowRight: [1, 1], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || !app.picture || !app.columns.length) return;
  const { target } = event;
  // Native controls keep their own keys.
  const takesArrows = target instanceof HTMLSelectElement || target instanceof HTMLInputElement && target.type === "range";
  if (ARROWS[event.key]) {
    if (target.closest?.("[role=radiogroup]")) {
      const buttons = [...$("sides").children];
      const next = buttons[(buttons.indexOf(target) + ARROWS[event.key][1] + buttons.length) % buttons.length];
      next.focus();
      next.click();
    } else if (takesArrows) {
      return;
    } else {
      moveQuery(...ARROWS[event.key], event.shiftKey);
    }
    event.preventDefault();
    return;
  }
  if (target instanceof HTMLSelectElement) return;
  const { samples } = app.source.state;
  const actions = {
    "[": () => changeLayer(app.layer - 1),
    "]": () => changeLayer(app.layer + 1),
    h: () => changeHead(1),
    H: () => changeHead(-1),
    l: () => toggle("local"),
    u: () => toggle("uniform"),
    s: () => toggle("same"),
    m: () => {
      const { options, selectedIndex } = $("view");
      changeView(options[(selectedIndex + 1) % options.length].value);
    },
    n: () => openSample(((app.sample ?? -1) + 1) % samples.length),
    p: () => openSample(((app.sample ?? 0) - 1 + samples.length) % samples.length),
    "?": () => $("help").showModal(),
  };
  if (actions[event.key]) {
    actions[event.key]();
    event.preventDefault();
  }
}

function listen() {
  const picture = $("picture");
  picture.addEventListener("click", (event) => {
    if (app.picture) choose(event, $("picture-canvas"), referenceLayer().size);
  });
  picture.addEventListener("pointermove", (event) => {
    if (app.picture) hover(event, $("picture-canvas"), referenceLayer().size);
  });
  picture.addEventListener("pointerleave", unhover);
  document.addEventListener("keydown", onKey);
  $("view").addEventListener("change", (event) => changeView(event.target.value));
  $("layer").addEventListener("input", (event) => changeLayer(Number(event.target.value)));
  $("layer-down").addEventListener("click", () => changeLayer(app.layer - 1));
  $("layer-up").addEventListener("click", () => changeLayer(app.layer + 1));
  $("head").addEventListener("change", (event) => {
    app.head = Number(event.target.value);
    draw();
  });
  for (const id of ["local", "uniform", "same"]) $(id).addEventListener("change", draw);
  $("message-close").addEventListener("click", hideMessage);
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("help-close").addEventListener("click", () => $("help").close());
  let resized = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(resized);
    resized = requestAnimationFrame(redraw);
  });
  onSchemeChange(redraw);
  if (app.source.canUpload) listenForFiles();
  else $("opener").hidden = true;
}

function redraw() {
  if (!app.columns.length) return;
  draw();
  showLocality();
}

function listenForFiles() {
  $("file").addEventListener("change", (event) => {
    const [file] = event.target.files;
    if (file) openFile(file);
    event.target.value = "";
  });
  let depth = 0;
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  window.addEventListener("dragenter", (event) => {
    if (!hasFiles(event)) return;
    depth += 1;
    document.body.classList.add("dropping");
  });
  window.addEventListener("dragleave", () => {
    depth = Math.max(0, depth - 1);
    if (!depth) document.body.classList.remove("dropping");
  });
  window.addEventListener("dragover", (event) => {
    if (hasFiles(event)) event.preventDefault();
  });
  window.addEventListener("drop", (event) => {
    depth = 0;
    document.body.classList.remove("dropping");
    const [file] = event.dataTransfer?.files ?? [];
    if (!file) return;
    event.preventDefault();
    openFile(file);
  });
  window.addEventListener("paste", (event) => {
    const [file] = event.clipboardData?.files ?? [];
    if (file) openFile(file);
  });
}

async function start() {
  try {
    app.source = await openSource();
    const { state } = app.source;
    $("notice").textContent = state.notice ? `${state.notice}.` : "";
    $("notice").hidden = !state.notice;
    const quantized = state.mode === "static" ? " Some layers and queries, with weights rounded to 1/127 of the largest." : "";
    $("footer").textContent =
      `Confused: rows of weights that differ by at most ${100 * state.epsilon} % although the queries differ by more than ` +
      `${100 * state.delta} %.${quantized} inlinevit ${state.version}.`;
    prepareSamples();
    prepareViews();
    listen();
    await openSample(0);
  } catch (error) {
    report(error);
  }
}

start();
