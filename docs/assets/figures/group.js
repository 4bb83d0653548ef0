// <mathrl-group>: eight rewards to toggle, and the factor of the standard deviation at any p.
// All numbers were computed by mathrl at build; this script only looks them up.
import { draw, make, slider } from "./shared.js";

class Group extends HTMLElement {
  async connectedCallback() {
    const source = new URL("../data/group.json", import.meta.url);
    this.data = await (await fetch(source)).json();
    const [advantages, factors] = this.querySelectorAll("table");
    this.#toggles(advantages);
    this.#readout(factors);
    this.#judge();
    this.setAttribute("ready", "");
  }

  #toggles(table) {
    this.rows = [...table.tBodies[0].rows].map((row, index) => {
      const [reward, ...cells] = row.querySelectorAll("td");
      const pressed = reward.textContent === "1";
      const button = make("button", { type: "button", "aria-pressed": pressed });
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", button.ariaPressed !== "true");
        this.#judge();
      });
      reward.replaceChildren(button);
      return { button, cells };
    });
    this.status = make("p", { class: "status", role: "status" });
    table.after(this.status);
  }

  #judge() {
    const rewards = this.rows.map(({ button }) => Number(button.ariaPressed === "true"));
    const successes = rewards.filter(Boolean).length;
    const equal = successes === 0 || successes === rewards.length;
    this.rows.forEach(({ button, cells }, index) => {
      button.textContent = rewards[index];
      button.ariaLabel = `Reward of sample ${index + 1}: ${rewards[index]}`;
      cells.forEach((cell, column) => {
        cell.textContent = this.data.advantages[successes][column][rewards[index]];
      });
    });
    this.status.textContent =
      `${successes} of ${rewards.length} succeed. ` +
      (equal ? "Rewards are equal: every baseline but “none” gives exactly 0." : "");
  }

  #readout(table) {
    const chart = this.querySelector("svg");
    this.curves = [...chart.querySelectorAll("polyline")];
    const box = chart.viewBox.baseVal;
    this.line = draw("line", { class: "marker", y1: box.y + 12, y2: box.y + 196 });
    this.dots = this.curves.map(() => draw("circle", { class: "marker", r: 3.5 }));
    chart.append(this.line, ...this.dots);

    this.chosen = make("tr", {}, make("th", { scope: "row" }));
    this.chosen.append(...this.curves.map(() => make("td")));
    table.append(make("tfoot", {}, this.chosen));

    const range = { min: 0, max: this.data.p.length - 1, step: 1, value: 4 };
    const show = (index) => this.data.p[index].toFixed(2);
    const { label, input } = slider("Success probability p", range, show, () => this.#mark());
    this.success = input;
    chart.after(make("div", { class: "controls" }, label));
    this.#mark();
  }

  #mark() {
    const index = Number(this.success.value);
    const points = this.curves.map((curve) => curve.points.getItem(index));
    this.line.setAttribute("x1", points[0].x);
    this.line.setAttribute("x2", points[0].x);
    this.dots.forEach((dot, k) => {
      dot.setAttribute("cx", points[k].x);
      dot.setAttribute("cy", points[k].y);
    });
    const [head, ...cells] = this.chosen.children;
    head.textContent = this.data.p[index].toFixed(2);
    cells.forEach((cell, k) => {
      cell.textContent = this.data.factors[index][k];
    });
  }
}

customElements.define("mathrl-group", Group);
