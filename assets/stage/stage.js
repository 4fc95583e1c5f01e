/* The stage: draws what it is told, and lets people move through it. It owns geometry and time and decides nothing
   about the run: fates, reasons, running numbers and pieces of text arrive with the messages of viz/stage.py.

     const stage = mountStage(root, { words, language, fates, reasons });   root holds stage.html
     stage.feed(message)      a string of viz.stage.message: new events of a run, a note, a verdict, or "clear"

   Text of models is only ever written with textContent and fillText. */
function mountStage(root, options) {
  "use strict";
  const { words, fates, reasons, sources } = options;
  const $ = (selector) => root.querySelector(selector);
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const PHASES = ["grow", "rerank", "mask", "verify", "accept", "commit"];
  const ENTER = 0.35; // the token that became the root takes its place
  const BONUS = -2; // the bonus token's row: it is no node, yet it has a place
  let language = options.language || "en", visit = null;

  /* ---------------------------------------------------------------- words */
  const say = (key, slots) => (words[language][key] ?? key).replace(/\{(\w+)\}/g, (_, name) => String(slots?.[name] ?? ""));
  const number = (x) => (x === Math.trunc(x) ? String(x) : x < 0.0005 ? "<0.001" : x >= 0.9995 && x < 1 ? ">0.999" : x.toFixed(3));
  const hidden = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Zs}\p{Cs}\p{Co}]/u;
  const marks = { " ": "·", "\n": "↵", "\r": "␍", "\t": "⇥" };
  const mark = (c) => "⟨" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩";
  const joiner = (c) => c === "\u200c" || c === "\u200d";
  const visible = (text) => (text ? Array.from(text, (c) => marks[c] ?? (hidden.test(c) && !joiner(c) ? mark(c) : c)).join("") : "∅");
  const prose = (text) => Array.from(text, (c) => (c === " " || c === "\n" || c === "\t" || !hidden.test(c) || joiner(c) ? c : mark(c))).join("");
  const clip = (text, n) => { const c = Array.from(text); return c.length > n ? c.slice(0, n - 1).join("") + "…" : text; };

  /* ---------------------------------------------------------------- state */
  const runs = new Map(); // name → run, in the order in which they came
  let run = null; // the run on stage
  let k = -1; // its step on stage
  let t = 0; // beats into the step, see score()
  let playing = false, follow = true, speed = 1, ghosts = "count", note = null;
  let hover = null, chosen = null; // rows of the step
  let rate = 1, gap = 600, lastArrival = 0; // live: how fast a step may be told
  let camera = null; // {s, x, y} while the reader has zoomed or panned; null fits
  let whole = false; // fit all of a tree, however small that makes it, rather than follow the moment along one too long to read
  let lesson = null; // the page of the lesson on stage
  let until = null; // where the time of a lesson's page ends
  let entry = null; // where the token that is now the root stood in the step before
  const folds = new WeakMap(); // step → Set of folded rows
  const layouts = new WeakMap(); // step → geometry by mode
  const step = () => (run && k >= 0 ? run.steps[k] : null);

  /* ---------------------------------------------------------------- palette */
  let ink = {};
  function palette() {
    const style = getComputedStyle(root);
    for (const name of ["surface", "ground", "ink", "sub", "hair", "accent", "on-accent", "draft", "draft-line", "bonus", "on-bonus", "bonus-tint", "alert", "ghost", "line", "copied", "copied-tint"])
      ink[name] = style.getPropertyValue("--st-" + name).trim();
    ink.font = style.fontFamily;
    paint();
  }

  /* ---------------------------------------------------------------- pens: one drawing, on screen or as SVG */
  const canvas = $(".st-canvas"), screen = canvas.getContext("2d");
  const widths = new Map();
  function measure(text, size, weight) {
    const key = weight + text;
    if (!widths.has(key)) {
      if (widths.size > 20000) widths.clear();
      screen.font = `${weight} 100px ${ink.font}`;
      widths.set(key, screen.measureText(text).width / 100);
    }
    return widths.get(key) * size;
  }
  function canvasPen(c) {
    const style = (o) => { c.globalAlpha = o.alpha ?? 1; c.lineWidth = o.width ?? 1; c.setLineDash(o.dash ?? []); };
    return {
      rect(x, y, w, h, r, o) { style(o); w = Math.max(0, w); h = Math.max(0, h); c.beginPath(); c.roundRect(x, y, w, h, Math.max(0, Math.min(r, w / 2, h / 2))); if (o.fill) { c.fillStyle = o.fill; c.fill(); } if (o.stroke) { c.strokeStyle = o.stroke; c.stroke(); } },
      curve(x0, y0, x1, y1, o) { style(o); const m = (x0 + x1) / 2; c.beginPath(); c.moveTo(o.from ?? x0, y0); if (o.from !== undefined) c.lineTo(x0, y0); c.bezierCurveTo(m, y0, m, y1, x1, y1); c.strokeStyle = o.stroke; c.stroke(); },
      line(points, o) { style(o); c.beginPath(); points.forEach(([x, y], i) => (i ? c.lineTo(x, y) : c.moveTo(x, y))); if (o.fill) { c.closePath(); c.fillStyle = o.fill; c.fill(); } if (o.stroke) { c.strokeStyle = o.stroke; c.stroke(); } },
      text(s, x, y, o) { // sizes in halves of a pixel: every other size would be a font of its own to the browser, and slow
        const font = `${o.weight ?? 400} ${Math.round(o.size * 2) / 2}px ${ink.font}`;
        c.globalAlpha = o.alpha ?? 1; c.font = font; c.textAlign = o.align ?? "left"; c.textBaseline = "alphabetic"; c.fillStyle = o.fill; c.fillText(s, x, y); },
    };
  }
  function svgPen(out) {
    const n = (x) => Number(x.toFixed(2));
    const esc = (s) => s.replace(/[&<>"']/g, (c) => "&#" + c.charCodeAt(0) + ";").replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]|[\ud800-\udfff](?![\udc00-\udfff])(?<![\ud800-\udbff].)/g, "\ufffd");
    const style = (o) => `fill="${o.fill ?? "none"}"` + (o.stroke ? ` stroke="${o.stroke}" stroke-width="${n(o.width ?? 1)}"` : "") + (o.dash ? ` stroke-dasharray="${o.dash.join(" ")}"` : "") + ((o.alpha ?? 1) < 1 ? ` opacity="${n(o.alpha)}"` : "");
    return {
      rect(x, y, w, h, r, o) { out.push(`<rect x="${n(x)}" y="${n(y)}" width="${n(Math.max(0, w))}" height="${n(Math.max(0, h))}" rx="${n(r)}" ${style(o)}/>`); },
      curve(x0, y0, x1, y1, o) { const m = n((x0 + x1) / 2); out.push(`<path d="M${n(o.from ?? x0)} ${n(y0)}${o.from === undefined ? "" : `H${n(x0)}`}C${m} ${n(y0)} ${m} ${n(y1)} ${n(x1)} ${n(y1)}" ${style(o)}/>`); },
      line(points, o) { out.push(`<path d="M${points.map(([x, y]) => n(x) + " " + n(y)).join("L")}${o.fill ? "Z" : ""}" ${style(o)}/>`); },
      text(s, x, y, o) { out.push(`<text x="${n(x)}" y="${n(y)}" font-size="${n(o.size)}" font-weight="${o.weight ?? 400}" text-anchor="${{ center: "middle", right: "end" }[o.align] ?? "start"}" fill="${o.fill}"${(o.alpha ?? 1) < 1 ? ` opacity="${n(o.alpha)}"` : ""} xml:space="preserve">${esc(s)}</text>`); },
    };
  }

  /* ---------------------------------------------------------------- time: what happens when, in seconds at 1× */
  function score(s) {
    if (s.score) return s.score;
    const levels = s.nodes > 1 ? Math.max(...s.depth) : 0, out = [];
    let at = 0;
    const add = (name, length) => { if (length) { out.push({ name, from: at, to: at + length }); at += length; } };
    add("grow", levels && ENTER + levels * 0.42);
    add("rerank", s.p.length > s.nodes ? 0.7 : 0);
    add("mask", levels ? 0.9 : 0);
    add("verify", 0.8);
    add("accept", 0.55 + 0.28 * (s.a.length - 1));
    add("commit", levels ? 0.8 : 0);
    return (s.score = { phases: out, levels, total: at, rest: out.find((p) => p.name === "accept").to });
  }
  const phaseAt = (s, at) => score(s).phases.findLast((p) => at > p.from + 1e-6) ?? score(s).phases[0];
  const part = (s, name, at) => { // how much of a phase is over: 0 before it, 1 after it
    const all = score(s).phases, p = all.find((q) => q.name === name);
    if (p) return Math.min(1, Math.max(0, (at - p.from) / (p.to - p.from)));
    const later = all.find((q) => PHASES.indexOf(q.name) > PHASES.indexOf(name));
    return later && at >= later.from ? 1 : 0;
  };
  const grownAt = (s, at) => { const { levels, phases } = score(s); return phases[0].name === "grow" ? levels * Math.min(1, Math.max(0, (at - ENTER) / (phases[0].to - ENTER))) : levels; }; // levels drafted so far
  const ease = (u) => (u <= 0 ? 0 : u >= 1 ? 1 : u < 0.5 ? 4 * u * u * u : 1 - (-2 * u + 2) ** 3 / 2);
  const out = (u) => (u <= 0 ? 0 : u >= 1 ? 1 : 1 - (1 - u) ** 3);
  const mix = (a, b, u) => a + (b - a) * u;

  /* ---------------------------------------------------------------- receiving */
  function feed(text) {
    if (!text) return;
    const m = JSON.parse(text);
    if (m.visit) visit = m.visit;
    if (m.clear) { runs.clear(); run = null; k = -1; playing = false; follow = true; chosen = hover = null; $(".st-chat").replaceChildren(); }
    if ("note" in m) note = m.note || null;
    else if (m.events?.length) note = null;
    if (m.run) receive(m);
    if (m.lesson) teach(m.lesson);
    else if (m.clear && lesson) endLesson();
    refresh();
  }
  /* ---------------------------------------------------------------- the lesson: pages on real steps, chosen by the server */
  function teach(page) {
    const opening = !lesson;
    lesson = page; root.classList.add("taught");
    $(".st-lesson").hidden = false; $(".st-tools [data-act=lesson]").classList.add("on");
    hideWhy(); chosen = null; halt(); go(page.step);
    const p = score(step()).phases.find((q) => q.name === page.phase);
    t = p ? p.to : score(step()).rest;
    if (p && !calm.matches) { t = p.from; until = p.to; playing = true; rate = 1; }
    hover = page.row;
    if (opening) $('[data-act="lessonnext"]').focus({ preventScroll: true });
    tellLesson();
  }
  function tellLesson() {
    if (!lesson) return;
    const text = say("lesson." + lesson.key + ".text", lesson.slots), last = lesson.index === lesson.count - 1;
    set($(".st-lesson p"), text);
    set($('[data-act="lessonnext"]'), say(last ? "lesson.done" : "lesson.next"));
    $('[data-act="lessonback"]').disabled = !lesson.index;
    set($(".st-aloud"), say("lesson." + lesson.key) + ". " + text);
  }
  async function turn(index) {
    const told = await options.onLesson(visit, index, run?.name ?? null);
    if (told?.message) feed(told.message);
    else if (told?.error) { note = { key: "status.error", text: told.error }; refresh(); }
  }
  function endLesson() { lesson = until = null; root.classList.remove("taught"); $(".st-lesson").hidden = true; $(".st-tools [data-act=lesson]").classList.remove("on"); hover = null; paint(); }
  function receive(m) {
    let r = runs.get(m.run);
    if (!r) { r = { name: m.run, role: m.role, ask: m.ask, title: m.title, at: new Map(), steps: [], spans: [], start: null, finish: null, verdict: null, turn: null }; runs.set(m.run, r); if (r.role === "answer") stageRun(r); }
    const before = r.steps.length;
    for (const e of m.events ?? []) {
      if (r.at.has(e.n)) continue;
      r.at.set(e.n, e);
      if (e.kind === "start") r.start = e;
      else if (e.kind === "finish") r.finish = e;
      else { prepare(e, r); r.steps[e.n - 1] = e; }
    }
    if (m.verdict) r.verdict = m.verdict;
    if (r.role === "plain") { r.of = m.of; const answer = runs.get(m.of); if (answer) answer.plain = r; return; }
    appendText(r);
    if (r !== run) return;
    const fresh = r.steps.length - before;
    if (!fresh) return;
    const now = performance.now();
    if (lastArrival) gap = mix(gap, Math.min(2500, (now - lastArrival) / fresh), 0.4);
    lastArrival = now;
    if (m.whole) return open(m);
    if (follow) {
      go(r.steps.length - 1, 0);
      const room = gap * 0.85 / 1000, length = score(step()).rest;
      if (room < 0.3 || calm.matches) t = length; else { rate = Math.max(speed || 1, length / room); playing = true; }
    }
  }
  function* story(r) { // [ms, tokens, text] as the run went, from its first token
    let ms = 0, tokens = r.start?.ids.length ?? 0, text = (r.start?.text ?? []).join("");
    yield [ms, tokens, text];
    for (const s of r.steps) { if (!s) return; ms += sum(s.ms); tokens += s.ids.length; text += s.text.join(""); yield [ms, tokens, text]; }
  }
  const sourceOf = (s, i) => (s.s && i >= 0 ? sources?.[s.s[i]] : undefined);
  function prepare(s, r) {
    s.nodes = s.f.length;
    s.depth = s.p.map(() => 0);
    s.p.forEach((p, i) => { if (p >= 0 && p < i) s.depth[i] = s.depth[p] + 1; });
    for (let changed = true; changed; ) { // a candidate may follow its children in the numbering
      changed = false;
      s.p.forEach((p, i) => { if (p >= 0 && s.depth[i] !== s.depth[p] + 1) { s.depth[i] = s.depth[p] + 1; changed = true; } });
    }
    s.kids = s.p.map(() => []);
    s.p.forEach((p, i) => p >= 0 && s.kids[p].push(i));
    s.path = new Set(s.a);
    if (s.s) r.sources = true;
    s.set = s.settings ?? r.start?.settings ?? {};
  }
  function stageRun(r) {
    if (run === r) return;
    run = r; k = -1; t = 0; follow = true; options.onStage?.(r.name); lastArrival = 0; gap = 600; chosen = hover = null; camera = null; whole = false; hideWhy();
    for (const other of runs.values()) other.turn?.classList.toggle("active", other === r);
    $(".st-chat").scrollTop = 1e9;
  }
  function open(m) { // a run that arrived whole: show it from its beginning, or where a link points
    follow = false;
    if (m.at) { go(m.at.step ?? 0); playing = false; if (m.at.phase) t = score(step()).phases.find((p) => p.name === m.at.phase)?.to ?? t; return; }
    go(0, 0); if (calm.matches) t = score(step()).rest; else { rate = 0; playing = true; }
  }

  /* ---------------------------------------------------------------- moving */
  function go(index, at) {
    if (!run?.steps.length) return;
    const next = Math.max(0, Math.min(run.steps.length - 1, index));
    if (next !== k) { chosen = hover = null; hideWhy(); }
    k = next;
    if (!run.steps[k]) return;
    t = at === undefined ? score(run.steps[k]).rest : at;
  }
  const pace = () => rate || speed || 1;
  const acts = {
    play() {
      if (!step()) return;
      if (playing) playing = false;
      else {
        playing = true; follow = false; rate = 0; until = null;
        if (t >= score(step()).rest - 1e-6 && k >= run.steps.length - 1) go(0, 0);
        else if (Math.abs(t - score(step()).rest) < 1e-6 && !score(step()).phases.some((p) => p.name === "commit")) go(k + 1, 0);
      }
    },
    prevstep() { halt(); go(t > score(step()).rest + 1e-6 || t < score(step()).rest - 1e-6 ? (t > 0.01 ? k : k - 1) : k - 1); },
    nextstep() { halt(); if (t < score(step()).rest - 1e-6) go(k); else go(k + 1); },
    prevphase() {
      halt(); const { phases } = score(step()), p = phases.findLast((q) => q.to < t - 1e-6);
      if (p) t = p.to; else if (k > 0) { go(k - 1); t = score(step()).total; }
    },
    nextphase() {
      halt(); const { phases } = score(step()), p = phases.find((q) => q.to > t + 1e-6);
      if (p) t = p.to; else if (k < run.steps.length - 1) { go(k + 1, 0); t = score(step()).phases[0].to; }
    },
    first() { halt(); go(0); },
    last() { halt(); go(run.steps.length - 1); },
    live() { if (!step()) return; follow = true; playing = false; go(run.steps.length - 1); },
    fit() { const s = step(), R = s && regions(s).tree; whole = !whole && !camera && !!s && across(layout(s), R) < SMALL; camera = null; }, // all of it; once more: its readable part
    zoomin() { zoom(1.25); },
    zoomout() { zoom(0.8); },
    full() { projector(); },
    keep() { const p = $(".st-keep"); p.hidden = !p.hidden; if (!p.hidden) p.querySelector("button").focus(); },
    whatif() { const p = $(".st-if"); p.hidden = !p.hidden; $('.st-tools [data-act="whatif"]').classList.toggle("on", !p.hidden); if (!p.hidden) { halt(); openWhatIf(); } },
    race() { raceAt = 0; lastRace = performance.now(); requestAnimationFrame(raceFrame); },
    lesson() { if (lesson) endLesson(); else if (options.onLesson) turn(0); },
    lessonnext() { if (!lesson) return; if (lesson.index < lesson.count - 1) turn(lesson.index + 1); else { endLesson(); canvas.focus({ preventScroll: true }); } },
    lessonback() { if (lesson?.index) turn(lesson.index - 1); },
    lessonend() { endLesson(); },
    help() { const h = $(".st-help"); h.hidden = !h.hidden; if (!h.hidden) h.querySelector("button").focus(); },
    ghosts() { const modes = ["hide", "count", "show"]; ghosts = modes[(modes.indexOf(ghosts) + 1) % 3]; $(".st-ghost-mode").value = ghosts; camera = null; },
  };
  function act(name) { if (!acts[name] || (!step() && !["help", "full", "keep", "lesson", "lessonend"].includes(name))) return; acts[name](); refresh(); }
  function halt() { playing = false; follow = false; rate = 0; until = null; }
  function jump(index, phase) { halt(); go(index); if (phase) t = score(step()).phases.find((p) => p.name === phase)?.to ?? t; refresh(); }
  function projector() {
    const on = root.classList.toggle("projector");
    if (on && root.requestFullscreen) root.requestFullscreen().catch(() => {}); // refused inside some frames: the page itself then is the projector
    else if (!on && document.fullscreenElement) document.exitFullscreen();
    camera = null;
  }
  document.addEventListener("fullscreenchange", () => { if (!document.fullscreenElement && root.classList.contains("projector")) { root.classList.remove("projector"); refresh(); } });

  /* ---------------------------------------------------------------- layout of a tree, in its own units */
  const GAP = 32, FONT = 13, NOTE = 11;
  const noteOf = (s, i) => "▸ " + clip(visible(s.gx[i]), 10) + (s.gp[i] === 1 ? "" : " " + number(s.gp[i])); // what the target drew at a node; a number only where it could have drawn another
  const chance = (p) => (p === 1 ? say("draw.likeliest") : say("draw.p", { p: number(p) }));
  function layout(s) { // what the target drew stands beside a node or below it, whichever leaves the tree larger
    const folded = folds.get(s), R = regions(s).tree, key = [ghosts, whole, R.w, R.h, ...(folded ?? [])].join();
    let all = layouts.get(s);
    if (!all) layouts.set(s, (all = new Map()));
    if (!all.has(key)) {
      if (all.size > 12) all.clear();
      const [beside, below] = [true, false].map((beside) => arrange(s, folded, beside));
      all.set(key, fits(beside, R) >= fits(below, R) ? beside : below);
    }
    return all.get(key);
  }
  const PAD = { top: 32, bottom: 10 }, SMALL = 0.75; // scale below which words are hard to read
  const across = (L, R) => (R.w - 2 * (w640() ? 14 : 24)) / L.narrow;
  const fits = (L, R) => { // what is too long scrolls with the moment instead: on a phone always, elsewhere where it would become unreadable
    const high = (R.h - PAD.top - PAD.bottom) / L.height;
    return Math.min(whole ? across(L, R) : w640() ? 9 : Math.max(across(L, R), SMALL), high);
  };
  function arrange(s, folded, beside) {
    const total = s.p.length, L = { rows: [], x: {}, y: {}, w: {}, h: {}, size: {}, col: {}, lanes: [], left: new Map(), spread: 0, width: 0, height: 0, cols: [], beside, note: {}, tail: {} };
    const placed = (i) => i < s.nodes || ghosts === "show" || (ghosts === "count" && s.e[i]);
    const columns = [[0]];
    const last = s.a[s.a.length - 1];
    for (let d = 0; columns[d]?.length; d++) {
      const next = [];
      for (const parent of columns[d]) {
        if (parent === BONUS) continue;
        if (parent === last) next.push(BONUS);
        if (folded?.has(parent)) continue;
        const kids = s.kids[parent].filter(placed).sort((a, b) => s.v[b] - s.v[a] || a - b);
        next.push(...kids);
        const rest = s.kids[parent].length - kids.length;
        if (rest > 0) L.left.set(parent, rest);
      }
      columns.push(next);
    }
    columns.pop();
    let x = 0;
    columns.forEach((column, d) => {
      let widest = 0;
      for (const i of column) {
        const value = i === BONUS ? 1 : s.v[i], ghost = i >= s.nodes;
        const size = i === 0 || i === BONUS ? FONT + 1 : ghost ? FONT - 4 : FONT - 2 + 4 * Math.sqrt(value);
        L.size[i] = size;
        const label = clip(visible(i === BONUS ? s.bonus[1] : s.x[i]), 18);
        const drawn = s.nodes > 1 && i >= 0 && !ghost ? measure(noteOf(s, i), NOTE, 600) + 10 : 0;
        L.w[i] = Math.max(measure(label, size, 600) + size * 1.3 + (i === BONUS ? 12 : 0), beside ? 0 : drawn, 26);
        L.h[i] = size * (ghost ? 1.45 : 1.65);
        L.tail[i] = L.w[i] + (beside ? drawn : 0);
        widest = Math.max(widest, L.tail[i]);
        L.rows.push(i);
      }
      L.cols.push(x);
      // A crowded level stands in several lanes, like bricks, rather than in one endless file.
      const crowd = column.reduce((n, i) => n + (i >= s.nodes ? 0.5 : 1), 0), lanes = (L.lanes[d] = Math.max(1, Math.min(5, Math.round(crowd / 14))));
      column.forEach((i, j) => { L.x[i] = x + (j % lanes) * (widest + 10); L.col[i] = d; });
      x += lanes * (widest + 10) - 10 + GAP;
      L.width = L.narrow = x - GAP;
    });
    // Each column keeps its parents' order and moves as little as it must: three sweeps of pooled displacements.
    const pitch = (i) => (L.h[i] + (i >= s.nodes ? 3 : s.nodes > 1 && !beside ? NOTE + 5 : 6)) / L.lanes[L.col[i]];
    const parentOf = (i) => (i === BONUS ? last : s.p[i]);
    let want = { 0: 0 };
    const settle = (column) => {
      const blocks = [];
      for (const i of column) {
        let b = { items: [i], size: pitch(i), sum: want[i] - pitch(i) / 2, at: 0 };
        b.at = b.sum;
        while (blocks.length && blocks.at(-1).at + blocks.at(-1).size > b.at) {
          const a = blocks.pop(), n = a.items.length + b.items.length;
          b = { items: [...a.items, ...b.items], size: a.size + b.size, sum: a.sum + b.sum - a.size * b.items.length, at: 0 };
          b.at = b.sum / n;
        }
        blocks.push(b);
      }
      for (const b of blocks) { let y = b.at; for (const i of b.items) { L.y[i] = y + pitch(i) / 2; y += pitch(i); } }
    };
    const down = () => columns.forEach((column, d) => {
      if (d) {
        const groups = new Map();
        for (const i of column) { const p = parentOf(i); if (!groups.has(p)) groups.set(p, []); groups.get(p).push(i); }
        for (const [p, kids] of groups) { let y = L.y[p] - kids.reduce((a, i) => a + pitch(i), 0) / 2; for (const i of kids) { want[i] = y + pitch(i) / 2; y += pitch(i); } }
      }
      settle(column);
    });
    const up = () => [...columns].reverse().forEach((column) => {
      for (const i of column) { const kids = (s.kids[i] ?? []).filter((c) => c in L.y); if (i === last && BONUS in L.y) kids.push(BONUS); if (kids.length) want[i] = kids.reduce((a, c) => a + L.y[c], 0) / kids.length; else want[i] = L.y[i]; }
      settle(column);
    });
    down(); up(); down(); up();
    const top = Math.min(...L.rows.map((i) => L.y[i] - L.h[i] / 2)), bottom = Math.max(...L.rows.map((i) => L.y[i] + L.h[i] / 2 + (!beside && i >= 0 && i < s.nodes && s.nodes > 1 ? NOTE + 4 : 0)));
    const lift = beside || s.nodes === 1 ? 0 : (NOTE + 5) / 2; // a note hangs below its node, which therefore stands higher in its place
    for (const i of L.rows) L.y[i] -= top + (i < s.nodes ? lift / L.lanes[L.col[i]] : 0);
    L.height = bottom - top;
    return L;
  }

  /* ---------------------------------------------------------------- the board: where things are, on screen */
  let box = { w: 0, h: 0 };
  function regions(s) {
    const { w, h } = box, one = s.nodes === 1;
    if (one) return { tree: { x: 0, y: 0, w, h }, mask: null };
    if (w < 640) { const m = Math.min(w - 24, h * 0.42); return { tree: { x: 0, y: 0, w, h: h - m }, mask: { x: 8, y: h - m, w: w - 16, h: m, side: Math.min(m - 48, w - 112) } }; }
    const side = Math.min(h - 52 - (big() - 1) * 14, w * 0.25), label = s.nodes <= 40 ? 76 : 12;
    const mw = side + label + 26;
    return { tree: { x: 0, y: 0, w: w - mw - 8, h }, mask: { x: w - mw - 8, y: 0, w: mw, h, side } };
  }
  function view(s, L, R) {
    if (camera) return camera;
    const pad = w640() ? 14 : 24, { top, bottom } = PAD;
    const fit = Math.min(fits(L, R.tree), root.classList.contains("projector") ? 1.9 : 1.3);
    const scale = w640() && !whole ? Math.min(fit, 1) : steady(fit); // a phone shows a part, and follows the moment
    const room = ((R.tree.w - 2 * pad) / scale - L.narrow) / Math.max(1, L.cols.length - 1);
    spread(L, Math.max(0, Math.min(56, room)));
    return { s: scale, x: R.tree.x + pad - shift(s, L, scale, R.tree.w - 2 * pad), y: R.tree.y + top + Math.max(0, (R.tree.h - top - bottom - L.height * scale) / 2) };
  }
  const steady = (fit) => 1.3 * 0.94 ** Math.ceil(Math.log(1.3 / fit) / Math.log(1 / 0.94) - 1e-9); // few sizes, so that most steps share one
  function shift(s, L, scale, w) { // where a tree is wider than the board, the moment on stage is kept in sight
    const over = L.width * scale - w;
    if (over <= 0) return 0;
    const level = part(s, "accept", t) > 0 ? part(s, "accept", t) * s.a.length : part(s, "verify", t) > 0 ? part(s, "verify", t) * (L.cols.length - 1) : part(s, "mask", t) > 0 ? 0 : grownAt(s, t);
    const focus = chosen ?? lesson?.row ?? null;
    if (focus in L.x) return Math.max(0, Math.min(over, L.x[focus] * scale - w * 0.4));
    const d = Math.floor(level), x = mix(L.cols[Math.min(d, L.cols.length - 1)], L.cols[Math.min(d + 1, L.cols.length - 1)], level - d);
    return Math.max(0, Math.min(over, x * scale - w * 0.55));
  }
  function spread(L, by) { // wider gaps between the columns where there is room
    for (const i of L.rows) L.x[i] += L.col[i] * (by - L.spread);
    L.cols = L.cols.map((x, d) => x + d * (by - L.spread));
    L.width += (L.cols.length - 1) * (by - L.spread);
    L.spread = by;
  }
  const w640 = () => box.w < 640;
  const big = () => (root.classList.contains("projector") ? 1.4 : 1);
  function zoom(by, px, py) {
    const s = step(); if (!s) return;
    const L = layout(s), R = regions(s), v = view(s, L, R), cx = px ?? R.tree.w / 2, cy = py ?? R.tree.h / 2;
    const next = Math.min(4, Math.max(0.12, v.s * by)), f = next / v.s;
    camera = { s: next, x: cx - (cx - v.x) * f, y: cy - (cy - v.y) * f, zoomed: true };
  }
  const maskGeometry = (s, R) => {
    if (!R.mask) return null;
    const n = s.nodes, label = n <= 40 ? (w640() ? 70 : 76) : 12, cell = R.mask.side / n;
    const x = R.mask.x + label + 14;
    return { x, y: R.mask.y + 34 + (big() - 1) * 14, cell, side: R.mask.side, n, label, band: x - 9 };
  };
  const ancestors = (s, i) => { const set = new Set(); for (let j = i; j >= 0; j = s.p[j]) set.add(j); return set; };

  /* ---------------------------------------------------------------- drawing */
  let raf = 0, last = 0;
  function paint() { if (!raf && !document.hidden) raf = requestAnimationFrame(frame); }
  function frame(now) {
    raf = 0;
    const dt = Math.min(0.1, (now - last) / 1000);
    last = now;
    if (playing && step()) advance(dt);
    const dpr = Math.min(2, devicePixelRatio || 1);
    if (canvas.width !== Math.round(box.w * dpr) || canvas.height !== Math.round(box.h * dpr)) { canvas.width = Math.round(box.w * dpr); canvas.height = Math.round(box.h * dpr); }
    canvas.classList.toggle("zoomed", !!camera?.zoomed);
    screen.setTransform(dpr, 0, 0, dpr, 0, 0);
    screen.clearRect(0, 0, box.w, box.h);
    draw(canvasPen(screen));
    tell();
    if (playing) paint();
  }
  function advance(dt) {
    const s = step(), sc = score(s);
    if (follow && t >= sc.rest) { playing = false; t = sc.rest; return; }
    if (!follow && speed === 0) { // as it ran: every step lasts what it lasted
      run.clock = (run.clock ?? 0) + dt * 1000; t = sc.rest;
      while (run.clock >= sum(step().ms) && k < run.steps.length - 1) { run.clock -= sum(step().ms); go(k + 1); }
      if (k >= run.steps.length - 1) { playing = false; run.clock = 0; }
      return;
    }
    t += dt * pace();
    if (until !== null) { if (t >= until) { t = until; until = null; playing = false; } return; }
    if (follow) { if (t >= sc.rest) { t = sc.rest; playing = false; } }
    else if (t >= sc.total + 0.25) { if (k < run.steps.length - 1) enter(k + 1); else { playing = false; t = sc.rest; } }
  }
  function enter(next) { // go on to the next step from where its root stands now
    const s = step(), L = layout(s), v = view(s, L, regions(s));
    entry = BONUS in L.x ? { run, k: next, x: v.x + L.x[BONUS] * v.s, y: v.y + L.y[BONUS] * v.s } : null;
    go(next, 0);
  }
  const sum = (list) => list.reduce((a, b) => a + b, 0);

  function draw(pen) {
    const s = step();
    if (!s) { pen.text(note ? caption(null) : say("say.idle"), box.w / 2, box.h / 2, { size: 15, fill: ink.sub, align: "center" }); return; }
    const L = layout(s), R = regions(s), v = view(s, L, R);
    const at = Math.min(t, score(s).total);
    const f = { grow: part(s, "grow", at), rerank: part(s, "rerank", at), mask: part(s, "mask", at), verify: part(s, "verify", at), accept: part(s, "accept", at), commit: part(s, "commit", at) };
    const dream = imagined();
    const focus = hover ?? chosen, lit = dream ? null :  focus !== null && focus >= 0 ? ancestors(s, focus) : null;
    const X = (x) => v.x + x * v.s, Y = (y) => v.y + y * v.s;
    const levels = score(s).levels, grown = grownAt(s, at);
    const born = (i) => (i === 0 ? 1 : i === BONUS ? 0 : out((grown - (s.depth[i] - 1)) / 0.55));
    const beamed = (i) => ease((grown - (s.depth[i] - 0.45)) / 0.4);
    const walked = f.accept * (s.a.length + 0.6); // how far the walk is, in nodes
    const stands = (i) => { const d = s.a.indexOf(i); return d < 0 ? 0 : out((walked - d) / 0.8); };
    const judged = ease((walked - s.a.length + 0.6) / 0.8); // the walk is over: what is not on it is out
    const sweep = f.verify * (levels + 1.2);
    const seen = (i) => out((sweep - s.depth[i]) / 0.9);
    const left = (i) => X(L.x[i]), mid = (i) => Y(L.y[i]), wide = (i) => L.w[i] * v.s;
    const entering = entry?.k === k && entry.run === run ? ease(at / ENTER) : 1; // the last bonus becomes this root
    const place = (i) => { // where a row is now: it slides out of its parent while it is born
      const p = i === BONUS ? s.a.at(-1) : s.p[i], u = i === BONUS ? 1 : born(i);
      if (i === 0 && entering < 1) return [mix(entry.x, left(0), entering), mix(entry.y, mid(0), entering)];
      if (p < 0 || u >= 1) return [left(i), mid(i)];
      return [mix(left(p) + L.tail[p] * v.s, left(i), u), mix(mid(p), mid(i), u)];
    };

    // depth ruler
    const ruler = R.tree.y + 20;
    let said = -Infinity;
    L.cols.forEach((x, d) => { if (d <= levels && X(x) < R.tree.w - 30 && X(x) - said > 52 && (said = X(x))) pen.text(d ? (w640() ? String(d) : say("ruler.depth", { d })) : say("ruler.root"), X(x) + 2, ruler, { size: 11 * big(), fill: ink.sub, alpha: d <= Math.max(grown, 0.001) + 0.01 ? 1 : 0.4 }); });

    // links
    const strong = (i) => (dream ? (i === BONUS ? 0.25 : dream.walk.includes(i) ? 1 : dream.kept.has(i) ? 0.95 : 0.24) : lit && !lit.has(i) && i !== BONUS ? 0.4 : 1);
    for (const i of L.rows) {
      const p = i === BONUS ? s.a.at(-1) : s.p[i];
      if (p < 0 || !(p in L.x)) continue;
      const u = i === BONUS ? judged : born(i);
      if (u <= 0) continue;
      const [x, y] = place(i), on = i === BONUS ? judged : stands(i), ghost = i >= s.nodes;
      const fade = ghost ? mix(0.8, 0.45, f.rerank) : on ? 1 : mix(1, 0.7, judged);
      const width = i === BONUS ? 2 : (0.8 + 3.6 * s.c[i]) * Math.max(0.5, v.s);
      const from = left(p) + wide(p), tail = Math.min(left(p) + L.tail[p] * v.s, x); // the stem on which the draw is written
      pen.curve(tail, mid(p), x, y, { from, stroke: i === BONUS ? ink.bonus : on > 0.5 ? ink.accent : ink.line, width: on && i !== BONUS ? Math.max(width, 2.5) : width, alpha: u * fade * strong(i), dash: ghost ? [3, 3] : i === BONUS ? [1, 3] : undefined });
    }
    // candidates without a place: dust while the level is scored, a number afterwards
    if (ghosts === "count") for (const [p, count] of L.left) {
      const scored = p === 0 ? grown : grown - s.depth[p], x = left(p) + wide(p);
      const u = out(scored / 0.5) * (1 - f.rerank);
      if (u > 0 && s.e[p]) for (let j = 0; j < Math.min(count, 14); j++) pen.rect(x + 20 * v.s * out(scored / 0.5), mid(p) + (j - (Math.min(count, 14) - 1) / 2) * 4 * v.s, 2.4, 2.4, 1.2, { fill: ink.ghost, alpha: 0.7 * u });
      const counted = f.rerank * (1 - f.mask);
      if (counted > 0 && v.s > 0.5 && p < s.nodes && !folds.get(s)?.has(p)) pen.text("+" + count, left(p) + wide(p) + 5, mid(p) - 3, { size: 10 * v.s + 1, fill: ink.sub, alpha: counted * strong(p) });
    }
    // chips
    for (const i of L.rows) {
      const u = i === BONUS ? out(judged) : born(i);
      if (u <= 0) continue;
      chip(i, ...place(i), u);
    }
    function chip(i, x, y, u) {
      const w = wide(i), h = L.h[i] * v.s, from = sourceOf(s, i), r = from && from !== "head" ? 0 : Math.min(h / 2, 9 * v.s), size = L.size[i] * v.s, ghost = i >= s.nodes;
      const raw = i === BONUS ? s.bonus[1] : s.x[i], fate = i >= 0 && !ghost ? fates[s.f[i]] : "";
      let fill = ink.surface, stroke = ink.hair, color = ink.ink, weight = 400, dash, width = 1, alpha = u, strike = 0;
      if (i === BONUS) { fill = ink.bonus; stroke = ink.bonus; color = ink["on-bonus"]; weight = 650; }
      else if (i === 0 && entering < 0.5) { fill = ink.bonus; stroke = ink.bonus; color = ink["on-bonus"]; weight = 650; }
      else if (i === 0) { fill = ink.ink; stroke = ink.ink; color = ink.surface; weight = 600; }
      else if (ghost) {
        const b = s.e[i] ? beamed(i) : 0;
        alpha *= mix(mix(1, 0.8, 1 - b), 0.92, f.rerank); color = ink.sub;
        stroke = b > 0.5 && f.rerank < 0.5 ? ink["draft-line"] : ink.ghost; if (f.rerank > 0.5) dash = [2, 3];
      } else {
        const kept = s.p.length > s.nodes ? f.rerank : 1;
        if (kept > 0.35) { fill = from === "lookup" ? ink["copied-tint"] : ink.draft; stroke = from === "lookup" ? ink.copied : ink["draft-line"]; }
        else if (s.e[i] && beamed(i) > 0.5) { stroke = ink["draft-line"]; width = 1.6; }
        const on = stands(i);
        if (on > 0.3) { fill = ink.accent; stroke = ink.accent; color = ink["on-accent"]; weight = 650; if (fate === "past the stop") { fill = ink.surface; color = ink.accent; dash = [5, 3]; width = 2; } }
        else if (judged > 0.4) {
          fill = ink.surface; stroke = ink.ghost; color = ink.sub;
          if (fate === "not the draw") strike = judged; else dash = [2, 3];
        }
      }
      alpha *= strong(i);
      if (dream?.kept.has(i) && i > 0) { dash = undefined; if (ghost) { stroke = ink["draft-line"]; fill = ink.draft; color = ink.ink; alpha = u; } if (dream.walk.includes(i)) { stroke = ink.accent; width = 2.4; } }
      if (focus === i) { stroke = i === BONUS ? ink.ink : ink.accent; width = 2.4; dash = undefined; }
      if (v.s < 0.42 && focus !== i && !(stands(i) || i === BONUS || i === 0)) { // too small to read: a bar
        pen.rect(x, y - h / 2, w, h, r, { fill: fill === ink.surface ? ink.hair : stroke, alpha: alpha * 0.8 });
        return;
      }
      pen.rect(x, y - h / 2, w, h, r, { fill, stroke, width, dash, alpha });
      if (from === "both" && alpha > 0.3) pen.rect(x, y + h / 2 - 2.5 * v.s, w, 2.5 * v.s, 0, { fill: ink.copied, alpha });
      const label = clip(visible(raw), 18), tx = x + size * 0.62 + (i === BONUS ? 12 * v.s : 0), ty = y + size * 0.35;
      if (i === BONUS) { const q = 4 * v.s, cx = x + 11 * v.s; pen.line([[cx, y - q], [cx + q, y], [cx, y + q], [cx - q, y]], { fill: color, alpha }); }
      pen.text(label, tx, ty, { size, weight, fill: color, alpha });
      if (strike) { const tw = measure(label, size, weight); pen.line([[tx - 2, y + size * 0.06], [tx + (tw + 2) * strike, y + size * 0.06]], { stroke: ink.sub, width: 1, alpha: alpha * 0.75 }); }
      if (stands(i) > 0.3 && i > 0) { const q = 3.2 * Math.max(v.s, 0.7), cx = x + w - q, cy = y - h / 2; pen.rect(cx - 2 * q, cy - 2 * q, 4 * q, 4 * q, 2 * q, { fill: ink.surface, stroke: ink.accent, alpha }); pen.line([[cx - q, cy], [cx - q * 0.2, cy + q * 0.8], [cx + q, cy - q * 0.8]], { stroke: ink.accent, width: 1.6, alpha }); }
      if (folds.get(s)?.has(i)) pen.text("⋯", x + w + 6, y + 4, { size: 14 * v.s, fill: ink.sub, alpha });
      if (i >= 0 && !ghost && (v.s > 0.6 || focus === i || stands(i)) && s.nodes > 0) {
        const shown = seen(i), size = NOTE * v.s, weight = stands(i) ? 600 : 400, words = noteOf(s, i);
        if (shown > 0 && L.beside && s.nodes > 1) {
          pen.rect(x + w + 2, y - size * 0.7, measure(words, size, weight) + 5, size * 1.4, 3, { fill: ink.surface, alpha: shown });
          pen.text(words, x + w + 5, y + size * 0.35, { size, fill: stands(i) || i === 0 ? ink.ink : ink.sub, alpha: shown * strong(i), weight });
        } else if (shown > 0) pen.text(words, x + 3, y + h / 2 + size + 1, { size, fill: stands(i) || i === 0 ? ink.ink : ink.sub, alpha: shown * strong(i), weight });
      }
    }
    if (f.verify > 0 && f.verify < 1 && levels) { // the forward passes over all levels at once, told left to right
      const x = mix(X(0) - 20, X(L.width) + 20, f.verify);
      pen.line([[x, R.tree.y + 26], [x, R.tree.y + R.tree.h - 8]], { stroke: ink.bonus, width: 2, alpha: 0.8 * Math.sin(Math.PI * f.verify) });
    }
    if (R.mask) drawMask(pen, s, L, R, v, f, { dream, lit, focus, left, mid, stands });
  }

  function drawMask(pen, s, L, R, v, f, { dream, lit, focus, left, mid, stands }) {
    const g = maskGeometry(s, R), { n, cell } = g, kept = s.a.length;
    const shown = s.p.length > n || score(s).levels ? f.mask : 1;
    if (camera || (!w640() && v.x + L.width * v.s > R.mask.x)) pen.rect(R.mask.x - 6, R.mask.y - 2, R.mask.w + 12, R.mask.h + 4, 0, { fill: ink.surface });
    pen.line([[R.mask.x - 6, 16], [R.mask.x - 6, box.h - 16]].map(([x, y]) => (w640() ? [y === 16 ? 12 : box.w - 12, R.mask.y - 2] : [x, y])), { stroke: ink.hair, width: 1 });
    pen.text(say("mask.title"), g.x, R.mask.y + 16, { size: 12 * big(), weight: 600, fill: ink.sub, alpha: 0.35 + 0.65 * shown });
    pen.text(say("mask.axes"), g.x, R.mask.y + 29 + (big() - 1) * 12, { size: 10.5 * big(), fill: ink.sub, alpha: 0.35 + 0.65 * shown });
    pen.rect(g.x, g.y, g.side, g.side, 2, { stroke: ink.hair, alpha: 0.9 });
    if (shown <= 0) return;
    const order = new Map(s.a.map((i, d) => [i, d]));
    const rowY = (i) => g.y + cell * (order.has(i) ? mix(i, order.get(i), ease(f.commit)) : i);
    const rowAlpha = (i) => (order.has(i) ? 1 : 1 - ease(f.commit * 1.6));
    pen.rect(g.band, g.y, 5, g.side * mix(1, kept / n, ease(f.commit)), 2, { fill: ink.sub, alpha: 0.55 * out(shown * 2) });
    for (let i = 0; i < n; i++) {
      const arrive = out(shown * 1.9 - 0.9 * (i / n) - 0), a = rowAlpha(i);
      if (arrive <= 0 || a <= 0) continue;
      const y = rowY(i), on = stands(i) > 0.3, dim = dream ? (dream.kept.has(i) ? 1 : 0.18) : lit && focus !== i ? (focus < n && focus >= 0 ? 0.45 : 1) : 1;
      if (focus === i) pen.rect(g.x - g.label - 4, y, g.side + g.label + 4, Math.max(cell, 2), 2, { fill: ink.accent, alpha: 0.14 });
      for (let j = i; j >= 0; j = s.p[j]) {
        const colX = order.has(j) && order.has(i) ? mix(j, order.get(j), ease(f.commit)) : j;
        pen.rect(g.x + colX * cell + 0.4, y + 0.4, Math.max(1, cell - 0.8), Math.max(1, cell - 0.8), Math.min(2, cell / 5), { fill: on ? ink.accent : j === i ? ink["draft-line"] : ink["draft-line"], alpha: (focus === i ? 1 : dim) * a * out(arrive * 2 - 0.6) * (on ? 1 : j === i ? 0.95 : 0.62) });
      }
      if (n <= 40 && cell > 5.5) {
        const size = Math.min(11.5, cell * 0.86), label = clip(visible(s.x[i]), 9), tx = g.band - 6, ty = y + cell / 2 + size * 0.35;
        if (arrive < 1 && i in L.x) { // it flies from its place in the tree
          const fx = mix(left(i) + 8, tx - measure(label, size, 400), ease(arrive)), fy = mix(mid(i) + 4, ty, ease(arrive));
          pen.text(label, fx, fy, { size: mix(L.size[i] * v.s, size, ease(arrive)), fill: ink.accent, alpha: 0.9 });
        } else pen.text(label, tx, ty, { size, fill: on ? ink.accent : focus === i ? ink.ink : ink.sub, weight: on || focus === i ? 650 : 400, align: "right", alpha: a * dim });
      }
    }
    if (lit && focus >= 0 && focus < n && f.commit < 0.01) for (const j of lit) pen.rect(g.x + j * cell, g.y - 4, Math.max(cell - 1, 1), 3, 1, { fill: ink.accent });
  }

  /* ---------------------------------------------------------------- words around the board */
  const set = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  function caption(s) {
    if (note) return say(note.key, note.what ? { ...note, what: say(note.what) } : note);
    if (lesson) return say("lesson.at", { i: lesson.index + 1, n: lesson.count, title: say("lesson." + lesson.key) });
    if (!s) return run?.start ? say("status.prefill") : say("say.idle");
    const p = phaseAt(s, Math.min(t, score(s).total)).name, drafted = s.nodes - 1, taken = s.a.length - 1, sc = score(s);
    const bonus = visible(s.bonus[1]);
    if (p === "grow") {
      if (!s.fw) return say("say.grow.copy", { n: drafted });
      const level = Math.min(sc.levels, Math.floor(grownAt(s, t) - 1e-9) + 1), first = s.fw - sc.levels;
      return say("say.grow", { i: Math.max(1, level + Math.max(0, first)), n: s.fw, level, made: s.depth.filter((d) => d === level).length });
    }
    if (p === "rerank") return say("say.rerank", { kept: drafted, dropped: s.p.length - s.nodes });
    if (p === "mask") return say("say.mask", { n: s.nodes });
    if (p === "verify") return drafted ? say("say.verify", { n: s.nodes }) : say("say.verify.one");
    if (p === "accept") {
      if (!drafted) return say("say.accept.plain", { bonus });
      if (s.ids.length < s.a.length) return say("say.accept.cut", { a: taken, d: deepest(s), e: s.ids.length });
      return taken ? say("say.accept", { a: taken, d: deepest(s), bonus }) : say("say.accept.none", { bonus });
    }
    return say("say.commit", { kept: s.a.length, n: s.nodes, gone: s.nodes - s.a.length });
  }
  const troubled = () => ["status.error", "status.broken", "keep.bad"].includes(note?.key);
  function tell() {
    const s = step();
    const now = caption(s);
    if ($(".st-caption").textContent !== now) { set($(".st-caption"), now); $(".st-caption").title = now; }
    $(".st-caption").classList.toggle("trouble", troubled());
    const bar = $(".st-load"), done = note?.done;
    bar.classList.toggle("on", done !== undefined);
    if (done !== undefined) { bar.firstChild.style.transform = `scaleX(${done})`; bar.setAttribute("aria-valuenow", String(Math.round(100 * done))); bar.setAttribute("aria-label", now); }
    set($(".st-count"), s ? say("step.of", { k: k + 1, n: run.steps.length }) : "");
    const read = s ? reading(s) : "";
    set($(".st-read"), read); $(".st-strip").classList.toggle("reading", !!read);
    legend();
    phaseBar(s);
    reveal(s);
    const truthLine = [run?.name, k, run?.plain?.steps.length, !!run?.verdict, language, ink.accent, box.w].join();
    if (truthLine !== tell.truth) { tell.truth = truthLine; truth(); if (!$(".st-if").hidden) tellWhatIf(); }
    const line = k + "/" + (run?.steps.length ?? 0) + "/" + box.w + ink.accent + (run?.name ?? "");
    if (line !== tell.line) { tell.line = line; timeline(); }
    root.classList.toggle("playing", playing && !(follow && run && !run.finish && t >= (s ? score(s).rest : 0)));
    const label = say(playing ? "pause" : "play");
    if ($(".st-play").getAttribute("aria-label") !== label) $(".st-play").setAttribute("aria-label", label);
    $(".st-live").disabled = !run || !!run.finish;
    $(".st-live").classList.toggle("on", follow && !!run && !run.finish && !!run.start);
  }
  function reading(s) {
    const i = hover ?? chosen;
    if (i === null || i >= s.nodes) return i !== null ? `“${visible(s.x[i])}” · ${say("node.confidence")} ${number(s.c[i])} · ${say("node.value")} ${number(s.v[i])} · ${say("node.dropped")}` : "";
    if (i === BONUS) return `“${visible(s.bonus[1])}” · ${say("origin.bonus")} · ${chance(s.bonus[2])}`;
    return say("mask.cell", { row: visible(s.x[i]), n: ancestors(s, i).size, c: s.at, pos: s.at + s.depth[i], slot: s.at + i }) + ` · ${say("node.confidence")} ${number(s.c[i])} · ${say("node.value")} ${number(s.v[i])}` + (undecided(s, i) ? ` · ${say("node.target")} ${number(s.q[i])}` : "");
  }
  function phaseBar(s) {
    const bar = $(".st-phases");
    if (!bar.children.length) for (const name of PHASES) { const b = document.createElement("button"); b.type = "button"; b.dataset.phase = name; b.append(document.createElement("i"), document.createTextNode("")); bar.append(b); }
    const now = s ? phaseAt(s, Math.min(t, score(s).total)).name : null;
    [...bar.children].forEach((b) => {
      const name = b.dataset.phase, has = !!s && score(s).phases.some((p) => p.name === name);
      if (b.lastChild.data !== say("phase." + name)) b.lastChild.data = say("phase." + name);
      b.disabled = !has; b.classList.toggle("on", name === now); b.setAttribute("aria-current", name === now ? "step" : "false");
      b.firstChild.style.transform = `scaleX(${has ? part(s, name, t).toFixed(3) : 0})`;
    });
  }
  let lineBox = { width: 0, height: 0 };
  new ResizeObserver(([e]) => { lineBox = e.contentRect; tell.line = ""; paint(); }).observe($(".st-line"));
  function timeline() {
    const c = $(".st-line canvas"), r = lineBox, dpr = Math.min(2, devicePixelRatio || 1);
    const wide = Math.max(1, Math.round(r.width * dpr)), high = Math.max(1, Math.round(r.height * dpr));
    if (c.width !== wide || c.height !== high) { c.width = wide; c.height = high; } else c.getContext("2d").clearRect(0, 0, wide, high);
    const pen = canvasPen(c.getContext("2d")); c.getContext("2d").setTransform(dpr, 0, 0, dpr, 0, 0);
    const range = $(".st-range"), steps = run?.steps ?? [], n = steps.length;
    range.max = String(Math.max(1, n)); range.value = String(k + 1); range.disabled = !n;
    if (!n) return;
    const s = step();
    range.setAttribute("aria-valuetext", s ? say("step.of", { k: k + 1, n }) + ". " + aloud(s) : "");
    const bw = Math.min(16, (r.width - 4) / n), most = Math.max(...steps.map((x) => x?.ids.length ?? 0), 4), unit = (r.height - 8) / most;
    steps.forEach((x, i) => {
      if (!x) return;
      const h = x.ids.length * unit, drafted = Math.min(x.a.length - 1, x.ids.length) * unit, X = 2 + i * bw, w = Math.max(1, bw - (bw > 4 ? 2 : 0.4)), alpha = i <= k ? 1 : 0.35;
      if (drafted > 0) pen.rect(X, r.height - 4 - drafted, w, drafted, Math.min(2, w / 3), { fill: ink.accent, alpha });
      if (h > drafted) pen.rect(X, r.height - 4 - h, w, h - drafted - 1, Math.min(2, w / 3), { fill: ink.bonus, alpha });
      if (i === k) pen.rect(X - 1, r.height - 2, w + 2, 2, 1, { fill: ink.ink });
    });
  }
  const deepest = (s) => Math.max(...s.depth.slice(0, s.nodes)); // of the tree that was verified; more levels may have been drafted
  function aloud(s) {
    const bonus = visible(s.bonus[1]), n = s.n;
    if (s.nodes === 1) return say("summary.root", { k: n, bonus });
    const taken = s.a.slice(1).map((i) => visible(s.x[i]));
    return say("summary", { k: n, n: s.nodes, d: deepest(s), path: taken.length ? say("summary.path", { n: taken.length, tokens: taken.join(" ") }) : say("summary.nopath"), bonus });
  }

  /* ---------------------------------------------------------------- the answer */
  let stuck = true; // the reader is at the end of the conversation, and stays there
  $(".st-chat").addEventListener("scroll", (e) => { const c = e.currentTarget; stuck = c.scrollHeight - c.scrollTop - c.clientHeight < 40; }, { passive: true });
  const element = (tag, className, text) => { const node = document.createElement(tag); if (className) node.className = className; if (text !== undefined) node.textContent = text; return node; };
  function appendText(r) {
    const chat = $(".st-chat");
    if (!r.turn) {
      r.turn = element("div", "st-turn active");
      const ask = element("p", "st-ask"); ask.dir = "auto";
      ask.append(element("b", "", ""), document.createTextNode(""));
      r.answer = element("p", "st-answer"); r.answer.dir = "auto";
      r.foot = element("div", "st-foot");
      r.turn.append(ask, r.answer, r.foot);
      r.told = 0; r.shown = 0;
      chat.append(r.turn);
      stageRun(r);
      for (const other of runs.values()) other.turn?.classList.toggle("active", other === r);
    }
    const ask = r.turn.querySelector(".st-ask");
    set(ask.firstChild, r.ask !== undefined && r.ask !== null ? say("you") : say("untitled"));
    const asked = prose(r.ask ?? r.start?.prompt ?? "");
    if (ask.lastChild.data !== asked) ask.lastChild.data = asked;
    for (; r.at.has(r.told); r.told++) {
      const e = r.at.get(r.told);
      if (e.kind === "finish") { if (e.text) write(r, e.text, "plain", r.told, -1); continue; }
      e.text.forEach((text, i) => { if (text) write(r, text, e.kind === "start" ? "plain" : i < e.a.length - 1 ? "draft" : "bonus", e.n, i); });
    }
    footer(r);
    if (stuck && follow) chat.scrollTop = 1e9;
  }
  function write(r, text, origin, n, i) {
    const span = element("span", "tok " + origin, prose(text));
    span.dataset.n = n; span.dataset.i = i;
    span.title = say("origin." + origin);
    r.answer.append(span);
    r.spans.push(span);
    r.shown = r.spans.length;
  }
  function footer(r) {
    const e = r.finish, s = r.steps.at(-1), list = [];
    if (e) {
      const v = e.numbers;
      list.push([say("foot.steps", { steps: v.steps }), "steps"], v.tau ? [say("foot.tau", { tau: v.tau.toFixed(2) }), "tau"] : [], [say("foot.accepted", { a: v.accepted, d: v.drafted }), "accepted"], v.tokens_per_second ? [say("foot.speed", { tps: v.tokens_per_second.toFixed(1) }), "tokens_per_second"] : [], [say("finish." + e.reason) + (e.note ? ` · ${e.note}` : "")]);
    } else if (s) list.push([say("foot.steps", { steps: r.steps.length }), "steps"], [say("foot.tau", { tau: s.tau.toFixed(2) }), "tau"], s.tps ? [say("foot.speed", { tps: s.tps.toFixed(1) }), "tokens_per_second"] : []);
    const text = JSON.stringify([list, r.verdict, language, r.start?.note]);
    if (r.footText === text) return;
    r.footText = text;
    const defined = (words, name) => ({ words, look: "defined", title: say("define." + name) });
    const items = list.filter((x) => x.length).map(([x, name]) => (name ? defined(x, name) : { words: x }));
    const v = r.verdict;
    if (v) {
      if (v.speedup) items.push(defined(say("foot.speedup", { x: v.speedup.toFixed(2) }), "speedup"));
      const best = v.at && v.best?.length ? say("verdict.best") + ": " + v.best.map(([, text, logit]) => `“${visible(text)}” ${logit}`).join(", ") : "";
      items.push({ words: say("verdict." + v.key, readable(v)), look: v.verdict, title: best, go: !!v.at });
    }
    if (r.start?.note) items.push({ words: r.start.note });
    items.forEach((item, i) => { // the elements that are there take the new words
      const tag = item.go ? "BUTTON" : "SPAN";
      let n = r.foot.children[i];
      if (n?.tagName !== tag) {
        const fresh = element(tag.toLowerCase());
        if (item.go) { // a click goes to the step in which the answers part
          fresh.type = "button";
          fresh.addEventListener("click", () => { let n = r.start.ids.length; stageRun(r); jump(Math.max(0, r.steps.findIndex((s) => (n += s.ids.length) >= r.verdict.at))); });
        }
        if (n) n.replaceWith(fresh); else r.foot.append(fresh);
        n = fresh;
      }
      set(n, item.words); n.className = item.look ?? ""; n.title = item.title ?? "";
      if (item.look === "defined") { n.tabIndex = 0; n.dataset.define = item.title; } else { n.removeAttribute("tabindex"); delete n.dataset.define; }
    });
    while (r.foot.children.length > items.length) r.foot.lastChild.remove();
  }
  function reveal(s) { // tokens after the moment on stage are shown, but not yet as text
    if (!run?.spans.length) return;
    const live = follow && !run.finish;
    let upto = run.spans.length;
    if (s && !live) {
      const walked = part(s, "accept", t) * (s.a.length + 0.6);
      upto = 0;
      const n = s.n, taken = t >= score(s).rest - 1e-6 ? Infinity : Math.floor(walked);
      for (const span of run.spans) { const m = +span.dataset.n; if (m < n || (m === n && +span.dataset.i < taken)) upto++; else break; }
      if (k === run.steps.length - 1 && taken === Infinity) upto = run.spans.length;
    }
    if (upto === run.shown) return;
    const [a, b] = upto < run.shown ? [upto, run.shown] : [run.shown, upto];
    for (let i = a; i < b; i++) run.spans[i].classList.toggle("later", i >= upto);
    run.shown = upto;
    const here = run.spans[Math.max(0, upto - 1)], chat = $(".st-chat");
    if (here && chat.scrollHeight > chat.clientHeight + 4) { // keep the moment in sight without moving the page
      const y = here.offsetTop - chat.offsetTop; if (y < chat.scrollTop || y > chat.scrollTop + chat.clientHeight - 40) chat.scrollTop = y - chat.clientHeight / 2;
    }
  }

  /* ---------------------------------------------------------------- why is it so? */
  const undecided = (s, i) => i > 0 && s.gp[s.p[i]] !== 1; // the target could have drawn more than one token there
  const bytes = (label) => (/^(<0x[0-9A-F]{2}>)+$/.test(label) ? label.match(/[0-9A-F]{2}(?=>)/g).map((b) => b.toLowerCase()) : Array.from(new TextEncoder().encode(label), (b) => b.toString(16).padStart(2, "0"))).join(" ");
  function choose(i) { chosen = i; if (i === null) hideWhy(); else showWhy(); refresh(); }
  function hideWhy() { $(".st-why").hidden = true; }
  function showWhy() {
    const s = step(), i = chosen, panel = $(".st-why");
    const bonus = i === BONUS, ghost = i >= s.nodes;
    const raw = bonus ? s.bonus[1] : s.x[i], reason = reasons[bonus ? s.bonus[3] : s.w[i]];
    const slots = { token: visible(raw), v: bonus ? "" : number(s.v[i]), floor: number(s.floor), dp: bonus ? chance(s.bonus[2]) : "" };
    if (!bonus && !ghost && i > 0) {
      const p = s.p[i]; let a = i;
      while (fates[s.f[a]] === "parent rejected") a = s.p[a];
      Object.assign(slots, { parent: visible(s.x[p]), draw: visible(s.gx[p]), dp: chance(s.gp[p]), had: s.gp[p] === 1 ? "" : say("draw.had", { token: visible(raw), p: number(s.q[i]) }), ancestor: visible(s.x[a]) });
    }
    const close = element("button", "st-icon st-close", "×"); close.type = "button"; close.setAttribute("aria-label", say("close")); close.addEventListener("click", () => { choose(null); canvas.focus(); });
    const facts = element("dl");
    const fact = (key, value, hint) => { const dt = element("dt", "", say(key)); if (hint) dt.title = say(hint); facts.append(dt, element("dd", "", value)); };
    fact("node.id", String(bonus ? s.bonus[0] : s.t[i]));
    fact("node.bytes", clip(bytes(raw), 48));
    if (bonus) {
      if (s.bonus[2] !== 1) fact("node.target", number(s.bonus[2]), "node.target.info");
      if (s.top?.length) fact("node.top", s.top.slice(0, 3).map(([, text, p]) => `${visible(text)} ${number(p)}`).join("  "), "node.top.info");
    }
    else {
      if (i > 0) {
        fact(run.start.coupled ? "node.confidence.known" : "node.confidence", number(s.c[i]), run.start.coupled ? "node.confidence.coupled" : "node.confidence.info"); fact("node.value", number(s.v[i]), "node.value.info");
        const siblings = s.kids[s.p[i]].slice().sort((a, b) => s.c[b] - s.c[a] || a - b);
        fact("node.rank", say("node.rank.of", { rank: siblings.indexOf(i) + 1, n: siblings.length }));
      }
      if (!ghost) { if (undecided(s, i)) fact("node.target", number(s.q[i]), "node.target.info"); fact("node.draw", visible(s.gx[i]) + (s.gp[i] === 1 ? "" : "  " + number(s.gp[i]))); fact("node.place", `${s.at + s.depth[i]} · ${s.at + i}`); }
      fact("node.depth", String(s.depth[i]));
      if (sourceOf(s, i)) fact("node.source", say("source." + sourceOf(s, i)));
    }
    panel.replaceChildren(close, element("h3", "", `“${visible(raw)}”`), element("p", "why", say("why." + reason, slots)), facts);
    panel.setAttribute("aria-label", say("why.title"));
    set($(".st-aloud"), `“${visible(raw)}”: ` + say("why." + reason, slots));
    panel.hidden = false;
    const L = layout(s), v = view(s, L, regions(s));
    if (i in L.x) { // where it hides least of the tree, never the node and its path, and not far from it
      const pw = panel.offsetWidth, ph = panel.offsetHeight, path = i >= 0 ? ancestors(s, i) : new Set(s.a);
      const boxes = L.rows.map((j) => ({ x: v.x + L.x[j] * v.s, y: v.y + (L.y[j] - L.h[j] / 2) * v.s, w: L.w[j] * v.s, h: L.h[j] * v.s, weight: j === i || path.has(j) ? 60 : j >= s.nodes ? 1 : 4 }));
      const here = boxes[L.rows.indexOf(i)];
      let best = null;
      for (let x = 8; x <= Math.max(8, box.w - pw - 8); x += 24) for (let y = 8; y <= Math.max(8, box.h - ph - 8); y += 24) {
        const hidden = boxes.reduce((a, b) => a + (x < b.x + b.w + 6 && x + pw > b.x - 6 && y < b.y + b.h + 4 && y + ph > b.y - 4 ? b.weight : 0), 0);
        const far = Math.hypot(x + pw / 2 - here.x - here.w / 2, y + ph / 2 - here.y - here.h / 2) / 60;
        if (!best || hidden + far < best.cost) best = { x, y, cost: hidden + far };
      }
      panel.style.left = best.x + "px"; panel.style.top = best.y + "px";
    }
  }

  /* ---------------------------------------------------------------- what if: the same growth rule on the recorded candidates */
  const wish = { total_token: 0, depth: 0, top_k: 0 };
  const growing = () => ["eagle2", "eagle3"].includes(run?.start?.method) && step()?.nodes > 1;
  /* The tree that another budget would have kept, as far as the recording knows it. Returns the kept rows, the walk over
     them, `unknown` (what was never drafted, if the answer depends on it) and `unverified` (the walk's last row was never judged). */
  function grow(s, { total_token, depth, top_k }) {
    const rank = s.set.expand_by === "confidence" ? s.c : s.v, best = (rows, score) => rows.slice().sort((a, b) => score[b] - score[a] || a - b);
    let beam = [0], made = [], inBeam = new Set(), unknown = null;
    for (let d = 1; d <= depth && beam.length; d++) {
      const level = [];
      for (const b of beam) {
        const kids = best(s.kids[b], s.c);
        if (!s.e[b] || !kids.length) { unknown ??= s.depth[b] >= s.set.depth ? { key: "if.deeper", d: s.set.depth } : { key: "if.beam", token: visible(s.x[b]) }; continue; }
        if (kids.length < top_k && kids.length <= s.set.top_k) unknown ??= kids.length < s.set.top_k ? null : { key: "if.wider", k: s.set.top_k };
        level.push(...kids.slice(0, top_k));
      }
      made.push(...level);
      beam = best(level, rank).slice(0, top_k);
      beam.forEach((b) => inBeam.add(b));
    }
    const kept = new Set([0, ...(s.set.rerank === false ? made.filter((i) => inBeam.has(i)) : best(made, s.v)).slice(0, total_token - 1)]);
    const walk = [0];
    let unverified = false;
    for (;;) {
      const here = walk.at(-1);
      if (here >= s.nodes) { unverified = true; break; }
      const next = s.kids[here].find((c) => kept.has(c) && s.t[c] === s.g[here]);
      if (next === undefined) break;
      walk.push(next);
    }
    return { kept, walk, unknown, unverified };
  }
  function openWhatIf() { const s = step(); if (s) Object.assign(wish, { total_token: Math.max(2, s.nodes), depth: s.set.depth ?? 1, top_k: s.set.top_k ?? 1 }); for (const input of root.querySelectorAll(".st-if input")) input.value = wish[input.name]; tellWhatIf(); }
  function imagined() { return !$(".st-if").hidden && growing() ? grow(step(), wish) : null; }
  function tellWhatIf() {
    const p = $(".st-if-say"), s = step();
    for (const input of root.querySelectorAll(".st-if input")) { input.disabled = !growing(); input.nextElementSibling.textContent = input.value; }
    p.classList.remove("exact", "unknown");
    if (!growing()) { set(p, say("if.none")); return; }
    const { kept, walk, unknown, unverified } = grow(s, wish), slots = { kept: kept.size, a: walk.length - 1, was: s.a.length - 1 };
    if (unknown) { p.classList.add("unknown"); set(p, say("if.unknown", { why: say(unknown.key, unknown) })); }
    else if (unverified) set(p, say("if.least", slots));
    else { p.classList.add("exact"); set(p, say("if.exact", slots)); }
  }
  $(".st-if").addEventListener("input", (e) => { wish[e.target.name] = +e.target.value; tellWhatIf(); paint(); });

  /* ---------------------------------------------------------------- race and cost */
  let raceAt = Infinity, lastRace = 0;
  function truth() {
    const panel = $(".st-truth"), plain = run?.plain;
    panel.hidden = !plain?.steps.length || plain.finish?.reason === "cancelled";
    if (panel.hidden) return;
    const pays = run.verdict?.pays, f = (x) => x.toFixed(2);
    set($(".st-pays"), pays ? say(pays.pays ? "pays.yes" : "pays." + pays.cause, { need: f(pays.need), tau: f(pays.tau), draft: f(pays.draft), verify: f(pays.verify) }) : "");
    if (panel.open) { lanes(); costs(); }
  }
  function lanes() {
    const both = [run, run.plain].map((r) => ((r.story ??= []).length === r.steps.length + 1 ? r.story : (r.story = [...story(r)])));
    const ends = both.map((x) => x.at(-1)[0]), end = Math.max(...ends), most = Math.max(...both.map((x) => x.at(-1)[1]));
    root.querySelectorAll(".st-lane").forEach((lane, i) => {
      const told = (ms) => both[i].findLast((x) => x[0] <= ms) ?? [0, 0, ""], now = told(Math.min(raceAt, end));
      const length = raceAt === Infinity ? told(Math.min(...ends))[1] : now[1]; // at rest the bars stand where the first one was done
      set(lane.querySelector("b"), say("method." + [run, run.plain][i].start.method));
      lane.querySelector("i").style.transform = `scaleX(${length / most})`;
      set(lane.querySelector("span"), say("truth.tokens", { n: now[1], s: (now[0] / 1000).toFixed(2) }));
      set(lane.querySelector("p"), prose(now[2]));
    });
    return end;
  }
  function raceFrame(now) {
    if (raceAt === Infinity || !run?.plain) return;
    raceAt += (now - lastRace) * (speed || 1); lastRace = now;
    if (raceAt >= lanes()) { raceAt = Infinity; lanes(); } else requestAnimationFrame(raceFrame);
  }
  function costs() {
    const c = $(".st-cost canvas"), r = c.getBoundingClientRect(), dpr = Math.min(2, devicePixelRatio || 1), plain = run.verdict?.pays?.plain_ms ?? run.plain.steps.reduce((a, s) => a + sum(s.ms), 0) / run.plain.steps.length;
    if (!r.width) return;
    c.width = Math.round(r.width * dpr); c.height = Math.round(r.height * dpr);
    const pen = canvasPen(c.getContext("2d")); c.getContext("2d").setTransform(dpr, 0, 0, dpr, 0, 0);
    const n = run.steps.length, bw = Math.min(26, (r.width - 2) / n), top = 18, most = Math.max(...run.steps.map((s) => Math.max(sum(s.ms), s.ids.length * plain))) || 1, y = (ms) => r.height - 2 - (ms / most) * (r.height - top - 2);
    pen.text(say("cost"), 0, 11, { size: 12, weight: 600, fill: ink.sub });
    let x = measure(say("cost"), 12, 600) + 18;
    for (const [name, fill] of [["draft", ink["draft-line"]], ["verify", ink.accent], ["other", ink.ghost]]) { pen.rect(x, 3, 9, 9, 2, { fill }); pen.text(say("cost." + name), x + 13, 11, { size: 11, fill: ink.sub }); x += measure(say("cost." + name), 11, 400) + 28; }
    pen.line([[x, 8], [x + 12, 8]], { stroke: ink.bonus, width: 2.5 }); pen.text(say("cost.even"), x + 17, 11, { size: 11, fill: ink.sub });
    run.steps.forEach((s, i) => {
      let at = 0;
      [ink["draft-line"], ink.accent, ink.ghost].forEach((fill, j) => { const h = y(at) - y(at + s.ms[j]); pen.rect(1 + i * bw, y(at + s.ms[j]), Math.max(1, bw - 2), Math.max(0, h - (h > 2 ? 0.6 : 0)), 1, { fill, alpha: i === k ? 1 : 0.8 }); at += s.ms[j]; });
      pen.line([[i * bw, y(s.ids.length * plain)], [i * bw + bw, y(s.ids.length * plain)]], { stroke: ink.bonus, width: 2.5 });
      if (i === k) pen.rect(1 + i * bw, r.height - 2, bw - 2, 2, 1, { fill: ink.ink });
    });
    const s = step();
    set($(".st-cost-say"), s ? say("cost.step", { k: k + 1, d: s.ms[0].toFixed(1), v: s.ms[1].toFixed(1), o: s.ms[2].toFixed(1), n: s.ids.length }) : "");
  }
  $(".st-truth").addEventListener("toggle", () => { truth(); });
  $(".st-cost").addEventListener("click", (e) => { const r = e.currentTarget.getBoundingClientRect(), bw = Math.min(26, (r.width - 2) / run.steps.length), i = Math.floor((e.clientX - r.left) / bw); if (i < run.steps.length) jump(i); });

  /* ---------------------------------------------------------------- pointing */
  function at(x, y) { // the row under a point, in the tree or in the mask
    const s = step(); if (!s) return null;
    const L = layout(s), R = regions(s), v = view(s, L, R);
    if (R.mask) {
      const g = maskGeometry(s, R), i = Math.floor((y - g.y) / g.cell);
      if (x > g.x - g.label && x < g.x + g.side && i >= 0 && i < g.n) return part(s, "mask", t) > 0 && part(s, "commit", t) < 0.01 ? i : null;
    }
    const judged = part(s, "accept", t) >= 0.9, grown = grownAt(s, t);
    return L.rows.find((i) => { const X = v.x + L.x[i] * v.s, Y = v.y + L.y[i] * v.s; return x >= X - 3 && x <= X + L.w[i] * v.s + 3 && Math.abs(y - Y) <= Math.max(7, L.h[i] * v.s / 2 + 2) && (i === BONUS ? judged : s.depth[i] <= grown + 0.01); }) ?? null;
  }
  const where = (e) => { const r = canvas.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
  const fingers = new Map();
  let dragged = 0;
  const scrolls = (e) => e.pointerType === "touch" && !camera?.zoomed && fingers.size < 2; // a finger going up or down moves the page, not the tree
  canvas.addEventListener("pointerdown", (e) => { fingers.set(e.pointerId, where(e)); dragged = 0; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointermove", (e) => {
    const [x, y] = where(e), from = fingers.get(e.pointerId), s = step();
    if (from && s) {
      const dx = x - from[0], dy = scrolls(e) ? 0 : y - from[1];
      dragged += Math.abs(dx) + Math.abs(dy);
      if (dragged > 5) {
        const v = view(s, layout(s), regions(s));
        if (fingers.size === 2) { const [a, b] = [...fingers.keys()], other = fingers.get(a === e.pointerId ? b : a), d0 = Math.hypot(from[0] - other[0], from[1] - other[1]), d1 = Math.hypot(x - other[0], y - other[1]); if (d0 > 8) zoom(d1 / d0, (x + other[0]) / 2, (y + other[1]) / 2); }
        else camera = { s: v.s, x: v.x + dx, y: v.y + dy, zoomed: camera?.zoomed };
        canvas.classList.add("drag"); hideWhy(); fingers.set(e.pointerId, [x, y]); paint();
      }
      return;
    }
    const i = at(x, y);
    canvas.classList.toggle("over", i !== null);
    if (i !== hover) { hover = i; paint(); }
  });
  const lift = (e) => {
    if (!fingers.has(e.pointerId)) return;
    fingers.delete(e.pointerId); canvas.classList.remove("drag");
    if (dragged <= 5 && e.type === "pointerup") { const i = at(...where(e)); if (i !== null) halt(); choose(i === chosen ? null : i); }
  };
  canvas.addEventListener("pointerup", lift); canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => { if (hover !== null) { hover = null; paint(); } });
  canvas.addEventListener("wheel", (e) => { if (!step() || !(e.ctrlKey || e.metaKey || document.activeElement === canvas || camera)) return; e.preventDefault(); zoom(Math.exp(-e.deltaY * 0.0016), ...where(e)); paint(); }, { passive: false });
  canvas.addEventListener("dblclick", (e) => { const i = at(...where(e)); if (i !== null && i >= 0) fold(i); });
  function fold(i) { const s = step(); if (!s || i === null || i < 0 || !s.kids[i]?.length) return; const f = folds.get(s) ?? new Set(); f.has(i) ? f.delete(i) : f.add(i); folds.set(s, f); camera = null; refresh(); }

  root.addEventListener("click", (e) => {
    const b = e.target.closest("[data-act]"); if (b) act(b.dataset.act);
    const p = e.target.closest("[data-phase]"); if (p && step()) { halt(); t = score(step()).phases.find((q) => q.name === p.dataset.phase)?.to ?? t; refresh(); }
    const kept = e.target.closest("[data-keep]"); if (kept) { keep(kept.dataset.keep); $(".st-keep").hidden = true; }
    else if (!e.target.closest('.st-keep,[data-act="keep"]')) $(".st-keep").hidden = true;
    const token = e.target.closest(".tok");
    if (token && token.dataset.n) {
      const r = [...runs.values()].find((q) => q.spans.includes(token));
      stageRun(r); halt(); const n = +token.dataset.n;
      if (r.steps.length) { go(n - 1); const s = step(), i = +token.dataset.i; refresh(); if (n > 0 && s && s.n === n && i >= 0) choose(i < s.a.length - 1 ? s.a[i + 1] : BONUS); }
    }
  });
  $(".st-range").addEventListener("input", (e) => { halt(); go(+e.target.value - 1); refresh(); });
  $(".st-speed").addEventListener("change", (e) => { speed = +e.target.value; if (run) run.clock = 0; refresh(); });
  $(".st-ghost-mode").addEventListener("change", (e) => { ghosts = e.target.value; camera = null; refresh(); });

  /* ---------------------------------------------------------------- keys */
  const KEYS = [["Space", "keys.space"], ["← →", "keys.arrows"], [", .", "keys.phase"], ["Home End", "keys.ends"], ["n", "keys.nodes"], ["Enter", "keys.enter"], ["x", "keys.fold"], ["t PgDn PgUp", "keys.lesson"], ["l", "keys.live"], ["0", "keys.fit"], ["+ −", "keys.zoom"], ["w", "keys.whatif"], ["p", "keys.full"], ["g", "keys.ghosts"], ["Esc", "keys.escape"], ["?", "keys.help"]];
  const byKey = { " ": "play", ArrowLeft: "prevstep", ArrowRight: "nextstep", ",": "prevphase", ".": "nextphase", Home: "first", End: "last", l: "live", t: "lesson", PageDown: "lessonnext", PageUp: "lessonback", 0: "fit", "+": "zoomin", "=": "zoomin", "-": "zoomout", p: "full", w: "whatif", g: "ghosts", "?": "help" };
  function walkNodes(key) {
    const s = step(), L = layout(s), i = chosen ?? 0, visibleKids = (j) => (j >= 0 ? s.kids[j].filter((c) => c in L.x).sort((a, b) => L.y[a] - L.y[b]) : []);
    if (key === "ArrowLeft") return i === BONUS ? s.a.at(-1) : Math.max(0, s.p[i]);
    if (key === "ArrowRight") return visibleKids(i)[0] ?? (i === s.a.at(-1) ? BONUS : i);
    const column = L.rows.filter((j) => L.col[j] === L.col[i]).sort((a, b) => L.y[a] - L.y[b]), c = column.indexOf(i) + (key === "ArrowDown" ? 1 : -1);
    return column[Math.max(0, Math.min(column.length - 1, c))];
  }
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || !root.isConnected) return;
    if (e.isComposing || e.defaultPrevented || (e.key === "Escape" && e.target.closest?.("[role=combobox],[role=listbox]"))) return; // an input method's or a menu's own
    if (e.key === "Escape" && !$(".st-keep").hidden) { $(".st-keep").hidden = true; $('[data-act="keep"]').focus(); return; }
    if (e.key === "Escape" && !$(".st-if").hidden && $(".st-why").hidden) { act("whatif"); return; }
    if (e.key === "Escape") { if (!$(".st-why").hidden) choose(null); else if (!$(".st-help").hidden) act("help"); else if (lesson) act("lessonend"); else if (root.classList.contains("projector")) act("full"); else if (options.onStop) options.onStop(); return; }
    const inside = e.target === canvas;
    if (e.target.closest?.("input:not([type=range]),textarea,select,[contenteditable=true],[role=tab],[role=listbox],[role=slider]") || (e.target.closest?.("button,summary,a") && (e.key === " " || e.key === "Enter"))) return;
    if (e.target.closest?.("input[type=range]") && !root.contains(e.target)) return;
    if (e.target === $(".st-range") && /^(Arrow|Home|End|Page)/.test(e.key)) return;
    if (inside && step()) {
      if (/^Arrow/.test(e.key)) { e.preventDefault(); halt(); choose(walkNodes(e.key)); return; }
      if (e.key === "Enter") { e.preventDefault(); choose(chosen ?? 0); return; }
    }
    if (e.key === "n" && step()) { e.preventDefault(); canvas.focus(); halt(); choose(chosen ?? 0); return; }
    if (e.key === "x" && chosen !== null) { fold(chosen); return; }
    if (/^Page/.test(e.key) && !lesson) return; // they scroll the page
    if (byKey[e.key]) { e.preventDefault(); act(byKey[e.key]); }
  });

  /* ---------------------------------------------------------------- language, size, theme */
  function legend() { // what marks what; the two of a second source only where there is one
    const key = (sample, word) => { const b = element("b"); b.append(sample, " " + say(word)); return b; }, sample = say("legend.sample"), now = language + !!run?.sources;
    if (legend.now === now) return;
    legend.now = now;
    $(".st-legend").replaceChildren(
      ...["draft", "bonus", ...(run?.sources ? [] : ["plain"])].map((o) => key(element("span", "tok " + o, sample), "origin." + o)),
      ...(run?.sources ? ["lookup", "both"].map((o) => key(element("span", "chip " + o, sample), "legend." + o)) : []),
      key(element("s", "chip", sample), "legend.rejected"), key(element("span", "chip never", sample), "legend.never"));
  }
  function translate() {
    root.querySelectorAll("[data-word]").forEach((n) => set(n, say(n.dataset.word)));
    root.querySelectorAll("[data-word-label]").forEach((n) => n.setAttribute("aria-label", say(n.dataset.wordLabel)));
    root.querySelectorAll("[data-word-title]").forEach((n) => (n.title = say(n.dataset.wordTitle)));
    canvas.setAttribute("aria-label", say("canvas.label"));
    const help = $(".st-help"), dl = element("dl"), close = element("button", "st-icon st-close", "×");
    close.type = "button"; close.dataset.act = "help"; close.setAttribute("aria-label", say("close"));
    for (const [key, word] of KEYS) { const dt = element("dt"); key.split(" ").forEach((q) => dt.append(element("kbd", "", q), " ")); dl.append(dt, element("dd", "", say(word))); }
    help.replaceChildren(close, element("h3", "", say("help")), dl);
    legend();
    for (const r of runs.values()) { if (r.turn) { appendText(r); r.spans.forEach((n) => (n.title = say("origin." + n.classList[1]))); } }
    root.lang = language === "zh" ? "zh-CN" : "en";
    if (chosen !== null && !$(".st-why").hidden) showWhy();
    tellLesson();
    tell.line = "";
    paint();
  }
  function refresh() {
    const s = step();
    if (troubled()) set($(".st-aloud"), caption(s));
    else if (chosen !== null) paint();
    else if (lesson) paint();
    else if (s && !playing && !(follow && run && !run.finish)) set($(".st-aloud"), aloud(s));
    else if (run?.finish && follow && s) set($(".st-aloud"), aloud(s));
    paint();
  }
  const resize = () => { const r = canvas.getBoundingClientRect(); box = { w: Math.round(r.width), h: Math.round(r.height) }; if (chosen !== null && !$(".st-why").hidden) showWhy(); tell.line = ""; paint(); };
  new ResizeObserver(resize).observe(canvas);
  new MutationObserver(() => requestAnimationFrame(palette)).observe(document.body, { attributes: true, attributeFilter: ["class"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => requestAnimationFrame(palette));
  document.addEventListener("visibilitychange", () => { last = performance.now(); paint(); });
  document.fonts?.ready.then(() => { widths.clear(); for (const r of runs.values()) for (const s of r.steps) layouts.delete(s); paint(); });

  /* ---------------------------------------------------------------- keeping */
  function save(name, blob) { const a = element("a"); a.href = URL.createObjectURL(blob); a.download = name; a.click(); setTimeout(() => URL.revokeObjectURL(a.href), 2000); }
  async function keep(kind) {
    const name = `eagle-${run?.start?.method ?? "run"}-${run?.name ?? ""}` + (["svg", "png", "graphml"].includes(kind) ? `-step${k + 1}` : "");
    if (kind === "open") return $(".st-file").click();
    if (!step()) return;
    if (kind === "svg") return save(name + ".svg", new Blob([svg()], { type: "image/svg+xml" }));
    if (kind === "png") {
      const image = new Image(); image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svg());
      await image.decode();
      const c = document.createElement("canvas"); c.width = image.width * 2; c.height = image.height * 2; c.getContext("2d").drawImage(image, 0, 0, c.width, c.height);
      return c.toBlob((blob) => save(name + ".png", blob), "image/png");
    }
    const kept = await options.onKeep(visit, kind, run.name, k, language);
    if (kept?.text) save(kept.name, new Blob([kept.text], { type: kept.type }));
    else if (kept?.error) { note = { key: "status.error", text: kept.error }; refresh(); }
  }
  async function openFile(file) { // read here, judged by the server, which answers with a message for the stage or a sentence
    const stream = file.name.endsWith(".gz") ? file.stream().pipeThrough(new DecompressionStream("gzip")) : file.stream();
    let text;
    try { text = await new Response(stream).text(); } catch { text = "\u0000"; }
    const told = await options.onOpen(visit, file.name, text);
    if (told?.message) feed(told.message);
    else { note = { key: "keep.bad", name: file.name, text: told?.error ?? "" }; halt(); refresh(); }
  }
  $(".st-file").addEventListener("change", (e) => { if (e.target.files[0]) openFile(e.target.files[0]); e.target.value = ""; });
  $('.st-tools [data-act="lesson"]').hidden = !options.onLesson;
  root.querySelectorAll(".st-keep [data-keep]").forEach((b) => (b.hidden = b.dataset.keep === "open" ? !options.onOpen : !["svg", "png"].includes(b.dataset.keep) && !options.onKeep));
  const readable = (facts) => Object.fromEntries(Object.entries(facts).map(([a, b]) => [a, typeof b === "string" ? visible(b) : b]));
  function about() { // the caption of a picture: method, settings, pair, hardware, verdict
    const a = run.start, own = step().set, tree = ["total_token", "depth", "top_k"].filter((name) => a.uses.includes(name)).map((name) => [name.replace("_k", "-k"), own[name]]), draw = [["T", a.sampling.temperature], ["seed", a.sampling.seed]];
    const list = (pairs) => pairs.filter(([, v]) => typeof v === "number").map(([name, v]) => `${name} ${v}`).join(" · ");
    return [say("method." + a.method), list(tree), list(draw), a.coupled ? say("coupled.known") : "", prose(a.target ?? ""), a.where, say("step.of", { k: k + 1, n: run.steps.length }), run.verdict ? say("verdict." + run.verdict.key, readable(run.verdict)) : say("verdict.none")].filter(Boolean).join("  ·  ");
  }
  function picture(pen) { // what is kept shows all of a tree, unless the reader chose a part of it
    const was = whole;
    whole = !camera;
    try { draw(pen); } finally { whole = was; }
  }
  function svg() {
    const parts = [], caption_ = $(".st-caption").textContent;
    picture(svgPen(parts));
    const head = []; svgPen(head).text(caption_, 16, box.h + 22, { size: 13, weight: 600, fill: ink.ink });
    const lines = [], room = box.w - 32;
    for (const part of about().split("  ·  ")) {
      const longer = lines.length ? lines.at(-1) + "  ·  " + part : part;
      if (lines.length && measure(longer, 11, 400) < room) lines[lines.length - 1] = longer; else lines.push(part);
    }
    lines.forEach((line, i) => svgPen(head).text(line, 16, box.h + 42 + 16 * i, { size: 11, fill: ink.sub }));
    const high = box.h + 44 + 16 * lines.length;
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${box.w}" height="${high}" viewBox="0 0 ${box.w} ${high}" font-family="${ink.font.replace(/"/g, "'")}"><rect width="100%" height="100%" fill="${ink.surface}"/>${parts.join("")}${head.join("")}</svg>`;
  }

  const api = {
    feed, act, jump, choose, svg, visible,
    seek(index, beats) { halt(); go(index, beats); refresh(); },
    speak(to) { if (words[to]) { language = to; translate(); } },
    get state() { const s = step(); return { run: run?.name ?? null, k, t, steps: run?.steps.length ?? 0, playing, follow, phase: s ? phaseAt(s, Math.min(t, score(s).total)).name : null, chosen, hover, note, lesson: lesson?.key ?? null, finished: !!run?.finish, language, known: !!visit, total: s ? score(s).total : 0 }; },
    /* where a row is drawn, in the page's pixels */
    locate(i) { const s = step(), L = layout(s), v = view(s, L, regions(s)), r = canvas.getBoundingClientRect(); return i in L.x ? { x: r.left + v.x + (L.x[i] + L.w[i] / 2) * v.s, y: r.top + v.y + L.y[i] * v.s, scale: v.s } : null; },
    whatIf(want) { return growing() ? (({ kept, walk, unknown, unverified }) => ({ kept: [...kept].sort((a, b) => a - b), walk, unknown: unknown?.key ?? null, unverified }))(grow(step(), want)) : null; },
    get drawn() { const s = step(); return s ? layout(s).rows.length - 1 : 0; },
  };
  root.stage = api;
  palette(); resize(); translate();
  return api;
}
