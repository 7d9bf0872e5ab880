// Curves as plots that zoom, by uPlot. Each takes the place of a drawing of the page, which stays
// for paper and for readers without scripts.
"use strict";
const plots = (() => {
  const { show, nearest } = numbers;
  const WINDOWS = [1, 5, 15, 51];  // points of which smoothing shows the mean
  const ROUND = [1, 2, 5].flatMap((f) => Array.from({ length: 28 }, (_, i) => f * 10 ** (i - 12)))
    .sort((a, b) => a - b);
  const BYTES = [0, 10, 20, 30].flatMap((power) =>
    [1, 2, 5, 10, 20, 50, 100, 200, 500].map((f) => f * 2 ** power));
  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
  const NEAR = 0.03;  // share of the width within which a single mark is under the cursor

  const element = (name, attributes = {}, text = "") => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  };
  // mean of the known values of `size` points around each known one; of fewer near the ends, as
  // many on each side
  const smoothed = (values, size) => values.map((value, i) => {
    if (value === null) return null;
    const half = Math.min(size >> 1, i, values.length - 1 - i);
    const part = values.slice(i - half, i + half + 1).filter((v) => v !== null);
    return part.reduce((sum, v) => sum + v, 0) / part.length;
  });
  // marks of a logarithmic axis: 1, 2 and 5 of every power of ten, or powers alone, or round
  // numbers where the axis covers less than that
  const logMarks = (low, high) => {
    const inside = ROUND.filter((v) => v >= low && v <= high);
    if (inside.length > 7) return inside.filter((v) => Number.isInteger(Math.log10(v)));
    if (inside.length > 2) return inside;
    const step = ROUND.find((v) => v >= (high - low) / 5), first = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) =>
      Number(((first + i) * step).toPrecision(12)));
  };
  // arrow keys move between the buttons of a bar, which is one stop of the Tab key
  const oneStop = (bar) => {
    const buttons = [...bar.querySelectorAll("button")];
    buttons.forEach((button, i) => { button.tabIndex = i ? -1 : 0; });
    bar.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const at = buttons.indexOf(event.target);
      if (!move || at < 0) return;
      event.preventDefault();
      const next = buttons[(at + move + buttons.length) % buttons.length];
      buttons.forEach((button) => { button.tabIndex = button === next ? 0 : -1; });
      next.focus();
    });
  };

  class Plot {
    constructor(figure, data) {
      const drawing = figure.querySelector(".plot");
      this.figure = figure;
      this.data = data;
      this.full = [Number(drawing.dataset.begin), Number(drawing.dataset.end)];
      this.range = this.full;
      this.log = false;
      this.smoothing = 0;
      this.hidden = new Set();
      this.owns = false;  // whether the pointer or the keyboard is here
      this.marked = null;  // the step of the cursor of another plot
      this.box = element("div", {
        class: "live", tabindex: "0", role: "application", "aria-roledescription": "line plot",
        "aria-labelledby": `${figure.id}-title`, "aria-describedby": `${figure.id}-text keys`,
      });
      this.tip = element("div", { class: "tip", role: "status" });
      this.tip.hidden = true;
      this.steps = [...new Set(data.lines.flatMap((l) => l.dashed ? [] : l.x))]
        .sort((a, b) => a - b);
      this.at = this.steps.length - 1;
      this.bar = this.toolbar();
      drawing.before(this.bar, this.box);
      figure.classList.add("upgraded");
      this.legend();
      this.build();
      this.box.addEventListener("keydown", (event) => this.key(event));
      this.box.addEventListener("blur", () => this.hide());
      new ResizeObserver(() => this.resize()).observe(this.box);
    }

    toolbar() {
      const bar = element("div", { class: "tools", role: "toolbar",
        "aria-label": `Tools of ${this.data.title}` });
      const add = (name, key, label, action) => {
        const button = element("button", { type: "button", "aria-keyshortcuts": key,
          title: `${label} (${key})` }, name);
        button.addEventListener("click", action);
        bar.append(button);
        return button;
      };
      this.logButton = add("Log", "l", "Logarithmic scale", () => this.toggleLog());
      this.smoothButton = add("Smooth: off", "s", "Mean of neighbouring points",
        () => this.smooth());
      add("+", "+", "Zoom in", () => this.zoom(0.5)).setAttribute("aria-label", "Zoom in");
      add("−", "-", "Zoom out", () => this.zoom(2)).setAttribute("aria-label", "Zoom out");
      add("Reset", "0", "The whole run", () => this.reset());
      oneStop(bar);
      return bar;
    }

    legend() {
      const list = this.figure.querySelector(".legend");
      if (!list) return;
      list.setAttribute("aria-label", "Curves; press to hide or show");
      [...list.children].forEach((item, i) => {
        const button = element("button", { type: "button", "aria-pressed": "true" });
        button.append(...item.childNodes);
        item.append(button);
        button.addEventListener("click", () => {
          if (!this.hidden.delete(i)) this.hidden.add(i);
          button.setAttribute("aria-pressed", String(!this.hidden.has(i)));
          this.build();
        });
      });
      oneStop(list);
    }

    // one series a curve; with smoothing one more for its points, pale
    series() {
      const series = [{}], tables = [], width = WINDOWS[this.smoothing];
      this.means = [];  // what smoothing shows of each curve
      const loggable = (ys) => this.log ? ys.map((y) => y > 0 ? y : null) : ys;
      this.data.lines.forEach((one, i) => {
        if (this.hidden.has(i)) return;
        const style = this.style(one, i), smooth = width > 1 && !one.dashed && !one.marks;
        if (smooth) {
          series.push({ ...style, width: 1, alpha: 0.35 });
          tables.push([one.x, loggable(one.y)]);
        }
        series.push(style);
        this.means[i] = smooth ? smoothed(one.means ?? one.y, width) : null;
        tables.push([one.x, loggable(this.means[i] ?? one.y)]);
      });
      const data = tables.length ? uPlot.join(tables) : [this.full];
      // a point between two gaps is no part of any line
      series.slice(1).forEach((style, i) => {
        const ys = tables[i][1], xs = tables[i][0];
        const known = (at) => ys[at] !== null && ys[at] !== undefined;
        const alone = xs.filter((_, at) => known(at) && !known(at - 1) && !known(at + 1));
        const places = alone.map((x) => data[0].indexOf(x));
        if (style.paths) return;
        style.points = { show: places.length > 0, filter: () => places, size: 6,
          fill: style.stroke };
      });
      return { series, data };
    }

    style(one, i) {
      const stroke = this.colour(one.dashed ? "ref" : `c${i % 8}`);
      const marks = { paths: () => null, points: { show: true, size: 7, fill: stroke } };
      return { label: one.name, stroke, width: one.dashed ? 1.5 : 2,
        ...(one.dashed ? { dash: [5, 5], points: { show: false }, paths: uPlot.paths.linear() }
          : one.marks ? marks : {}) };
    }

    colour(name, variable = "--c") {
      const probe = element("i", { class: name });
      this.box.append(probe);
      const found = getComputedStyle(probe).getPropertyValue(variable).trim();
      probe.remove();
      return found;
    }

    build() {
      const range = this.range, { series, data } = this.series();
      this.plot?.destroy();
      this.building = true;
      this.plot = new uPlot(this.options(series), data, this.box);
      this.plot.setScale("x", { min: range[0], max: range[1] });
      this.building = false;
      this.box.append(this.tip);
      this.plot.over.addEventListener("pointermove", (event) => {
        this.owns = true;
        if (event.pointerType === "touch") this.plot.setCursor({ left: event.offsetX, top: 10 });
      });
      this.state();
    }

    options(series) {
      const stroke = this.colour("", "--soft"), grid = { stroke: this.colour("", "--grid"),
        width: 1 };
      const axis = { stroke, grid, ticks: { ...grid, size: 4 }, font: FONT, labelFont: FONT };
      const whole = this.data.unit === "count" ? 1 : 0;
      const side = (plot, values, index) => {
        plot.ctx.font = FONT;
        const widths = (values ?? []).map((text) => plot.ctx.measureText(text).width);
        return Math.ceil(Math.max(24, ...widths)) + 14;
      };
      return {
        width: this.box.clientWidth, height: this.box.clientHeight, legend: { show: false },
        padding: [8, 18, 0, 0], series,
        scales: {
          x: { time: false, range: (_, low, high) => this.within(low, high) },
          y: { distr: this.log ? 3 : 1, range: (_, low, high) => this.height(low, high) },
        },
        axes: [
          { ...axis, size: 26, space: 76, incrs: ROUND.filter((v) => v >= 1), label: "step",
            labelSize: 18, values: (_, marks) => marks.map((v) => v.toLocaleString("en")) },
          { ...axis, size: side,
            incrs: this.data.unit === "B" ? BYTES : ROUND.filter((v) => v >= whole),
            values: (_, marks) => marks.map((v) => show(v, this.data.unit)),
            ...(this.log ? { splits: (_, __, low, high) => logMarks(low, high),
              filter: (_, marks) => marks } : {}) },
        ],
        cursor: {
          y: false, drag: { x: true, y: false, dist: 6 },
          bind: { dblclick: () => () => { this.reset(); return null; } },
        },
        hooks: {
          setCursor: [(plot) => this.point(plot)],
          setScale: [(plot, key) => { if (key === "x" && !this.building) this.zoomed(plot); }],
        },
      };
    }

    // a stretch of at least two steps inside the run
    within(low, high) {
      const [begin, end] = this.full, size = Math.min(Math.max(high - low, 2), end - begin);
      const first = Math.min(Math.max(low, begin), end - size);
      return [first, first + size];
    }

    // the vertical range of values from low to high
    height(low, high) {
      if (!Number.isFinite(low) || !Number.isFinite(high)) return this.log ? [1, 10] : [0, 1];
      const { floor, unit } = this.data;
      if (this.log) {
        const pad = (high / low) ** 0.06;
        return pad > 1.001 ? [low / pad, high * pad] : [low / 1.1, high * 1.1];
      }
      const base = floor !== null && !this.isZoomed ? Math.min(low, floor) : low;
      const least = floor === null ? 1e-9 : unit === "%" ? 0.01 : 1;
      const pad = 0.06 * (high - base) || Math.max(Math.abs(high) * 0.1, least);
      return [base === floor ? base : base - pad, high + pad];
    }

    get isZoomed() {
      return this.range[0] > this.full[0] || this.range[1] < this.full[1];
    }

    zoomed(plot) {
      this.range = [plot.scales.x.min, plot.scales.x.max];
      this.state();
      share(this, this.range);
      if (!this.owns && this.marked !== null) queueMicrotask(() => this.mark(this.marked));
    }

    // the stretch that another plot shows
    follow([low, high]) {
      const range = this.within(low, high);
      if (range[0] === this.range[0] && range[1] === this.range[1]) return;
      this.range = range;
      this.plot.setScale("x", { min: range[0], max: range[1] });
    }

    // what the buttons and attributes say
    state() {
      const positive = this.data.lines.some((one) => !one.dashed && one.y.some((y) => y > 0));
      this.logButton.setAttribute("aria-pressed", String(this.log));
      this.logButton.disabled = !positive;
      const size = WINDOWS[this.smoothing];
      this.smoothButton.textContent = size > 1 ? `Smooth: ${size} points` : "Smooth: off";
      this.smoothButton.setAttribute("aria-pressed", String(size > 1));
      Object.assign(this.box.dataset, { log: String(this.log), smooth: String(size),
        begin: String(this.range[0]), end: String(this.range[1]) });
    }

    toggleLog() {
      if (this.logButton.disabled) return;
      this.log = !this.log;
      this.build();
    }

    smooth() {
      this.smoothing = (this.smoothing + 1) % WINDOWS.length;
      this.build();
    }

    reset() { this.show(this.full); }

    zoom(factor) {
      const [low, high] = this.range, x = this.steps[this.at];
      const middle = !this.tip.hidden && x >= low && x <= high ? x : (low + high) / 2;
      this.show([middle + (low - middle) * factor, middle + (high - middle) * factor]);
    }

    show([low, high]) {
      this.range = this.within(low, high);  // before uPlot asks for the height
      this.plot.setScale("x", { min: this.range[0], max: this.range[1] });
      if (!this.tip.hidden) this.move(0);
    }

    // the cursor some points further; a stretch that it leaves follows it
    move(by) {
      this.at = Math.min(Math.max(this.at + by, 0), this.steps.length - 1);
      const x = this.steps[this.at], [low, high] = this.range;
      this.owns = true;
      if (by && (x < low || x > high)) {
        const shift = x < low ? x - low : x - high;
        this.range = this.within(low + shift, high + shift);
        this.plot.setScale("x", { min: this.range[0], max: this.range[1] });
      }
      // uPlot applies a scale after this turn of the loop
      queueMicrotask(() => this.plot.setCursor(
        { left: this.plot.valToPos(x, "x"), top: 10 }));
    }

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.box) return;
      const far = event.shiftKey ? 10 : 1, act = {
        ArrowLeft: () => this.move(-far), ArrowRight: () => this.move(far),
        PageUp: () => this.move(-10), PageDown: () => this.move(10),
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
        Home: () => this.reset(), 0: () => this.reset(), l: () => this.toggleLog(),
        s: () => this.smooth(), Escape: () => this.hide(),
      }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
      if (!act) return;
      event.preventDefault();
      act();
    }

    // the values under the cursor
    point(plot) {
      const { left, top } = plot.cursor;
      if (!this.owns) return;  // uPlot says it after a change of scale, too
      if (!(left >= 0)) {
        this.owns = false;
        this.tip.hidden = true;
        markOthers(this, null);
        return;
      }
      this.at = nearest(this.steps, plot.posToVal(left, "x"));
      markOthers(this, plot.posToVal(left, "x"));
      const x = this.steps[this.at], near = NEAR * (this.range[1] - this.range[0]);
      const words = this.data.lines.map((one, i) => {
        if (this.hidden.has(i) || !one.x.length) return null;
        const at = nearest(one.x, x), away = Math.abs(one.x[at] - x);
        const inside = !one.marks && x >= one.x[0] && x <= one.x.at(-1);
        if (!one.dashed && !inside && away > near) return null;
        const where = one.dashed || away < 1e-9 ? "" : ` (step ${one.x[at].toLocaleString("en")})`;
        const mean = this.means[i] ? `, mean ${show(this.means[i][at], this.data.unit)}` : "";
        return `${one.name}: ${show(one.y[at], this.data.unit)}${mean}${where}`;
      });
      this.tip.hidden = false;
      this.tip.textContent = [`step ${x.toLocaleString("en")}`, ...words.filter(Boolean)]
        .join("\n");
      const offset = plot.over.offsetLeft + left, width = this.box.clientWidth;
      const after = offset < width / 2;
      this.tip.style.left = after ? `${offset + 12}px` : "";
      this.tip.style.right = after ? "" : `${width - offset + 12}px`;
      this.tip.style.top = `${Math.max(0, Math.min(top, this.box.clientHeight - 60))}px`;
    }

    // the line of the cursor alone, where another plot has it; null: nowhere
    mark(x) {
      this.marked = x;
      this.owns = false;
      this.tip.hidden = true;
      const left = x === null ? -10 : this.plot.valToPos(x, "x");
      this.plot.setCursor({ left, top: left < 0 ? -10 : 10 }, false);
    }

    hide() {
      this.tip.hidden = true;
      this.plot.setCursor({ left: -10, top: -10 });
    }

    resize() {
      const { clientWidth: width, clientHeight: height } = this.box;
      if (width && (width !== this.plot.width || height !== this.plot.height)) {
        this.plot.setSize({ width, height });
      }
    }
  }

  const all = [], linked = [];
  const link = (one) => linked.push(one);
  // all that has steps below it shows the same stretch of them
  const share = (from, range) => linked.forEach((one) => { if (one !== from) one.follow(range); });
  const markOthers = (from, x) => all.forEach((one) => { if (one !== from) one.mark(x); });
  const upgrade = (figure, data) => { all.push(new Plot(figure, data)); link(all.at(-1)); };
  matchMedia("(prefers-color-scheme: dark)")
    .addEventListener("change", () => all.forEach((plot) => plot.build()));
  return { upgrade, all, link, share, element, oneStop, ROUND };
})();
