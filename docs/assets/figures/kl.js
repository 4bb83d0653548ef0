// <mathrl-kl>: two distributions over three actions to move; divergences and estimators follow.
import { draw, fill, gradient, make, mean, numbers, shown, slider, sum } from "./shared.js";

const NAMES = { policy: "π", reference: "ref" };
const WIDTH = 340;
const LEFT = 58; // of the bars, after their names
const RIGHT = 62; // after the longest bar, for its value
const ROW = 44;

class Divergences extends HTMLElement {
  connectedCallback() {
    this.sliders = {};
    this.bars = {};
    const controls = make("div", { class: "controls" });
    for (const key of Object.keys(NAMES)) controls.append(this.#weights(key));
    this.prepend(controls, this.#chart());
    this.#show();
    this.setAttribute("ready", "");
  }

  #weights(key) {
    const group = make("fieldset", {}, make("legend", {}, `Weights of ${NAMES[key]}, divided by their sum`));
    this.sliders[key] = numbers(this.getAttribute(key)).map((probability, k) => {
      const range = { min: 1, max: 100, step: 1, value: Math.round(100 * probability) };
      const { label, input } = slider(`action ${k + 1}`, range, String, () => this.#show());
      group.append(label);
      return input;
    });
    return group;
  }

  #chart() {
    this.chart = draw("svg", { viewBox: `0 0 ${WIDTH} ${3 * ROW + 6}`, role: "img" });
    for (const key of Object.keys(NAMES)) this.bars[key] = [];
    for (let k = 0; k < 3; k++) {
      const y = k * ROW + 8;
      this.chart.append(draw("text", { x: 0, y: y + 19 }, `action ${k + 1}`));
      Object.keys(NAMES).forEach((key, half) => {
        const top = y + 16 * half;
        const bar = draw("rect", { class: `bar-${key}`, x: LEFT, y: top, height: 13 });
        const text = draw("text", { y: top + 10.5 });
        this.chart.append(bar, text);
        this.bars[key].push({ bar, text });
      });
    }
    return this.chart;
  }

  #show() {
    const [policy, reference] = Object.keys(NAMES).map((key) => {
      const weights = this.sliders[key].map((input) => Number(input.value));
      return weights.map((weight) => weight / sum(weights));
    });
    const logRatio = policy.map((p, k) => Math.log(p) - Math.log(reference[k]));
    const k2 = logRatio.map((ratio) => ratio ** 2 / 2);
    const k3 = logRatio.map((ratio) => Math.expm1(-ratio) + ratio);
    const kl = mean(policy, logRatio);
    const forward = -mean(reference, logRatio);
    fill(this, {
      policy,
      reference,
      kl,
      forward,
      slope: { kl: gradient(policy, logRatio), forward: policy.map((p, k) => p - reference[k]) },
      k1: kl,
      k2: mean(policy, k2),
      k3: mean(policy, k3),
      // As a loss, an estimator f(ℓ) has the gradient f'(ℓ) times the score.
      loss: {
        k1: gradient(policy, [1, 1, 1]),
        k2: gradient(policy, logRatio),
        k3: gradient(policy, logRatio.map((ratio) => -Math.expm1(-ratio))),
      },
      reward: {
        k1: gradient(policy, logRatio),
        k2: gradient(policy, k2),
        k3: gradient(policy, k3),
      },
    });
    this.#paint({ policy, reference });
  }

  #paint(distributions) {
    const said = [];
    for (const [key, probs] of Object.entries(distributions)) {
      probs.forEach((p, k) => {
        const { bar, text } = this.bars[key][k];
        const length = p * (WIDTH - LEFT - RIGHT);
        bar.setAttribute("width", length);
        text.setAttribute("x", LEFT + length + 5);
        text.textContent = `${NAMES[key]} ${shown(p, 3)}`;
      });
      said.push(`${NAMES[key]} = (${probs.map((p) => shown(p, 3)).join(", ")})`);
    }
    this.chart.setAttribute("aria-label", `Bars: ${said.join("; ")}`);
  }
}

customElements.define("mathrl-kl", Divergences);
