// The report's script: fills, filters and sorts the list of parameters, and reads the timeline out.
// Names come as JSON and go into the page as text; evidence comes as HTML that was escaped when it
// was written. Without this script the rest of the page still stands.
"use strict";

const data = (id) => JSON.parse(document.getElementById(id).textContent);
const COLUMN = { status: 0, name: 1, kind: 2, since: 3, checks: 4, confidence: 8, evidence: 9, code: 10, reason: 11 };
const CELLS = 9;
const PAGE = 100;
const LABELS = ["Status", "Parameter", "Kind", "Since", "Checks", "Ratio", "Max abs", "Max rel", "Confidence"];

function short(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
}

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  if (className) element.className = className;
  return element;
}

// ------------------------------------------------------------------------------ parameters

function parameters() {
  const rows = data("parameter-data");
  rows.forEach((row, index) => {
    row.at = index; // the order of the report, which a third click on a column returns to
    row.text = [row[COLUMN.status], row[COLUMN.name], row[COLUMN.kind], row[COLUMN.code]].join(" ").toLowerCase();
  });
  const body = document.querySelector("#list tbody");
  const heads = [...document.querySelectorAll("#list th")];
  const filter = document.getElementById("filter");
  const more = document.getElementById("more");
  const count = document.getElementById("shown");
  const sorting = { column: -1, down: false };
  let matching = rows;
  let shown = 0;

  function status() {
    return document.querySelector("input[name=status]:checked").value;
  }

  function compare(a, b) {
    let [x, y] = [a[sorting.column], b[sorting.column]];
    if (x === y) return a.at - b.at;
    if (x === null || y === null) return x === null ? 1 : -1; // what has no value comes last, both ways
    if (x === "inf") x = Infinity;
    if (y === "inf") y = Infinity;
    const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return (sorting.down ? -order : order) || a.at - b.at;
  }

  function update() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = status();
    matching = rows.filter(
      (row) => (wanted === "all" || row[COLUMN.status] === wanted) && words.every((word) => row.text.includes(word)),
    );
    if (sorting.column >= 0) matching.sort(compare);
    body.replaceChildren();
    shown = 0;
    extend();
  }

  function extend() {
    const piece = document.createDocumentFragment();
    for (const row of matching.slice(shown, shown + PAGE)) piece.append(line(row));
    shown = Math.min(shown + PAGE, matching.length);
    body.append(piece);
    more.hidden = shown >= matching.length;
    count.textContent = matching.length
      ? `${shown.toLocaleString("en")} of ${matching.length.toLocaleString("en")} shown`
      : "Nothing matches this filter.";
  }

  function line(row) {
    const tr = make("tr", "", row[COLUMN.status].replaceAll(" ", "-"));
    const found = Boolean(row[COLUMN.evidence]);
    for (let column = 0; column < (found ? CELLS : COLUMN.kind); column += 1) {
      const td = make("td");
      td.dataset.label = LABELS[column];
      if (column === COLUMN.name) fillName(td, tr, row);
      else if (column === COLUMN.status) td.append(make("span", row[column], "status"));
      else td.textContent = column === COLUMN.confidence ? row[column].toFixed(2) : short(row[column]);
      if (column > COLUMN.kind) td.classList.add("n");
      if (!found && column === COLUMN.name) td.colSpan = CELLS - COLUMN.name;
      tr.append(td);
    }
    return tr;
  }

  function fillName(td, tr, row) {
    const name = make("code");
    row[COLUMN.name].split(".").forEach((part, index) => {
      if (index) name.append(".", make("wbr"));
      name.append(part);
    });
    if (!row[COLUMN.evidence]) {
      td.append(name);
      if (row[COLUMN.reason]) td.append(make("span", row[COLUMN.reason], "reason muted"));
      return;
    }
    const button = make("button");
    button.type = "button";
    button.setAttribute("aria-expanded", "false");
    button.append(name);
    button.addEventListener("click", () => toggle(button, tr, row));
    td.append(button);
  }

  function toggle(button, tr, row) {
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    if (open) {
      tr.nextElementSibling.remove();
      return;
    }
    const detail = make("tr", "", "detail");
    const td = make("td");
    td.colSpan = CELLS;
    td.innerHTML = row[COLUMN.evidence];
    detail.append(td);
    tr.after(detail);
  }

  function sortBy(column) {
    if (sorting.column !== column) Object.assign(sorting, { column, down: column > COLUMN.since });
    else if (sorting.down === column > COLUMN.since) sorting.down = !sorting.down;
    else sorting.column = -1;
    heads.forEach((head, index) => {
      const direction = sorting.down ? "descending" : "ascending";
      head.setAttribute("aria-sort", index === sorting.column ? direction : "none");
    });
    update();
  }

  function ask(query, wanted) {
    filter.value = query;
    document.querySelector(`input[name=status][value=${CSS.escape(wanted)}]`).checked = true;
    update();
    document.getElementById("parameters").scrollIntoView();
    filter.focus({ preventScroll: true });
  }

  filter.addEventListener("input", update);
  document.querySelectorAll("input[name=status]").forEach((choice) => choice.addEventListener("change", update));
  document.querySelectorAll("[data-query]").forEach((button) =>
    button.addEventListener("click", () => ask(button.dataset.query, button.dataset.status)),
  );
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => sortBy(column)));
  more.addEventListener("click", extend);
  new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && !more.hidden && extend(), {
    rootMargin: "400px",
  }).observe(more);
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) && event.target.type !== "radio";
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      document.getElementById("parameters").scrollIntoView();
      filter.focus({ preventScroll: true });
    } else if (event.key === "Escape" && event.target === filter) {
      if (filter.value) {
        filter.value = "";
        update();
      } else filter.blur();
    }
  });
  update();
}

