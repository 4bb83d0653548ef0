// <mathrl-mixer>: eight outcomes, a nominal share and a normalisation; scales, parts, advantages.
// The arithmetic is that of mathrl/mixture.py, and tests/test_mixer.py compares what is shown.
import { make, numbers, shown, slider, sum } from "./shared.js";

const NORMS = ["group", "none", "decoupled"];
const ROUNDING = 1e-12; // of what two parts differ by: what is left of it when they cancel

const width = (values) => Math.max(...values) - Math.min(...values);
const size = (values) => Math.hypot(...values);
const std = (centered) => size(centered) / Math.sqrt(centered.length - 1);
const add = (one, other) => one.map((value, i) => value + other[i]);

function center(values) {
  const shifted = values.map((value) => value - Math.min(...values)); // equal values are exactly 0
  return shifted.map((value) => value - sum(shifted) / shifted.length);
}

// What a group is divided by: infinity if it does not vary, so that 0 over it is 0.
const divisor = (centered, reach = 0) => (width(centered) <= ROUNDING * reach ? Infinity : std(centered));

export function mix(alpha, means, norm, solve, order) {
  const nominal = [alpha, 1 - alpha];
  const scales = nominal.map((share, k) => (share ? share / means[k] : 0));
  const own = [solve, order].map(center);
  const weights = norm === "decoupled" ? nominal : scales;
  const scaled = own.map((values, k) => values.map((value) => weights[k] * value));
  let divisors = [1, 1];
  if (norm === "decoupled") divisors = own.map((values) => divisor(values));
  if (norm === "group") {
    const reach = Math.max(...add(...scaled.map((values) => values.map(Math.abs))));
    divisors = Array(2).fill(divisor(add(...scaled), reach));
  }
  const parts = scaled.map((values, k) => values.map((value) => value / divisors[k]));
  const sizes = parts.map(size);
  return {
    nominal,
    scales,
    deviations: own.map(std),
    shares: sizes.map((part) => (sum(sizes) ? part / sum(sizes) : null)),
    rewards: solve.map((value, i) => scales[0] * value + scales[1] * order[i]),
    parts,
    advantages: add(...parts),
  };
}

class Mixer extends HTMLElement {
  connectedCallback() {
    this.means = numbers(this.getAttribute("means"));
    this.solve = numbers(this.getAttribute("solve"));
    this.order = numbers(this.getAttribute("order"));
    const [scales, samples] = this.querySelectorAll("table");
    this.scaleRows = [...scales.tBodies[0].rows];
    this.sampleRows = [...samples.tBodies[0].rows];
    this.sampleRows.forEach((row, index) => this.#outcome(row, index));
    this.status = make("p", { class: "status", role: "status" });
    samples.after(this.status);
    this.prepend(this.#controls());
    this.#show();
    this.setAttribute("ready", "");
  }

  #controls() {
    const range = { min: 0, max: 1, step: 0.01, value: this.getAttribute("alpha") };
    const fixed = (value) => value.toFixed(2);
    const { label, input } = slider("Nominal share α", range, fixed, () => this.#show());
    this.alpha = input;
    this.norm = make("select", {}, ...NORMS.map((norm) => make("option", { value: norm }, norm)));
    this.norm.addEventListener("change", () => this.#show());
    return make("div", { class: "controls" }, label, make("label", {}, make("span", {}, "Normalisation"), this.norm));
  }

  #outcome(row, index) {
    const [solve, order] = row.querySelectorAll("td");
    const button = make("button", { type: "button" });
    const press = () => {
      button.textContent = this.solve[index];
      button.setAttribute("aria-pressed", this.solve[index] === 1);
      button.ariaLabel = `Solve reward of sample ${index + 1}: ${this.solve[index]}`;
    };
    button.addEventListener("click", () => {
      this.solve[index] = 1 - this.solve[index];
      press();
      this.#show();
    });
    press();
    solve.replaceChildren(button);
    const range = { min: 0, max: 1, step: 0.01, value: this.order[index] };
    const label = `Order reward of sample ${index + 1}`;
    const input = make("input", { type: "number", ...range, "aria-label": label });
    input.addEventListener("input", () => {
      if (!input.value || !input.validity.valid) return; // half typed: the last number stands
      this.order[index] = Number(input.value);
      this.#show();
    });
    order.replaceChildren(input);
  }

  #show() {
    const mixed = mix(Number(this.alpha.value), this.means, this.norm.value, this.solve, this.order);
    const dashed = (value, digits) => (value === null ? "–" : shown(value, digits));
    this.scaleRows.forEach((row, k) => {
      const values = [mixed.nominal[k], mixed.scales[k], mixed.deviations[k], mixed.shares[k]];
      values.forEach((value, at) => {
        row.cells[at + 2].textContent = dashed(value, 4);
      });
    });
    this.sampleRows.forEach((row, i) => {
      const values = [mixed.rewards[i], mixed.parts[0][i], mixed.parts[1][i], mixed.advantages[i]];
      values.forEach((value, at) => {
        row.cells[at + 3].textContent = shown(value, 3);
      });
    });
    const solved = sum(this.solve);
    this.status.textContent =
      `${solved} of ${this.solve.length} solve. ` +
      (width(this.solve) ? "" : "The solve reward does not vary: only the order reward has a part.");
  }
}

customElements.define("mathrl-mixer", Mixer);
