// What the figures with sliders share: numbers as they are read and shown, elements, a softmax.
export const numbers = (text) => text.split(",").map(Number);

// A true minus sign, and none before zeros; docs/hooks/figures.py writes numbers the same way.
export function shown(value, digits = 6) {
  const text = Math.abs(value).toFixed(digits);
  return value < 0 && Number(text) !== 0 ? `−${text}` : text;
}

// Writes values["a"][0] into the cell whose data-value is "a.0".
export function fill(figure, values) {
  for (const cell of figure.querySelectorAll("[data-value]")) {
    const value = cell.dataset.value.split(".").reduce((inner, key) => inner[key], values);
    cell.textContent = shown(value);
  }
}

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// A labelled slider that shows its own value.
export function slider(name, { min, max, step, value }, show, changed) {
  const input = make("input", { type: "range", min, max, step, value });
  const readout = make("span", { class: "readout", "aria-hidden": "true" });
  const label = make("label", {}, make("span", {}, name), input, readout);
  const update = () => {
    readout.textContent = show(Number(input.value));
    input.setAttribute("aria-valuetext", readout.textContent);
  };
  input.addEventListener("input", () => {
    update();
    changed();
  });
  update();
  return { label, input };
}

export const sum = (values) => values.reduce((total, value) => total + value, 0);
export const mean = (probs, values) => sum(probs.map((p, k) => p * values[k]));

export function softmax(logits) {
  const weights = logits.map((logit) => Math.exp(logit - Math.max(...logits)));
  return weights.map((weight) => weight / sum(weights));
}

// The gradient of E[values] in the logits, with the values held fixed: p_k (v_k - E[v]).
export function gradient(probs, values) {
  const average = mean(probs, values);
  return probs.map((p, k) => p * (values[k] - average));
}
