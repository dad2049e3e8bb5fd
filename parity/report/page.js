"use strict";
// Filters the cases and sorts every list by the column that is clicked. Without it the page shows everything.
(() => {
  const byId = (id) => document.getElementById(id);
  const list = byId("list");
  const controls = ["text", "outcome", "side", "op"].map(byId);
  const columns = (item) => item.matches("details") ? item.firstElementChild.children : item.children;
  const value = (item, column) => columns(item)[column].textContent.trim();
  const cases = Array.from(list.children, (item) => ({
    item,
    outcome: value(item, 0),
    op: item.querySelector("b").textContent,
    side: value(item, 2),
    text: item.textContent.toLowerCase(),
  }));

  const filter = () => {
    const [text, outcome, side, op] = controls.map((control) => control.value);
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const one of cases) {
      // A verdict has its symbol before it: "✗" alone is every one that failed.
      const fits = (!outcome || one.outcome[0] === outcome || one.outcome.slice(2) === outcome) &&
        (!side || one.side === side) && (!op || one.op === op) && words.every((word) => one.text.includes(word));
      one.item.hidden = !fits;
      shown += fits;
    }
    byId("shown").textContent = `${shown} of ${cases.length}`;
  };

  const compare = (a, b) => {
    const [x, y] = [a, b].map((text) => text === "∞" ? Infinity : parseFloat(text.replace("<", "")));
    if (isNaN(x) && isNaN(y)) return a.localeCompare(b, "en", { numeric: true });
    return isNaN(x) ? 1 : isNaN(y) ? -1 : x - y;
  };

  const sort = (button, siblings, body, column) => {
    const down = button.dataset.down === "false";
    for (const other of siblings) delete other.dataset.down;
    button.dataset.down = down;
    const rows = Array.from(body.children, (item) => [value(item, column), item]);
    // What has no value stays last, whichever way the others go.
    const missing = rows.filter(([text]) => text === "–");
    const known = rows.filter(([text]) => text !== "–").sort(([a], [b]) => down ? compare(b, a) : compare(a, b));
    body.append(...[...known, ...missing].map(([, item]) => item));
  };

  const sortable = (buttons, body, columnOf) => {
    for (const button of buttons) {
      button.disabled = false;
      button.title = "Sort";
      button.addEventListener("click", () => sort(button, buttons, body, columnOf(button)));
    }
  };
  const heads = Array.from(byId("head").children);
  sortable(heads, list, (button) => heads.indexOf(button));
  for (const table of document.querySelectorAll("table.sortable")) {
    const buttons = Array.from(table.querySelectorAll("thead button"));
    sortable(buttons, table.tBodies[0], (button) => button.parentElement.cellIndex);
  }

  // A link to a case opens it, and shows it though the filter hides it.
  const open = () => {
    const target = byId(decodeURIComponent(location.hash.slice(1)));
    if (target && target.matches("details")) {
      target.hidden = false;
      target.open = true;
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", open);
  for (const control of controls) control.addEventListener("input", filter);
  byId("filter").addEventListener("submit", (event) => event.preventDefault());
  byId("filter").hidden = false;
  filter();
  open();
})();
