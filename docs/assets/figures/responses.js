// <mathrl-responses>: the hundred responses to a task, coloured by the package's verdict.
// The verdicts are computed by mathrl at build; this script only shows them.
const LABELS = {
  ok: "reward 1",
  intermediate: "wrong intermediate",
  final: "wrong final",
};

class Responses extends HTMLElement {
  async connectedCallback() {
    const source = new URL("../data/responses.json", import.meta.url);
    this.data = await (await fetch(source)).json();
    this.cells = [...this.querySelectorAll("td")];
    this.querySelector("table").before(this.#controls());
    this.querySelector("table").after(this.#legend(), this.#status());
    this.cells.forEach((cell, index) => {
      cell.addEventListener("click", () => this.#select(index));
      cell.addEventListener("focus", () => this.#select(index));
      cell.addEventListener("keydown", (event) => this.#move(event, index));
    });
    this.selected = 0;
    this.#show(this.getAttribute("task"));
    this.setAttribute("ready", "");
  }

  #controls() {
    const label = document.createElement("label");
    label.textContent = "Task ";
    const menu = document.createElement("select");
    for (const task of Object.keys(this.data.verdicts)) {
      menu.add(new Option(task.replace(",", " + "), task));
    }
    menu.value = this.getAttribute("task");
    menu.addEventListener("change", () => this.#show(menu.value));
    label.append(menu);
    return label;
  }

  #legend() {
    const list = document.createElement("ul");
    list.className = "legend";
    this.counts = {};
    for (const [reason, label] of Object.entries(LABELS)) {
      const item = document.createElement("li");
      item.dataset.reason = reason;
      this.counts[reason] = document.createElement("span");
      item.append(this.counts[reason], ` ${label}`);
      list.append(item);
    }
    return list;
  }

  #status() {
    this.status = document.createElement("p");
    this.status.className = "status";
    this.status.setAttribute("role", "status");
    return this.status;
  }

  #show(task) {
    this.task = task;
    this.verdicts = this.data.verdicts[task];
    this.querySelector("caption").firstChild.data =
      `The ${this.cells.length} responses to ${task.replace(",", " + ")}. Rows: intermediate u; ` +
      `columns: final v. Each has probability ${this.data.probability.toFixed(2)} under the uniform policy.`;
    this.cells.forEach((cell, index) => {
      const { reason } = this.verdicts[index];
      cell.dataset.reason = reason;
      cell.setAttribute("aria-label", `${this.data.responses[index].join(" ")}: ${LABELS[reason]}`);
    });
    for (const [reason, element] of Object.entries(this.counts)) {
      element.textContent = this.verdicts.filter((verdict) => verdict.reason === reason).length;
    }
    this.#select(this.selected);
  }

  #select(index) {
    this.selected = index;
    this.cells.forEach((cell, other) => {
      cell.tabIndex = other === index ? 0 : -1;
      cell.toggleAttribute("data-selected", other === index);
    });
    const verdict = this.verdicts[index];
    this.status.textContent =
      `Response [${this.data.responses[index].join(", ")}]: reward ${verdict.reward}, ` +
      `reason “${verdict.reason}”. ${verdict.detail}`;
  }

  #move(event, index) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
    const column = index % 10;
    if (!step) return;
    event.preventDefault();
    if ((step === -1 && column === 0) || (step === 1 && column === 9)) return;
    this.cells[index + step]?.focus();
  }
}

customElements.define("mathrl-responses", Responses);
