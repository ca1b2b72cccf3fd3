// Rows in the order of the column whose name was pressed: upwards first, then downwards.
"use strict";
for (const table of document.querySelectorAll("table.rows")) {
  const heads = [...table.querySelectorAll("thead th")];
  const body = table.tBodies[0];
  heads.forEach((head, column) => {
    const compare = (a, b) => {
      const [one, other] = [a.cells[column], b.cells[column]];
      if (!head.classList.contains("number")) {
        return one.textContent.localeCompare(other.textContent, "en", { numeric: true });
      }
      // what has no number stands last, whatever the direction
      const keys = [one, other].map((cell) => ("key" in cell.dataset ? Number(cell.dataset.key) : NaN));
      if (keys.some(Number.isNaN)) return (Number.isNaN(keys[0]) - Number.isNaN(keys[1])) * sign;
      return keys[0] - keys[1];
    };
    let sign = 1;
    head.querySelector("button").addEventListener("click", () => {
      sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      body.append(...[...body.rows].sort((a, b) => sign * compare(a, b)));
    });
  });
}
