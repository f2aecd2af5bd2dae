"use strict";

// Sort a table by the column whose header was pressed; pressed again, the other way round. Empty cells stay at the end.
function sortBy(header) {
  const table = header.closest("table");
  const body = table.tBodies[0];
  const up = header.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = (row) => row.cells[header.cellIndex].dataset.value;
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = header.dataset.kind === "number" ? x - y : x.localeCompare(y);
    return up ? order : -order;
  };
  body.append(...[...body.rows].sort(compare));
}

// The figures of a section: an arm is shown, hidden, or lit while the pointer is on its name.
function wire(section) {
  const parts = (number) => section.querySelectorAll(`.figures [data-arm="${number}"]`);
  const light = (number, on) => {
    for (const figure of section.querySelectorAll(".figures svg")) figure.classList.toggle("muted", on);
    for (const part of parts(number)) part.classList.toggle("lit", on);
  };
  for (const button of section.querySelectorAll(".key button")) {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      for (const part of parts(button.dataset.of)) part.classList.toggle("off", !shown);
    });
  }
  for (const named of section.querySelectorAll(".key button, tbody tr")) {
    named.addEventListener("pointerenter", () => light(named.dataset.of, true));
    named.addEventListener("pointerleave", () => light(named.dataset.of, false));
  }
  for (const header of section.querySelectorAll("thead th")) {
    header.querySelector("button").addEventListener("click", () => sortBy(header));
  }
}

document.querySelectorAll("main > section").forEach(wire);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((closed) => (closed.open = true)));
