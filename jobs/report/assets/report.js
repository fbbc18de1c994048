// The report: draws the charts from the numbers in the page, and sorts a table by the column that is clicked.

import { Chart, sparkline } from "./chart.js";

// The report has no time axis, so its points are [step, mean, low, high].
const withoutTime = ([step, mean, low, high]) => [step, 0, mean, low, high];

const isLog = document.getElementById("logarithmic");
const charts = [];
const draw = () => { for (const [chart, lines] of charts) chart.draw(lines, { isTime: false, isLog: isLog.checked }); };

for (const place of document.querySelectorAll("[data-lines]")) {
  const lines = JSON.parse(place.dataset.lines).map(([label, colour, points]) => ({ label, colour, points: points.map(withoutTime) }));
  const chart = new Chart(place.dataset.title);
  charts.push([chart, lines]);
  place.replaceChildren(chart.node);
}
draw();
isLog.addEventListener("change", draw);

for (const place of document.querySelectorAll("[data-spark]"))
  place.replaceChildren(sparkline(place.dataset.title, JSON.parse(place.dataset.spark)));

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0];
    const at = head.cellIndex, down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => row.cells[at].dataset.value ?? row.cells[at].textContent;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return down ? -order : order;
    };
    body.append(...[...body.rows].sort(compare));
  });
}
