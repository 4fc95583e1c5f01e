/* Charts as one picture with its caption: the plots of a container, side by side as they stand, as SVG or PNG.
   The caption travels with each figure (layout.meta), so a picture says of itself what was run, where, and the verdict. */
async function keepCharts(container, kind, name) {
  "use strict";
  const NS = "http://www.w3.org/2000/svg", box = document.querySelector(container);
  const plots = [...box.querySelectorAll(".js-plotly-plot")].filter((p) => p.offsetWidth);
  if (!plots.length) return;
  const style = getComputedStyle(document.querySelector(".stage")), color = (v) => style.getPropertyValue(v).trim();
  const rects = plots.map((p) => p.getBoundingClientRect()), left = Math.min(...rects.map((r) => r.left)), top = Math.min(...rects.map((r) => r.top));
  const width = Math.max(...rects.map((r) => r.right)) - left + 32, height = Math.max(...rects.map((r) => r.bottom)) - top + 24;
  const make = (tag, facts, parent) => { const n = document.createElementNS(NS, tag); for (const [k, v] of Object.entries(facts)) n.setAttribute(k, v); parent?.append(n); return n; };
  const caption = [...new Set(plots.map((p) => p.layout?.meta?.caption).filter(Boolean))].join("\n");
  const lines = [];
  for (const part of caption.split(/  ·  |\n/)) { // as many parts in a line as fit
    const longer = lines.length ? lines.at(-1) + "  ·  " + part : part;
    if (lines.length && longer.length * 6.3 < width - 32) lines[lines.length - 1] = longer; else lines.push(part);
  }
  const whole = height + 16 * lines.length + 20;
  const picture = make("svg", { xmlns: NS, width, height: whole, viewBox: `0 0 ${width} ${whole}`, "font-family": style.fontFamily.replace(/"/g, "'") });
  make("rect", { width: "100%", height: "100%", fill: color("--st-surface") }, picture);
  plots.forEach((p, i) => {
    for (const layer of p.querySelectorAll(".svg-container > svg.main-svg, .svg-container > div > svg.main-svg")) {
      const copy = layer.cloneNode(true);
      copy.setAttribute("x", 16 + rects[i].left - left); copy.setAttribute("y", 12 + rects[i].top - top);
      copy.removeAttribute("style"); // a page's position and background; places are attributes here
      picture.append(copy);
    }
  });
  lines.forEach((line, i) => { make("text", { x: 16, y: height + 16 * i + 14, "font-size": 11, fill: color("--st-sub") }, picture).textContent = line; });
  // patterns and clips are named by the page's address; inside the picture they are its own
  const text = new XMLSerializer().serializeToString(picture).replace(/url\((&quot;|["'])?[^)"'#]*#/g, "url($1#");
  const save = (blob) => { const a = document.createElement("a"); a.href = URL.createObjectURL(blob); a.download = `${name}.${kind}`; a.click(); setTimeout(() => URL.revokeObjectURL(a.href), 2000); };
  if (kind === "svg") return save(new Blob([text], { type: "image/svg+xml" }));
  const image = new Image(), paper = document.createElement("canvas");
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
  await image.decode();
  paper.width = Math.round(width * 2); paper.height = Math.round(whole * 2);
  paper.getContext("2d").drawImage(image, 0, 0, paper.width, paper.height);
  paper.toBlob(save, "image/png");
}
