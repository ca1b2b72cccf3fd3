// The values of a chart under the pointer, under a finger, or where the arrow keys lead.
"use strict";
for (const chart of document.querySelectorAll("figure.chart")) {
  const plot = chart.querySelector("svg.plot");
  const rows = JSON.parse(chart.querySelector("script").textContent);
  const values = [...chart.querySelectorAll(".legend output")];
  const told = chart.querySelector(".readout span");
  const [hint, label] = [told.textContent, told.dataset.label];
  const layer = plot.appendChild(document.createElementNS(plot.namespaceURI, "g"));
  if (!rows.length) continue;
  let current = null;

  const make = (name, attributes) => {
    const node = layer.appendChild(document.createElementNS(plot.namespaceURI, name));
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  };
  const show = (number) => {
    current = number;
    const [x, words, cells] = rows[number];
    const axis = plot.querySelector(".axis").getAttribute("d").match(/ ([\d.]+)V([\d.]+)/);
    layer.replaceChildren();
    make("path", { class: "cursor", d: `M${x} ${axis[1]}V${axis[2]}` });
    cells.forEach((cell, i) => {
      values[i].textContent = cell ? cell[1] : "";
      if (cell) make("circle", { class: "here", cx: x, cy: cell[0], r: 3 });
    });
    told.textContent = `${label}: ${words}`;
    told.classList.add("told");
  };
  const hide = () => {
    current = null;
    layer.replaceChildren();
    for (const value of values) value.textContent = "";
    told.textContent = hint;
    told.classList.remove("told");
  };
  const nearest = (event) => {
    const box = plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * plot.viewBox.baseVal.width;
    let [low, high] = [0, rows.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((rows[middle][0] + rows[middle + 1][0]) / 2 < x) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  plot.addEventListener("pointermove", (event) => show(nearest(event)));
  plot.addEventListener("pointerdown", (event) => show(nearest(event)));
  plot.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") hide();
  });
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const last = rows.length - 1;
    const from = current ?? (event.key === "ArrowLeft" ? last + 1 : -1);
    const to = {
      ArrowLeft: Math.max(0, from - 1), ArrowRight: Math.min(last, from + 1), Home: 0, End: last,
    }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined) return;
    show(to);
    event.preventDefault();
  });
}
