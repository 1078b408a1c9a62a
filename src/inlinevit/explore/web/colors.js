// Colours: blue for negative, orange for positive weights, which readers with any kind of colour vision can tell apart.

const LIGHT = {
  negative: [[247, 247, 247], [178, 205, 232], [75, 138, 196], [14, 72, 135]],
  positive: [[247, 247, 247], [253, 208, 155], [230, 128, 32], [130, 56, 0]],
};
const DARK = {
  negative: [[34, 38, 45], [33, 74, 122], [58, 132, 207], [150, 205, 255]],
  positive: [[34, 38, 45], [116, 68, 14], [224, 136, 34], [255, 217, 150]],
};
const dark = window.matchMedia("(prefers-color-scheme: dark)");

/** Call a function when the page changes between dark and light. */
export function onSchemeChange(change) {
  dark.addEventListener("change", change);
}

/** The colour of a value from -1 to 1: [red, green, blue]. */
export function colorOf(value) {
  const scale = dark.matches ? DARK : LIGHT;
  const stops = value < 0 ? scale.negative : scale.positive;
  const place = Math.min(Math.abs(value), 1) * (stops.length - 1);
  const first = Math.min(Math.floor(place), stops.length - 2);
  const part = place - first;
  return stops[first].map((from, i) => Math.round(from + part * (stops[first + 1][i] - from)));
}

// Of Okabe and Ito. Lines also differ in their dashes and markers.
const STYLES = {
  softmax: { color: "#0072b2", dark: "#5fb4ea", dash: "7 4", marker: "square" },
  linear: { color: "#b87800", dark: "#f0b840", dash: "2 4", marker: "triangle" },
  inline: { color: "#00805c", dark: "#2fc79a", dash: "", marker: "circle" },
};
const OTHERS = [
  { color: "#a34a7b", dark: "#e39ac3", dash: "9 3 2 3", marker: "diamond" },
  { color: "#555555", dark: "#bbbbbb", dash: "4 2", marker: "square" },
  { color: "#b34700", dark: "#ff9457", dash: "12 3", marker: "circle" },
];

/** The look of the lines of some attentions, in order: known ones have their own, others and repeated ones do not. */
export function stylesOf(attentions) {
  let spare = 0;
  const taken = new Set();
  return attentions.map((attention) => {
    const known = STYLES[attention] && !taken.has(attention);
    const style = known ? STYLES[attention] : OTHERS[spare++ % OTHERS.length];
    taken.add(attention);
    return { ...style, color: dark.matches ? style.dark : style.color };
  });
}
