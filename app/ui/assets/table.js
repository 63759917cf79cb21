// A table of rows that open something. Rows and cells are kept by id from one update to the next, so that focus,
// hover and scroll position survive a refresh. Times are shown in the zone of the browser.
const RELATIVE = new Intl.RelativeTimeFormat(undefined, { numeric: "auto", style: "short" });
const STEPS = [["second", 60], ["minute", 60], ["hour", 24], ["day", 7], ["week", 5], ["month", 12], ["year", Infinity]];

function ago(time) {
  let amount = (time.getTime() - Date.now()) / 1000;
  for (const [unit, size] of STEPS) {
    if (Math.abs(amount) < size) return RELATIVE.format(Math.round(amount), unit);
    amount /= size;
  }
}

function element(tag, name, text) {
  const node = document.createElement(tag);
  node.className = name;
  node.textContent = text;
  return node;
}

function fill(cell, value, column, openable, label) {
  const inner = [];
  if (column.kind === "badge") {
    inner.push(element("span", `badge ${value.tone}`, value.text));
  } else if (column.kind === "time" && value.text) {
    const time = new Date(value.text);
    inner.push(element("span", "", ago(time)));
    cell.title = time.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
  } else if (openable) {
    const button = element("button", "open", value.text);
    button.type = "button";
    button.setAttribute("aria-label", `Open ${label}`);
    inner.push(button);
  } else {
    inner.push(element("span", "", value.text));
  }
  if (value.share !== null) {
    const bar = element("span", "bar", "");
    bar.appendChild(element("i", "", "")).style.width = `${Math.max(0, Math.min(1, value.share)) * 100}%`;
    inner.push(bar);
  }
  if (value.note) inner.push(element("span", "note", value.note));
  cell.replaceChildren(...inner);
}

export default function ({ parentElement, data, setTriggerValue }) {
  const root = parentElement.querySelector("[data-table]");
  const classes = (column) => [`kind-${column.kind}`, column.end ? "end" : "", column.wide ? "wide" : ""].join(" ").trim();
  const layout = JSON.stringify(data.columns);
  if (root.dataset.layout !== layout) {
    const head = document.createElement("tr");
    for (const column of data.columns) head.append(element("th", classes(column), column.label));
    const table = document.createElement("table");
    table.append(document.createElement("thead"), document.createElement("tbody"));
    table.tHead.append(head);
    root.replaceChildren(table);
    root.dataset.layout = layout;
  }
  const body = root.querySelector("tbody");
  const known = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  data.rows.forEach((row, index) => {
    let line = known.get(row.id);
    if (!line) {
      line = document.createElement("tr");
      line.dataset.id = row.id;
      for (const column of data.columns) line.insertCell().className = classes(column);
    }
    known.delete(row.id);
    line.className = `${data.openable ? "openable" : ""} ${row.id === data.selected ? "selected" : ""}`.trim();
    data.columns.forEach((column, at) => {
      const cell = line.cells[at];
      const shown = JSON.stringify(row.cells[at]);
      if (cell.dataset.shown !== shown || column.kind === "time") {
        fill(cell, row.cells[at], column, data.openable && at === 0, row.cells[0].text);
        cell.dataset.shown = shown;
      }
    });
    if (body.rows[index] !== line) body.insertBefore(line, body.rows[index] ?? null);
  });
  for (const line of known.values()) line.remove();
  root.onclick = (event) => {
    const line = event.target.closest("tbody tr");
    if (data.openable && line && !String(getSelection())) setTriggerValue("open", line.dataset.id);
  };
}
