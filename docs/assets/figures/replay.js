// <mathrl-replay>: three small trajectories, revealed in steps; the reader predicts first.
// Tables and verdicts were made by mathrl at build; this script hides, shows and looks up.
import { make } from "./shared.js";

const STEPS = ["calls", "right shift", "authorship", "alignment"];
const QUESTIONS = [
  "How many targets do these calls make, over all rows?",
  "Which targets are trained? Press the mask’s buttons.",
  "What do the negative log-probs of the trained targets sum to?",
  "",
];
const ANSWERS = { 0: ".targets", 2: ".loss" };

class Replay extends HTMLElement {
  async connectedCallback() {
    const source = new URL("../data/replay.json", import.meta.url);
    this.data = await (await fetch(source)).json();
    this.sections = [...this.querySelectorAll("section")];
    this.guesses = Object.create(null);
    for (const section of this.sections) this.#prepare(section);
    this.prepend(this.#controls());
    this.append(this.#question());
    addEventListener("hashchange", () => this.#restore());
    if (this.#restore()) this.scrollIntoView();
    else this.#show("base", 0);
    this.setAttribute("ready", "");
  }

  // Keeps what the page says, and puts a button into each cell of the mask.
  #prepare(section) {
    const name = section.dataset.case;
    const tables = [...section.querySelectorAll("table")];
    this.guesses[name] = { masks: tables.map(() => null), numbers: {} };
    tables.forEach((table, row) => {
      const lines = [...table.tBodies[0].rows];
      table.truth = lines.map((line) => line.cells[3].textContent).join("");
      table.buttons = lines.map((line, target) => {
        const button = make("button", { type: "button" });
        button.addEventListener("click", () => this.#toggle(name, row, target));
        return button;
      });
      for (const cell of table.querySelectorAll("[data-step]")) cell.said = cell.textContent;
      table.after(make("p", { class: "verdict" }));
    });
  }

  #controls() {
    const cases = this.sections.map((section) => section.dataset.case);
    const titles = this.sections.map((section) =>
      section.querySelector(".title").textContent.replace(".", ""),
    );
    this.cases = this.#radios("Case", cases, titles, (value) => this.#go(value, this.step));
    this.steps = this.#radios("Step", Object.keys(STEPS), STEPS, (value) =>
      this.#go(this.case, Number(value)),
    );
    return make("div", { class: "choices" }, this.cases, this.steps);
  }

  #radios(legend, values, texts, chosen) {
    const group = make("fieldset", {}, make("legend", {}, legend));
    values.forEach((value, k) => {
      const input = make("input", { type: "radio", name: `replay-${legend}`, value });
      input.addEventListener("change", () => chosen(value));
      group.append(make("label", {}, input, ` ${texts[k]}`));
    });
    return group;
  }

  #question() {
    this.number = make("input", { type: "number", step: "any" });
    this.number.addEventListener("input", () => {
      this.guesses[this.case].numbers[this.step] = this.number.value;
    });
    this.asked = make("span");
    this.label = make("label", {}, this.asked, " ", this.number);
    this.back = make("button", { type: "button" }, "Back");
    this.next = make("button", { type: "button" });
    this.back.addEventListener("click", () => this.#go(this.case, this.step - 1));
    this.next.addEventListener("click", () => this.#go(this.case, this.step + 1));
    this.status = make("p", { class: "status", role: "status" });
    return make("div", { class: "predict" }, this.status, this.label, this.back, " ", this.next);
  }

  #toggle(name, row, target) {
    const { masks } = this.guesses[name];
    const bits = [...(masks[row] ?? this.#tables()[row].truth.replaceAll("1", "0"))];
    bits[target] = bits[target] === "1" ? "0" : "1";
    masks[row] = bits.join("");
    this.#go(name, this.step);
  }

  #tables() {
    return [...this.section.querySelectorAll("table")];
  }

  #go(name, step) {
    if (!(step in STEPS)) return;
    this.#show(name, step);
    const { masks } = this.guesses[name];
    const guess = masks.some(Boolean) ? `,${masks.map((mask) => mask ?? "").join(".")}` : "";
    history.replaceState(null, "", `#replay=${name},${step}${guess}`);
  }

  // Shows the view that the address names; says whether it names one.
  #restore() {
    const found = /^#replay=(\w+),([0-3])(?:,([01.]+))?$/.exec(location.hash);
    if (!found || !Object.hasOwn(this.guesses, found[1])) return false;
    const [, name, step, guess] = found;
    const { masks } = this.guesses[name];
    const known = this.data[name];
    const given = guess?.split(".") ?? [];
    masks.forEach((_, row) => {
      masks[row] = given[row] in known[row] ? given[row] : null;
    });
    this.#show(name, Number(step));
    return true;
  }

  #show(name, step) {
    this.case = name;
    this.step = step;
    for (const section of this.sections) section.hidden = section.dataset.case !== name;
    this.section = this.sections.find((section) => !section.hidden);
    for (const [group, value] of [[this.cases, name], [this.steps, String(step)]]) {
      group.querySelector(`[value="${value}"]`).checked = true;
    }
    this.section.querySelector(".rows").hidden = step === 0;
    this.section.querySelector(".sum").hidden = step < 3;
    this.#tables().forEach((table, row) => this.#fill(table, row));
    this.asked.textContent = QUESTIONS[step];
    this.number.hidden = !(step in ANSWERS);
    this.number.value = this.guesses[name].numbers[step] ?? "";
    // Not `disabled`: a button that is keyed keeps the focus.
    this.back.ariaDisabled = step === 0;
    this.next.ariaDisabled = step === STEPS.length - 1;
    this.next.textContent = STEPS[step + 1] ? `Reveal: ${STEPS[step + 1]}` : "All is revealed";
    this.status.textContent = this.#answer();
  }

  #fill(table, row) {
    for (const cell of table.querySelectorAll("[data-step]")) {
      cell.textContent = Number(cell.dataset.step) <= this.step ? cell.said : "";
    }
    const mask = this.guesses[this.case].masks[row];
    const lines = [...table.tBodies[0].rows];
    lines.forEach((line, target) => {
      const proposed = mask?.[target] ?? "0";
      const cell = line.cells[3];
      line.classList.toggle("trained", this.step > 1 && table.truth[target] === "1");
      cell.toggleAttribute("data-wrong", this.step > 1 && mask && proposed !== cell.said);
      if (this.step !== 1) return;
      const button = table.buttons[target];
      button.textContent = mask ? proposed : "?";
      button.setAttribute("aria-pressed", proposed === "1");
      button.ariaLabel = `${button.textContent}: train target ${target}, ${line.cells[1].said}`;
      cell.replaceChildren(button);
    });
    table.nextElementSibling.textContent =
      this.step > 1 && mask
        ? `Proposed mask ${[...mask].join(" ")}: ${this.data[this.case][row][mask] || "right."}`
        : "";
  }

  // What the last step asked for, once this step shows it.
  #answer() {
    const selector = ANSWERS[this.step - 1];
    if (!selector) return "";
    const right = this.section.querySelector(selector).textContent;
    const said = this.guesses[this.case].numbers[this.step - 1];
    if (!said) return `The answer is ${right}.`;
    const same = Math.abs(Number(said) - Number(right)) < 1e-9;
    return same ? `${right} is right.` : `The answer is ${right}, not ${said}.`;
  }
}

customElements.define("mathrl-replay", Replay);
