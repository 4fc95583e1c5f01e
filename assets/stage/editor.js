/* The static tree's editor: a picture of the rank paths in a text box, and clicks that edit them.
   The text box is the one truth; the picture follows whatever is typed there. */
function mountEditor(root, box) {
  "use strict";
  const NS = "http://www.w3.org/2000/svg", COLUMN = 74, ROW = 26;
  // the reference's 25 nodes, drawn faintly while the box is empty
  const REFERENCE = [[0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]];
  const order = (a, b) => {
    if (a.length !== b.length) return a.length - b.length;
    const i = a.findIndex((x, j) => x !== b[j]);
    return i < 0 ? 0 : a[i] - b[i];
  };
  function read() {
    const text = box()?.value.trim();
    if (!text) return { paths: REFERENCE.map((p) => p.slice()), own: false };
    try {
      const paths = JSON.parse(text);
      if (!Array.isArray(paths) || !paths.every((p) => Array.isArray(p) && p.length && p.every((r) => Number.isInteger(r) && r >= 0 && r < 64))) return null;
      return { paths, own: true };
    } catch { return null; } // half-typed text: the picture waits
  }
  function write(paths) {
    const area = box();
    area.value = JSON.stringify(paths.sort(order));
    area.dispatchEvent(new Event("input", { bubbles: true }));
    draw();
  }
  const below = (a, p) => a.length >= p.length && p.every((x, i) => x === a[i]);
  function edit(path, remove) {
    const now = read();
    if (!now) return;
    if (remove) { if (path.length) write(now.paths.filter((q) => !below(q, path))); return; }
    const taken = new Set(now.paths.filter((q) => q.length === path.length + 1 && below(q, path)).map((q) => q.at(-1)));
    let rank = 0;
    while (taken.has(rank)) rank++;
    if (now.paths.length < 255 && rank < 64) write([...now.paths, [...path, rank]]);
  }
  function draw() {
    const now = read();
    if (!now) return;
    const focus = document.activeElement?.dataset?.path, nodes = [[], ...now.paths.slice().sort(order)], at = new Map();
    let row = 0;
    const place = (path) => {
      const kids = nodes.filter((q) => q.length === path.length + 1 && below(q, path)).sort((a, b) => a.at(-1) - b.at(-1));
      const ys = kids.map(place);
      const y = ys.length ? (ys[0] + ys.at(-1)) / 2 : ROW * row++ + ROW / 2;
      at.set(path.join(), [22 + path.length * COLUMN, y]);
      return y;
    };
    place([]);
    const deepest = Math.max(...nodes.map((p) => p.length)), svg = document.createElementNS(NS, "svg");
    svg.setAttribute("width", 60 + deepest * COLUMN); svg.setAttribute("height", Math.max(1, row) * ROW);
    svg.classList.toggle("faint", !now.own);
    const make = (tag, facts, parent = svg) => { const n = document.createElementNS(NS, tag); for (const [k, v] of Object.entries(facts)) n.setAttribute(k, v); parent.append(n); return n; };
    for (const p of nodes) if (p.length && at.has(p.join()) && at.has(p.slice(0, -1).join())) {
      const [x0, y0] = at.get(p.slice(0, -1).join()), [x1, y1] = at.get(p.join()), m = (x0 + x1) / 2;
      make("path", { d: `M${x0} ${y0}C${m} ${y0} ${m} ${y1} ${x1} ${y1}`, class: "link" });
    }
    for (const p of nodes) if (at.has(p.join())) {
      const [x, y] = at.get(p.join()), g = make("g", { class: p.length ? "node" : "node root", tabindex: 0, role: "button", "aria-label": p.length ? JSON.stringify(p) : "root", "data-path": JSON.stringify(p) });
      make("circle", { cx: x, cy: y, r: 10 }, g);
      make("text", { x, y: y + 4, "text-anchor": "middle" }, g).textContent = p.length ? p.at(-1) : "•";
    }
    root.replaceChildren(svg);
    if (focus) root.querySelector(`[data-path="${focus}"]`)?.focus();
  }
  root.addEventListener("click", (e) => { const g = e.target.closest(".node"); if (g) edit(JSON.parse(g.dataset.path), e.shiftKey); });
  root.addEventListener("keydown", (e) => {
    const g = e.target.closest(".node");
    if (!g) return;
    if (e.key === "Enter" || e.key === " ") { e.preventDefault(); e.stopPropagation(); edit(JSON.parse(g.dataset.path), false); }
    else if (e.key === "Delete" || e.key === "Backspace") { e.preventDefault(); edit(JSON.parse(g.dataset.path), true); }
  });
  document.addEventListener("input", (e) => { if (e.target === box()) draw(); });
  draw();
}
