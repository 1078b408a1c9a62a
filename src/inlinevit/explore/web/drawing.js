// Drawing on canvases: the picture with its grid, maps of weights, and the legend of colours.

import { colorOf } from "./colors.js";

function token(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Fit the pixels of a canvas to its place on the screen; returns its context, width and height in CSS pixels. */
function prepare(canvas, ratio) {
  const density = window.devicePixelRatio || 1;
  const width = Math.max(1, canvas.clientWidth);
  const height = Math.max(1, width * ratio);
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  const context = canvas.getContext("2d");
  context.scale(density, density);
  context.imageSmoothingEnabled = false;
  return { context, width, height };
}

function outline(context, [row, column], cell, inner, outer) {
  const [x, y] = [column * cell.width, row * cell.height];
  context.lineWidth = 4;
  context.strokeStyle = outer;
  context.strokeRect(x + 1, y + 1, cell.width - 2, cell.height - 2);
  context.lineWidth = 2;
  context.strokeStyle = inner;
  context.strokeRect(x + 1, y + 1, cell.width - 2, cell.height - 2);
}

function dot(context, place, size, cell, color, edge) {
  const radius = Math.max(1.5, Math.min(4, 0.22 * Math.min(cell.width, cell.height)));
  const [row, column] = [Math.floor(place / size[1]), place % size[1]];
  context.beginPath();
  context.arc((column + 0.5) * cell.width, (row + 0.5) * cell.height, radius, 0, 2 * Math.PI);
  context.fillStyle = color;
  context.fill();
  if (radius >= 2) {
    context.lineWidth = 1;
    context.strokeStyle = edge;
    context.stroke();
  }
}

/** Draw the picture with the grid of patches and the query. */
export function drawPicture(canvas, image, size, query, probe) {
  const { context, width, height } = prepare(canvas, image ? image.naturalHeight / image.naturalWidth : 1);
  if (!image) return;
  context.imageSmoothingEnabled = image.naturalWidth > 64;
  context.drawImage(image, 0, 0, width, height);
  const cell = { width: width / size[1], height: height / size[0] };
  if (cell.width >= 6) {
    context.strokeStyle = "rgba(128, 128, 128, 0.35)";
    context.lineWidth = 1;
    context.beginPath();
    for (let column = 1; column < size[1]; column++) {
      context.moveTo(column * cell.width, 0);
      context.lineTo(column * cell.width, height);
    }
    for (let row = 1; row < size[0]; row++) {
      context.moveTo(0, row * cell.height);
      context.lineTo(width, row * cell.height);
    }
    context.stroke();
  }
  if (probe) outline(context, probe, cell, "#ffffff", "rgba(0, 0, 0, 0.5)");
  outline(context, query, cell, "#ffd400", "#000000");
}

/** Draw the weights of a query: an array of H·W values, the value of white and of the strongest colour. */
export function drawMap(canvas, { values, size, query, probe, confused, center, limit }) {
  const [rows, columns] = size;
  const { context, width, height } = prepare(canvas, rows / columns);
  const cell = { width: width / columns, height: height / rows };
  const pixels = new ImageData(columns, rows);
  for (let i = 0; i < values.length; i++) {
    if (Number.isNaN(values[i])) continue;
    pixels.data.set([...colorOf((values[i] - center) / limit), 255], 4 * i);
  }
  if (values.some(Number.isNaN)) hatch(context, width, height);
  const small = new OffscreenCanvas(columns, rows);
  small.getContext("2d").putImageData(pixels, 0, 0);
  context.drawImage(small, 0, 0, width, height);
  for (const place of confused) dot(context, place, size, cell, token("--confused"), token("--card"));
  if (probe) outline(context, probe, cell, token("--card"), token("--muted"));
  outline(context, query, cell, token("--text"), token("--card"));
}

function hatch(context, width, height) {
  context.strokeStyle = token("--line");
  context.lineWidth = 1;
  context.beginPath();
  for (let x = -height; x < width; x += 6) {
    context.moveTo(x, 0);
    context.lineTo(x + height, height);
  }
  context.stroke();
}

/** Draw the colour scale. */
export function drawLegend(canvas) {
  const { context, width, height } = prepare(canvas, 10 / Math.max(1, canvas.clientWidth));
  for (let x = 0; x < width; x++) {
    context.fillStyle = `rgb(${colorOf((2 * (x + 0.5)) / width - 1).join(" ")})`;
    context.fillRect(x, 0, 1.5, height);
  }
}
