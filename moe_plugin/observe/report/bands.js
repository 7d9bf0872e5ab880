// Rows of coloured stretches (timelines, layouts over steps): zoom, values, keys. The drawing of
// the page is changed in place.
"use strict";
const bands = (() => {
  const { show } = numbers, { element, oneStop, ROUND } = plots;
  const WIDTH = 1000, LEAST = 0.8, MARKS = 6;  // of the drawing: its width, its narrowest stretch

  class Bands {
    constructor(figure, unit) {
      this.figure = figure;
      this.plot = figure.querySelector(".plot");
      this.svg = this.plot.querySelector("svg");
      this.unit = unit;
      this.full = [Number(this.plot.dataset.begin), Number(this.plot.dataset.end)];
      this.stretches = [...this.svg.querySelectorAll("rect")].map((rect) => ({
        rect, x: Number(rect.getAttribute("x")), row: Number(rect.getAttribute("y")),
        size: Number(rect.dataset.width ?? rect.getAttribute("width")),
        text: rect.querySelector("title").textContent,
      })).sort((a, b) => a.row - b.row || a.x - b.x);
      this.range = [0, WIDTH];
      this.at = 0;
      this.tip = element("div", { class: "tip", role: "status" });
      this.tip.hidden = true;
      this.area = this.plot.querySelector(".area");
      this.mark = element("div", { class: "u-select" });
      this.area.append(this.tip, this.mark);
      for (const [name, value] of Object.entries({
        tabindex: "0", role: "application", "aria-roledescription": "timeline",
        "aria-labelledby": `${figure.id}-title`, "aria-describedby": `${figure.id}-text bands-keys`,
      })) this.plot.setAttribute(name, value);
      this.svg.style.overflow = "hidden";
      this.plot.before(this.toolbar());
      this.plot.addEventListener("keydown", (event) => this.key(event));
      this.plot.addEventListener("blur", () => this.hide());
      this.pointer();
    }

    toolbar() {
      const title = this.figure.querySelector("h3").textContent;
      const bar = element("div", { class: "tools", role: "toolbar",
        "aria-label": `Tools of ${title}` });
      for (const [name, label, key, action] of [
        ["+", "Zoom in", "+", () => this.zoom(0.5)], ["−", "Zoom out", "-", () => this.zoom(2)],
        ["Reset", "All of it", "0", () => this.show([0, WIDTH])]]) {
        const button = element("button", { type: "button", "aria-label": label,
          title: `${label} (${key})`, "aria-keyshortcuts": key }, name);
        button.addEventListener("click", action);
        bar.append(button);
      }
      oneStop(bar);
      return bar;
    }

    pointer() {
      let begin = null;
      const share = (event) => {
        const box = this.area.getBoundingClientRect();
        return Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
      };
      const mark = (from, to) => { this.mark.style.cssText = from === to ? "" :
        `left: ${100 * Math.min(from, to)}%; width: ${100 * Math.abs(to - from)}%; height: 100%`; };
      this.area.addEventListener("pointermove", (event) => {
        const found = this.stretches.findIndex(({ rect }) => rect === event.target);
        if (begin !== null) mark(begin, share(event));
        else if (found >= 0) this.select(found);
        else this.hide();
      });
      this.area.addEventListener("pointerdown", (event) => {
        if (event.pointerType === "mouse" && event.button === 0) {
          event.preventDefault();
          begin = share(event);
          this.area.setPointerCapture(event.pointerId);
        }
      });
      this.area.addEventListener("pointerup", (event) => {
        if (begin === null) return;
        const [from, size] = [this.range[0], this.range[1] - this.range[0]];
        const ends = [begin, share(event)].sort((a, b) => a - b);
        begin = null;
        mark(0, 0);
        if (ends[1] - ends[0] > 0.01) this.show(ends.map((end) => from + end * size));
      });
      this.area.addEventListener("pointercancel", () => { begin = null; mark(0, 0); });
      this.area.addEventListener("pointerleave", () => { if (begin === null) this.hide(); });
      this.area.addEventListener("dblclick", () => this.show([0, WIDTH]));
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.plot) return;
      const act = {
        ArrowLeft: () => this.move(-1), ArrowRight: () => this.move(1),
        ArrowUp: () => this.row(-1), ArrowDown: () => this.row(1),
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
        0: () => this.show([0, WIDTH]), Home: () => this.show([0, WIDTH]),
        Escape: () => this.hide(),
      }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    }

    // the next stretch of the same row
    move(by) {
      const next = this.stretches[this.at + by];
      const stays = next?.row === this.stretches[this.at].row && !this.tip.hidden;
      this.select(stays ? this.at + by : this.at, true);
    }

    // the stretch of the next row that is nearest in time
    row(by) {
      const { row, x } = this.stretches[this.at];
      const rows = [...new Set(this.stretches.map((one) => one.row))];
      const wanted = rows[rows.indexOf(row) + by];
      const near = this.stretches.filter((one) => one.row === wanted)
        .sort((a, b) => Math.abs(a.x - x) - Math.abs(b.x - x))[0];
      this.select(near ? this.stretches.indexOf(near) : this.at, true);
    }

    select(index, follow = false) {
      this.at = index;
      const { x, size, text, row } = this.stretches[index], [low, high] = this.range;
      if (follow && (x + size < low || x > high)) {
        this.show([x + size / 2 - (high - low) / 2, x + size / 2 + (high - low) / 2]);
      }
      for (const one of this.stretches) one.rect.classList.toggle("here", one.rect ===
        this.stretches[index].rect);
      const middle = Math.min(Math.max(x + size / 2, this.range[0]), this.range[1]);
      const share = (middle - this.range[0]) / (this.range[1] - this.range[0]);
      this.tip.hidden = false;
      this.tip.textContent = `${text}\nfrom ${this.words(x)}`;
      this.tip.style.left = share < 0.5 ? `${100 * share}%` : "";
      this.tip.style.right = share < 0.5 ? "" : `${100 * (1 - share)}%`;
      this.tip.style.top = `${100 * (row + 18) / this.svg.viewBox.baseVal.height}%`;
    }

    hide() {
      this.tip.hidden = true;
      for (const { rect } of this.stretches) rect.classList.remove("here");
    }

    // a place of the drawing as a time or a step
    words(x) { return this.label(this.full[0] + x / WIDTH * (this.full[1] - this.full[0])); }

    label(value) {
      return this.unit === "s" ? show(1000 * value, "ms") : Math.round(value).toLocaleString("en");
    }

    // a mark with as many digits as tell it from the next, in the unit of the last one
    exact(value, step, last) {
      if (this.unit !== "s") return this.label(value);
      const [name, factor] = [["s", 1], ["ms", 1e-3]].find(([, f]) => last >= f) ?? ["us", 1e-6];
      const digits = Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9));
      return `${(value / factor).toFixed(digits)} ${name}`;
    }

    zoom(factor) {
      const [low, high] = this.range, { x, size } = this.stretches[this.at];
      const known = !this.tip.hidden && x + size >= low && x <= high;
      const middle = known ? Math.min(Math.max(x + size / 2, low), high) : (low + high) / 2;
      this.show([middle + (low - middle) * factor, middle + (high - middle) * factor]);
      if (known) this.select(this.at);
    }

    // a stretch of steps that plots of curves show, too
    follow([low, high]) {
      const [begin, end] = this.full;
      this.draw([low, high].map((step) => WIDTH * (step - begin) / (end - begin)));
    }

    show(range) {
      this.draw(range);
      const [begin, end] = this.full;
      if (this.unit !== "s") {
        plots.share(this, this.range.map((x) => begin + x / WIDTH * (end - begin)));
      }
    }

    draw([low, high]) {
      const size = Math.min(Math.max(high - low, WIDTH / 1e4), WIDTH);
      const first = Math.min(Math.max(low, 0), WIDTH - size);
      this.range = [first, first + size];
      const { height } = this.svg.viewBox.baseVal;
      this.svg.setAttribute("viewBox", `${first} 0 ${size} ${height}`);
      for (const one of this.stretches) {
        one.rect.setAttribute("width", Math.max(one.size, LEAST * size / WIDTH));
      }
      this.axis();
    }

    axis() {
      const scale = (this.full[1] - this.full[0]) / WIDTH;
      const [low, high] = this.range.map((x) => this.full[0] + x * scale), least = this.unit === "s"
        ? 0 : 1;
      const count = Math.min(MARKS, Math.max(2, Math.floor(this.area.clientWidth / 90)));
      const step = ROUND.find((v) => v >= (high - low) / count && v >= least);
      const below = this.plot.querySelector(".x");
      for (const mark of below.querySelectorAll("span")) mark.remove();
      for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12); i += 1) {
        const mark = element("span", {}, this.exact(i * step, step, high));
        const at = `${100 * (i * step - low) / (high - low)}%`;
        mark.style.cssText = `left: ${at}; --at: ${at}`;
        below.prepend(mark);
      }
    }
  }

  const all = [];
  window.addEventListener("beforeprint", () => all.forEach((one) => one.draw([0, WIDTH])));
  const upgrade = (figure, unit) => {
    all.push(new Bands(figure, unit));
    if (unit !== "s") plots.link(all.at(-1));
  };
  return { upgrade, all };
})();
