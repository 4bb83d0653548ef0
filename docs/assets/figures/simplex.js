// <mathrl-simplex>: a policy over three actions, its exact gradient, and sampled estimates of it.
import { draw, fill, gradient, make, mean, numbers, shown, slider, softmax, sum } from "./shared.js";

const CORNERS = [
  [30, 282],
  [330, 282],
  [180, 22],
];
const REACH = 2; // a unit step is drawn at this many times its length
const GROUP = 8; // actions in one estimate
const ESTIMATES = 120;
const CLOUDS = { none: "no baseline", value: "baseline J" };

// mulberry32: the same seed gives the same numbers in every browser.
function uniform(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let bits = Math.imul(state ^ (state >>> 15), state | 1);
    bits ^= bits + Math.imul(bits ^ (bits >>> 7), bits | 61);
    return ((bits ^ (bits >>> 14)) >>> 0) / 2 ** 32;
  };
}

// Coordinates on the page of weights on the three corners.
const at = (weights) => [0, 1].map((axis) => sum(weights.map((w, k) => w * CORNERS[k][axis])));

class Simplex extends HTMLElement {
  connectedCallback() {
    this.rewards = numbers(this.getAttribute("rewards"));
    this.seed = 1;
    const controls = make("div", { class: "controls" }, this.#logits());
    this.prepend(controls, this.#triangle(), this.#legend());
    this.#sample();
    this.setAttribute("ready", "");
  }

  #logits() {
    const group = make("fieldset", {}, make("legend", {}, "Logits θ"));
    this.sliders = numbers(this.getAttribute("logits")).map((value, k) => {
      const range = { min: -4, max: 4, step: 0.1, value };
      const show = (logit) => shown(logit, 1);
      const { label, input } = slider(`action ${k + 1}`, range, show, () => this.#show());
      group.append(label);
      return input;
    });
    return group;
  }

  #triangle() {
    this.chart = draw("svg", { viewBox: "0 0 360 318", role: "img" });
    this.chart.append(draw("polygon", { class: "simplex", points: CORNERS.join(" ") }));
    const names = this.rewards.map((reward, k) => `action ${k + 1}, r = ${reward}`);
    const places = [
      { x: 0, y: 304 },
      { x: 360, y: 304, class: "end" },
      { x: 180, y: 14, class: "middle" },
    ];
    places.forEach((place, k) => this.chart.append(draw("text", place, names[k])));
    this.dots = {};
    this.clouds = {};
    for (const key of Object.keys(CLOUDS)) {
      this.dots[key] = Array.from({ length: ESTIMATES }, () => draw("circle", { r: 2.6 }));
      this.clouds[key] = draw("g", { class: `sample-${key}` }, ...this.dots[key]);
      this.chart.append(this.clouds[key]);
    }
    this.arrows = ["halo", "arrow"].map((name) => draw("path", { class: name }));
    this.point = draw("circle", { class: "policy", r: 4.5 });
    this.chart.append(...this.arrows, this.point);
    return this.chart;
  }

  #legend() {
    const list = make("ul", { class: "legend" });
    list.append(make("li", {}, make("span", { class: "key policy" }), "policy π"));
    list.append(make("li", {}, make("span", { class: "key arrow" }), "exact direction of ascent"));
    for (const [key, name] of Object.entries(CLOUDS)) {
      const box = make("input", { type: "checkbox" });
      box.checked = true;
      box.addEventListener("change", () => {
        this.clouds[key].style.display = box.checked ? "" : "none";
      });
      const mark = make("span", { class: `key sample-${key}` });
      list.append(make("li", {}, make("label", {}, box, mark, `samples, ${name}`)));
    }
    const button = make("button", { type: "button" }, "New samples");
    button.addEventListener("click", () => {
      this.seed += 1;
      this.#sample();
    });
    list.append(make("li", {}, button));
    const note =
      `Each dot is a sample: the estimate from ${GROUP} drawn actions. Arrow and dots show where ` +
      `a small step would move π, drawn at ${REACH} times the length of a unit step.`;
    return make("div", {}, list, make("p", { class: "note" }, note));
  }

  #sample() {
    const next = uniform(this.seed);
    this.draws = Array.from({ length: ESTIMATES }, () => Array.from({ length: GROUP }, next));
    this.#show();
  }

  #show() {
    const policy = softmax(this.sliders.map((input) => Number(input.value)));
    const value = mean(policy, this.rewards);
    const slope = gradient(policy, this.rewards);
    const square = sum(policy.map((p) => p ** 2));
    const norms = policy.map((p) => 1 - 2 * p + square); // ‖e_a - π‖²
    const best = mean(policy, norms.map((w, a) => w * this.rewards[a])) / mean(policy, norms);
    const variance = (b) =>
      mean(policy, norms.map((w, a) => w * (this.rewards[a] - b) ** 2)) -
      sum(slope.map((g) => g ** 2));
    const baseline = { none: 0, value, best };
    fill(this, {
      policy,
      value,
      gradient: slope,
      baseline,
      variance: { none: variance(0), value: variance(value), best: variance(best) },
    });
    this.#paint(policy, slope, baseline);
  }

  #paint(policy, slope, baseline) {
    const tip = (direction) => {
      // The derivative of softmax along a direction has the form of a policy gradient, too.
      const step = gradient(policy, direction);
      return at(policy.map((p, k) => p + REACH * step[k]));
    };
    const [x, y] = at(policy);
    this.point.setAttribute("cx", x);
    this.point.setAttribute("cy", y);
    for (const path of this.arrows) path.setAttribute("d", arrow([x, y], tip(slope)));
    for (const key of Object.keys(CLOUDS)) {
      this.draws.forEach((draws, index) => {
        const [cx, cy] = tip(this.#estimate(policy, draws, baseline[key]));
        this.dots[key][index].setAttribute("cx", cx);
        this.dots[key][index].setAttribute("cy", cy);
      });
    }
    const named = (values) => `(${values.map((v) => shown(v, 3)).join(", ")})`;
    this.chart.setAttribute(
      "aria-label",
      `Simplex of three actions. Policy ${named(policy)}, gradient ${named(slope)}, and ` +
        `${ESTIMATES} sampled estimates with and without a baseline.`,
    );
  }

  // (1/G) Σ_i (r_i - b)(e_a - π)
  #estimate(policy, draws, b) {
    const estimate = [0, 0, 0];
    for (const u of draws) {
      const action = u < policy[0] ? 0 : u < policy[0] + policy[1] ? 1 : 2;
      const weight = (this.rewards[action] - b) / GROUP;
      policy.forEach((p, k) => {
        estimate[k] += weight * ((k === action) - p);
      });
    }
    return estimate;
  }
}

function arrow([x, y], [tipX, tipY]) {
  const length = Math.hypot(tipX - x, tipY - y) || 1;
  const head = Math.min(9, length / 2) / length;
  const [dx, dy] = [(tipX - x) * head, (tipY - y) * head];
  const wing = (side) => `L${tipX - dx - side * dy * 0.5} ${tipY - dy + side * dx * 0.5}`;
  return `M${x} ${y}L${tipX} ${tipY}${wing(1)}M${tipX} ${tipY}${wing(-1)}`;
}

customElements.define("mathrl-simplex", Simplex);
