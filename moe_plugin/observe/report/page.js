// Shows the values under the pointer, a finger, or (with the arrow keys) the keyboard, and saves
// plots as PNG files.
// The page is complete without it.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const percent = (v) => `${Number((100 * v).toPrecision(4))} %`;
  const bytes = (v) => {
    const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(Math.abs(v), 1)) / 3)));
    return `${Number((v / 1000 ** power).toPrecision(3))} ${["", "k", "M", "G", "T"][power]}B`;
  };
  const show = (v, unit) => {
    if (v === null || v === undefined) return "–";
    if (unit === "%") return percent(v);
    if (unit === "B") return bytes(v);
    if (unit === "ms") return `${Number(v.toPrecision(3))} ms`;
    return unit === "count" ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(5)));
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  for (const plot of document.querySelectorAll(".plot[data-figure]")) {
    const data = figures[plot.dataset.figure], area = plot.querySelector(".area");
    const cursor = document.createElement("div"), tip = document.createElement("div");
    cursor.className = "cursor"; tip.className = "tip";
    tip.setAttribute("role", "status");
    cursor.hidden = tip.hidden = true;
    area.append(cursor, tip);
    const drawn = data.kind === "heat" ? [] : data.lines.filter((l) => !l.dashed);
    const steps = data.kind === "heat" ? data.steps
      : [...new Set(drawn.flatMap((l) => l.x))].sort((a, b) => a - b);
    const begin = Number(plot.dataset.begin), size = Number(plot.dataset.end) - begin || 1;
    let column = steps.length - 1, row = 0;

    const words = () => data.kind === "heat"
      ? `step ${steps[column].toLocaleString("en")}\n`
        + `${data.row} ${data.rows[row]}: ${show(data.values[row][column])}`
      : [`step ${steps[column].toLocaleString("en")}`, ...data.lines.map((l) => {
          const at = l.x.length ? nearest(l.x, steps[column]) : -1;
          const near = l.dashed || Math.abs(l.x[at] - steps[column]) < 1e-9;
          return at < 0 || !near ? null : `${l.name}: ${show(l.y[at], data.unit)}`;
        }).filter(Boolean)].join("\n");
    const draw = (top) => {
      const share = data.kind === "heat" ? (column + 0.5) / steps.length
        : (steps[column] - begin) / size;
      cursor.hidden = tip.hidden = false;
      cursor.style.left = `${100 * share}%`;
      tip.textContent = words();
      tip.style.top = `${top}px`;
      tip.style.left = share < 0.5 ? `calc(${100 * share}% + 10px)` : "";
      tip.style.right = share < 0.5 ? "" : `calc(${100 * (1 - share)}% + 10px)`;
    };
    const point = (event) => {
      const box = area.getBoundingClientRect();
      const across = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 0.9999);
      const down = Math.min(Math.max((event.clientY - box.top) / box.height, 0), 0.9999);
      if (data.kind === "heat") {
        column = Math.floor(across * steps.length);
        row = Math.floor(down * data.rows.length);
      }
      else column = nearest(steps, begin + across * size);
      draw(Math.min(down * box.height, box.height - 30));
    };
    const hide = () => { cursor.hidden = tip.hidden = true; };
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerdown", point);
    area.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const moves = {
        ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
      };
      const move = moves[event.key];
      if (event.key === "Escape") hide();
      if (!move || (move[1] && data.kind !== "heat")) return;
      event.preventDefault();
      column = Math.min(Math.max(column + move[0], 0), steps.length - 1);
      row = data.kind === "heat" ? Math.min(Math.max(row + move[1], 0), data.rows.length - 1) : 0;
      draw(4);
    });
  }

  // The browser draws the figure's own HTML into an image; the space of the name of SVG is read
  // from a figure, as the page names no address.
  const save = async (figure) => {
    const space = figure.querySelector("svg").namespaceURI;
    const { width, height } = figure.getBoundingClientRect();
    const copy = figure.cloneNode(true), style = document.querySelector("style").cloneNode(true);
    for (const extra of copy.querySelectorAll("details, button, .cursor, .tip")) extra.remove();
    const body = document.createElement("body");
    body.style.cssText = "padding: 0; max-width: none";
    body.append(style, copy);
    const svg = document.createElementNS(space, "svg");
    const frame = document.createElementNS(space, "foreignObject");
    for (const [name, value] of Object.entries({ width, height })) {
      svg.setAttribute(name, value);
      frame.setAttribute(name, value);
    }
    frame.append(body);
    svg.append(frame);
    const image = new Image();
    const canvas = document.createElement("canvas"), link = document.createElement("a");
    const text = new XMLSerializer().serializeToString(svg);
    image.src = "data:image/svg+xml," + encodeURIComponent(text);
    await image.decode();
    canvas.width = 2 * width; canvas.height = 2 * height;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    link.href = canvas.toDataURL("image/png");
    link.download = `${figure.id}.png`;
    link.click();
  };
  for (const area of document.querySelectorAll(".area")) {
    const figure = area.closest("figure"), button = document.createElement("button");
    button.className = "save";
    button.textContent = "PNG";
    button.title = "Save this plot as a PNG file";
    button.addEventListener("click", () => save(figure));
    figure.querySelector("figcaption").prepend(button);
  }
  document.documentElement.dataset.ready = String(Object.keys(figures).length);
})();