// -------------------------------------------------------------------------------- timeline

function timeline() {
  const area = document.querySelector(".timeline");
  if (!area) return;
  const steps = data("timeline-data");
  const readout = area.querySelector(".readout");
  const first = steps[0][0];
  const last = steps.at(-1)[0];
  const cursors = [...area.querySelectorAll("svg.lines")].map((drawing) => {
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cursor.setAttribute("class", "cursor");
    drawing.append(cursor);
    return cursor;
  });
  const hint = "Point at the chart, or use the arrow keys, to read a step.";
  let at = steps.length - 1;

  function show(index) {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const [step, values, gradients, abs, rel] = steps[at].map((value) => (value === null ? "not measured" : value));
    const x = last > first ? (1000 * (step - first)) / (last - first) : 500;
    cursors.forEach((cursor) => cursor.setAttribute("d", `M${x} 0V100`));
    readout.textContent =
      `Step ${step}: ${values} values and ${gradients} reduced gradients differ; ` +
      `max abs ${short(abs)}, max rel ${short(rel)}`;
  }

  function clear() {
    cursors.forEach((cursor) => cursor.removeAttribute("d"));
    readout.textContent = hint;
  }

  area.addEventListener("pointermove", (event) => {
    const drawing = event.target.closest("svg.lines");
    if (!drawing) return;
    const box = drawing.getBoundingClientRect();
    const step = first + ((event.clientX - box.left) / box.width) * (last - first);
    show(steps.reduce((best, row, i) => (Math.abs(row[0] - step) < Math.abs(steps[best][0] - step) ? i : best), 0));
  });
  area.addEventListener("pointerleave", clear);
  area.addEventListener("blur", clear);
  area.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Escape") clear();
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
  clear();
}

// ---------------------------------------------------------------------------------- print

function printing() {
  let opened = [];
  window.addEventListener("beforeprint", () => {
    // Lists of names only: evidence is printed if it was opened, or it would fill pages.
    opened = [...document.querySelectorAll("details:not([open])")].filter((one) => one.querySelector(".names"));
    opened.forEach((one) => (one.open = true));
  });
  window.addEventListener("afterprint", () => opened.forEach((one) => (one.open = false)));
}

document.documentElement.classList.add("js");
parameters();
timeline();
printing();
document.documentElement.dataset.readyMs = performance.now().toFixed(0);
