// Makes plots of the drawings of curves; shows the values of heat maps under the pointer, a finger,
// or (with the arrow keys) the keyboard; saves plots as PNG files. The page is complete without it.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const { show, nearest } = numbers;
  const heatMap = (plot, data) => {
    const area = plot.querySelector(".area"), steps = data.steps;
    const cursor = document.createElement("div"), tip = document.createElement("div");
    cursor.className = "cursor"; tip.className = "tip";
    tip.setAttribute("role", "status");
    cursor.hidden = tip.hidden = true;
    area.append(cursor, tip);
    plot.tabIndex = 0;
    let column = steps.length - 1, row = 0;

    const draw = (top) => {
      const share = (column + 0.5) / steps.length;
      cursor.hidden = tip.hidden = false;
      cursor.style.left = `${100 * share}%`;
      tip.textContent = `step ${steps[column].toLocaleString("en")}\n`
        + `${data.row} ${data.rows[row]}: ${show(data.values[row][column])}`;
      tip.style.top = `${top}px`;
      tip.style.left = share < 0.5 ? `calc(${100 * share}% + 10px)` : "";
      tip.style.right = share < 0.5 ? "" : `calc(${100 * (1 - share)}% + 10px)`;
    };
    const point = (event) => {
      const box = area.getBoundingClientRect();
      const across = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 0.9999);
      const down = Math.min(Math.max((event.clientY - box.top) / box.height, 0), 0.9999);
      column = Math.floor(across * steps.length);
      row = Math.floor(down * data.rows.length);
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
      if (!move) return;
      event.preventDefault();
      column = Math.min(Math.max(column + move[0], 0), steps.length - 1);
      row = Math.min(Math.max(row + move[1], 0), data.rows.length - 1);
      draw(4);
    });
  };

  for (const [id, data] of Object.entries(figures)) {
    const figure = document.getElementById(id);
    if (data.kind === "heat") heatMap(figure.querySelector(".plot"), data);
    else if (data.kind === "bands") bands.upgrade(figure, data.unit);
    else plots.upgrade(figure, data);
  }
  // a finding shows the steps that it is about, with some around them
  for (const link of document.querySelectorAll("#findings a[data-begin]")) {
    link.addEventListener("click", () => {
      const plot = [...plots.all, ...bands.all].find((one) => `#${one.figure.id}` === link.hash);
      const { begin, end } = link.dataset, around = 5 + 0.2 * (end - begin);
      if (plot?.within) plot.show([begin - around, Number(end) + around]);
    });
  }
  const help = document.getElementById("help");
  if (help) help.hidden = !plots.all.length && !bands.all.length;

  // The browser draws the figure's own HTML into an image; the space of the name of SVG is read
  // from a figure, as the page names no address.
  const save = async (figure) => {
    const space = figure.querySelector("svg").namespaceURI;
    const { width } = figure.getBoundingClientRect();
    const copy = figure.cloneNode(true), style = document.querySelector("style").cloneNode(true);
    const drawn = figure.querySelector("canvas"), same = copy.querySelector("canvas");
    if (drawn) {  // a copy of a canvas is empty
      const picture = new Image();
      picture.src = drawn.toDataURL("image/png");
      picture.style.cssText = "display: block; width: 100%; height: 100%";
      same.replaceWith(picture);
    }
    for (const extra of copy.querySelectorAll("details, .tools, .save, .cursor, .tip")) {
      extra.remove();
    }
    if (figures[figure.id]?.kind === "heat") {
      copy.append(document.querySelector(".scale").cloneNode(true));
    }
    const measure = document.createElement("div");
    measure.style.cssText = `position: absolute; visibility: hidden; width: ${width}px`;
    measure.append(copy);
    document.body.append(measure);
    const { height } = copy.getBoundingClientRect();
    measure.remove();
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
    button.type = "button";
    button.textContent = "PNG";
    button.title = "Save this plot as a PNG file";
    button.addEventListener("click", () => save(figure));
    figure.querySelector("figcaption").prepend(button);
  }
  document.documentElement.dataset.ready = String(Object.keys(figures).length);
})();
