// A strip of figures. Elements are kept from one update to the next; only text and widths change.
function child(parent, index, tag, name) {
  let node = parent.children[index];
  if (!node) {
    node = parent.appendChild(document.createElement(tag));
  }
  if (node.className !== name) node.className = name;
  return node;
}

function put(node, text) {
  if (node.firstChild?.nodeValue !== text || node.childNodes.length > 1) node.textContent = text;
}

function trim(parent, count) {
  while (parent.children.length > count) parent.lastElementChild.remove();
}

export default function ({ parentElement, data }) {
  const root = parentElement.querySelector("[data-tiles]");
  for (const [name, colour] of Object.entries(data.colours)) root.style.setProperty(`--${name}`, colour);
  root.style.setProperty("--columns", data.columns);
  data.tiles.forEach((tile, index) => {
    const box = child(root, index, "div", `tile ${tile.tone}`);
    box.title = tile.help;
    put(child(box, 0, "div", "label"), tile.label);
    const figure = child(box, 1, "div", "figure");
    put(child(figure, 0, "span", "value"), tile.value);
    put(child(figure, 1, "span", "unit"), tile.unit);
    put(child(box, 2, "div", "note"), tile.note);
    if (tile.bar.length) {
      const bar = child(box, 3, "div", "bar");
      tile.bar.forEach((part, at) => {
        child(bar, at, "i", part.tone).style.width = `${Math.max(0, Math.min(1, part.share)) * 100}%`;
      });
      trim(bar, tile.bar.length);
    } else {
      trim(box, 3);
    }
  });
  trim(root, data.tiles.length);
}
