/* What the page's tests measure in the page: contrast, focus, movement. */
window.audit = (() => {
  const light = (colour) => {
    const [r, g, b] = colour.map((x) => x / 255).map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((p, q) => q - p);
    return (high + 0.05) / (low + 0.05);
  };
  const over = (a, b, opacity) => a.map((x, i) => x * opacity + b[i] * (1 - opacity));
  const computed = (text) => { // of getComputedStyle: rgb(…), rgba(…), color(srgb …)
    const numbers = text.match(/[\d.]+/g).map(Number), scale = text.startsWith("color(") ? 255 : 1;
    return { colour: numbers.slice(0, 3).map((x) => x * scale), opacity: numbers[3] ?? 1 };
  };
  const up = (element) => { const list = []; for (let n = element; n; n = n.parentElement) list.push(n); return list; };
  const SKIP = "script,style,:disabled,.st-aloud,.sr-only,[aria-disabled=true],.toast-wrap,footer";

  function readable() { // every text that is shown, against what lies behind it
    const weak = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let n; (n = walk.nextNode()); ) {
      const e = n.parentElement;
      if (!n.data.trim() || !e.getBoundingClientRect().width || e.closest(SKIP)) continue;
      if (!e.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) continue;
      const line = up(e), ink = computed(getComputedStyle(e).color);
      const ground = line.slice().reverse().map((p) => computed(getComputedStyle(p).backgroundColor));
      const behind = ground.reduce((b, c) => over(c.colour, b, c.opacity), [255, 255, 255]);
      const opacity = line.reduce((o, p) => o * Number(getComputedStyle(p).opacity), ink.opacity);
      const found = ratio(over(ink.colour, behind, opacity), behind);
      if (found < 4.5) weak.push([n.data.trim().slice(0, 30), e.className, found.toFixed(2)]);
    }
    return weak;
  }

  function drawn() { // the same for what is drawn on the board, from its own SVG: each text over the boxes that hold it
    const svg = new DOMParser().parseFromString(stage.svg(), "image/svg+xml"), weak = [], boxes = [];
    const hex = (c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16));
    let paper = [255, 255, 255];
    for (const e of svg.documentElement.children) {
      const number = (key) => Number(e.getAttribute(key) ?? 0), fill = e.getAttribute("fill");
      const opacity = Number(e.getAttribute("opacity") ?? 1);
      if (e.tagName === "rect" && fill !== "none") {
        if (e.getAttribute("width") === "100%") paper = hex(fill);
        else boxes.push({ x: number("x"), y: number("y"), w: number("width"), h: number("height"), fill: hex(fill), opacity });
      }
      if (e.tagName !== "text") continue;
      const x = number("x") + 1, y = number("y") - 3, inside = e.getAttribute("text-anchor") === "start";
      const under = boxes.filter((b) => inside && x >= b.x && x <= b.x + b.w && y >= b.y && y <= b.y + b.h);
      const behind = under.reduce((c, b) => over(b.fill, c, b.opacity), paper);
      const found = ratio(over(hex(fill), behind, opacity), behind);
      if (found < 4.5) weak.push([e.textContent, found.toFixed(2)]);
    }
    return weak;
  }

  function focused() { // what has the focus, and whether that can be seen
    const e = document.activeElement;
    if (e === document.body) return null;
    const boxes = [e, e.parentElement, e.closest(".st-line"), e.closest(".wrap-inner")].filter(Boolean);
    const seen = boxes.map((n) => getComputedStyle(n)).some(
      (s) => (s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0) || s.boxShadow !== "none");
    return [`${e.tagName}.${e.className}#${e.id} ${e.getAttribute("aria-label") ?? e.textContent.slice(0, 20)}`, seen];
  }

  function watch() { // layout shifts outside the lines below the one that is written, and elements put in beside its words
    const moves = { shift: 0, nodes: 0 };
    const below = (entry) => entry.sources.every((s) => s.node?.parentElement?.closest(".st-chat"));
    new PerformanceObserver((list) => list.getEntries().forEach((e) => { if (!below(e)) moves.shift += e.value; }))
      .observe({ type: "layout-shift" });
    const count = (node) => { if (node.nodeType === 1 && !node.classList.contains("tok")) moves.nodes++; };
    new MutationObserver((all) => all.forEach((m) => m.addedNodes.forEach(count)))
      .observe(document.querySelector(".stage"), { childList: true, subtree: true });
    return (window.moves = moves);
  }

  function settle() { // resolves when nothing outside the stage has changed for a while, after 5 s in any case
    return new Promise((done) => {
      let timer;
      const watcher = new MutationObserver((all) => all.some((m) => !m.target.parentElement?.closest("#stage")) && still());
      const end = () => { watcher.disconnect(); done(); };
      const still = () => { clearTimeout(timer); timer = setTimeout(end, 400); };
      watcher.observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
      setTimeout(end, 5000);
      still();
    });
  }
  return { readable, drawn, focused, watch, settle };
})();
