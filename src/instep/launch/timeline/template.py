"""The HTML, style and script of the page; `page` fills in the data."""

from __future__ import annotations

from string import Template

PAGE = Template("""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<meta name="viewport" content="width=device-width">
<style>
:root { color-scheme: light dark; --text: #1f2933; --soft: #52606d; --back: #fff; --line: #cbd2d9;
  --own: #e4e9ee; --mark: #fdf0e7; $light }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e7eb; --soft: #9fb0c0; --back: #14191f; --line: #3a4652; --own: #2c3640;
    --mark: #3a2a20; $dark }
}
body { font: 14px/1.45 system-ui, sans-serif; margin: 16px 20px; color: var(--text);
  background: var(--back) }
h1 { font-size: 20px; margin: 0 0 8px }
.advice { font-size: 15px; margin: 4px 0; max-width: 110ch }
.advice:first-of-type { font-size: 17px; font-weight: 600 }
table { border-collapse: collapse; width: 100%; margin: 12px 0; font-variant-numeric: tabular-nums }
th { text-align: left; font-weight: 500; color: var(--soft); padding: 2px 10px 2px 6px }
td { padding: 3px 10px 3px 6px; white-space: nowrap }
td.bar, th.bar { width: 55% }
td.bar div { display: flex; height: 16px; background: var(--own); overflow: hidden }
tr.late { background: var(--mark); font-weight: 600 }
#legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 }
#legend i { display: inline-block; width: 22px; height: 12px; margin-right: 6px;
  vertical-align: -1px }
.k-late { background: repeating-linear-gradient(135deg, var(--late) 0 5px, var(--late2) 5px 8px) }
$classes
#bar { display: flex; gap: 6px; align-items: center; margin: 8px 0; color: var(--soft) }
button { font: inherit; padding: 1px 10px; color: var(--text); background: var(--own);
  border: 1px solid var(--line); border-radius: 4px; cursor: pointer;
  white-space: nowrap }
canvas { width: 100%; border: 1px solid var(--line); display: block; cursor: grab }
canvas:focus-visible { outline: 2px solid var(--comm) }
#tip { position: fixed; display: none; pointer-events: none; max-width: 560px; padding: 6px 10px;
  white-space: pre-wrap; overflow-wrap: anywhere; background: var(--back); color: var(--text);
  border: 1px solid var(--soft); border-radius: 4px; box-shadow: 0 2px 8px #0005 }
</style></head><body>
<h1>$title</h1>
$summary
<div id="legend">$legend</div>
<div id="bar"><button id="in">Zoom in</button><button id="out">Zoom out</button>
<button id="all">Show all</button> <span>Wheel: zoom. Drag or arrow keys: move. Double click: show
all. Point at a block for its call; the same call of the other ranks is outlined. A column of narrow
blocks shows each kind as high as its part of the time.</span></div>
<canvas id="c" tabindex="0" role="img" aria-label="Timeline: the ranks one above the other">
</canvas><div id="tip"></div>
<script>
"use strict";
const data = $data, ranks = data.ranks, kinds = data.kinds, names = data.names;
const canvas = document.getElementById("c"), tip = document.getElementById("tip");
const end = data.end, many = ranks.length, TOP = 24, LEFT = 116, GAP = many > 200 ? 1 : 4;
const MAIN = many <= 40 ? 28 : many <= 200 ? 12 : 4, THIN = many <= 40 ? 7 : 3;
let from = 0, to = end, width = 800, pending = false, shown = null, colors = {};
// Lanes: events in the order of their begins, with the latest end so far for the search.
const lanes = []; let height = TOP;
ranks.forEach((rank, k) => {
  for (let n = 0; n < rank.lanes; n++) {
    const tall = n ? THIN : MAIN;
    lanes.push({ rank: k, y: height, h: tall, events: [], ends: [] }); height += tall + 1;
  }
  height += GAP;
});
const byMeeting = new Map();
for (const e of data.events) {
  const lane = lanes[e[0]], last = lane.ends.length ? lane.ends[lane.ends.length - 1] : 0;
  lane.events.push(e); lane.ends.push(Math.max(last, e[1] + e[2]));
  if (e[6] >= 0) {
    if (!byMeeting.has(e[6])) byMeeting.set(e[6], []);
    byMeeting.get(e[6]).push(e);
  }
}
function first(lane, t) {  // the first event that may end after t
  let low = 0, high = lane.ends.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (lane.ends[mid] < t) low = mid + 1; else high = mid;
  }
  return low;
}
const x = t => LEFT + (t - from) / (to - from) * (width - LEFT);
const time = px => from + (px - LEFT) / (width - LEFT) * (to - from);
function text(us, step) {
  const size = Math.max(us, step || 0);
  const [unit, name] = size >= 1e6 ? [1e6, " s"] : size >= 1e3 ? [1e3, " ms"] : [1, " \\u00b5s"];
  const digits = step ? Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9)) : 2;
  return (us / unit).toFixed(Math.min(digits, 6)) + name;
}
function readColors() {
  const style = getComputedStyle(document.documentElement), ratio = window.devicePixelRatio || 1;
  for (const name of ["text", "soft", "back", "line", "own", "mark", "late", "late2"])
    colors[name] = style.getPropertyValue("--" + name).trim();
  colors.kinds = kinds.map(kind => style.getPropertyValue("--" + kind[0]).trim());
  const tile = document.createElement("canvas"), g = tile.getContext("2d");
  tile.width = tile.height = 8 * ratio; g.scale(ratio, ratio);
  g.fillStyle = colors.late; g.fillRect(0, 0, 8, 8);
  g.strokeStyle = colors.late2; g.lineWidth = 2; g.beginPath();
  for (const k of [-8, 0, 8]) { g.moveTo(k - 2, 10); g.lineTo(k + 10, -2); }
  g.stroke();
  colors.hatch = g.createPattern(tile, "repeat");
  colors.hatch.setTransform(new DOMMatrix().scale(1 / ratio));
}
function drawLane(g, lane) {
  if (lane.h === MAIN) {
    g.fillStyle = colors.own; g.fillRect(LEFT, lane.y, width - LEFT, lane.h);
  }
  // Blocks narrower than a pixel are added up, so that a long run stays quick and true.
  const columns = Math.ceil(width) + 1, thin = new Map();
  for (let k = first(lane, from); k < lane.events.length; k++) {
    const e = lane.events[k];
    if (e[1] > to) break;
    const left = Math.max(LEFT, x(e[1])), right = Math.min(width, x(e[1] + e[2]));
    if (right <= LEFT) continue;
    if (right - left < 1) {
      if (!thin.has(e[3])) thin.set(e[3], new Float32Array(columns));
      thin.get(e[3])[Math.floor(left)] += Math.max(right - left, 0.02);
      continue;
    }
    g.fillStyle = e[3] === 0 ? colors.hatch : colors.kinds[e[3]];
    g.fillRect(left, lane.y, right - left, lane.h);
    if (right - left > 60 && lane.h > 16) {
      const label = e[3] === 0 && e[7] >= 0 ? "waits for rank " + e[7] : names[e[4]];
      g.save(); g.beginPath(); g.rect(left, lane.y, right - left - 4, lane.h); g.clip();
      if (e[3] === 0) {  // a quiet ground below the words
        g.fillStyle = colors.late; g.fillRect(left + 2, lane.y, g.measureText(label).width + 6,
          lane.h);
      }
      g.fillStyle = kinds[e[3]][2]; g.fillText(label, left + 5, lane.y + lane.h / 2 + 1);
      g.restore();
    }
  }
  // A pixel of them is a column: each kind as high as its part of the time.
  const base = new Float32Array(columns);
  for (const kind of [...thin.keys()].sort()) {
    const cover = thin.get(kind);
    g.fillStyle = colors.kinds[kind];
    for (let k = LEFT; k < columns; k++) {
      if (!cover[k]) continue;
      const tall = Math.min(lane.h - base[k], Math.max(1, cover[k] * lane.h));
      base[k] += tall; g.fillRect(k, lane.y + lane.h - base[k], 1, tall);
    }
  }
}
function outline(g, e) {
  const lane = lanes[e[0]], left = Math.max(LEFT, x(e[1])), right = Math.min(width, x(e[1] + e[2]));
  if (right < LEFT || left > width) return;
  g.strokeRect(left - 1, lane.y - 1, Math.max(2, right - left) + 2, lane.h + 2);
}
function draw() {
  pending = false;
  const ratio = window.devicePixelRatio || 1, g = canvas.getContext("2d");
  width = canvas.clientWidth;
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
  g.scale(ratio, ratio); g.font = "12px system-ui, sans-serif"; g.textBaseline = "middle";
  g.fillStyle = colors.back; g.fillRect(0, 0, width, height);
  for (const lane of lanes) drawLane(g, lane);
  if (x(data.begin) > LEFT) {  // the start of the ranks, which the summary leaves out
    g.globalAlpha = 0.6; g.fillStyle = colors.back;
    g.fillRect(LEFT, TOP, Math.min(width, x(data.begin)) - LEFT, height); g.globalAlpha = 1;
  }
  const raw = (to - from) / Math.max(2, (width - LEFT) / 130), power = 10 ** Math.floor(
    Math.log10(raw)), step = [1, 2, 5, 10].map(f => f * power).find(s => s >= raw);
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
    g.fillStyle = colors.line; g.fillRect(x(t), TOP - 6, 1, height);
    g.fillStyle = colors.soft; g.textAlign = x(t) > width - 70 ? "right" : "left";
    g.fillText(text(t, step), x(t) + (x(t) > width - 70 ? -4 : 4), TOP / 2);
  }
  g.textAlign = "left";
  g.fillStyle = colors.back; g.fillRect(0, TOP - 1, LEFT, height);
  const skip = Math.ceil(13 / (MAIN + GAP + 1));
  lanes.filter(lane => lane.h === MAIN).forEach((lane, k) => {
    const rank = ranks[lane.rank];
    if (rank.late) {
      g.fillStyle = colors.mark; g.fillRect(0, lane.y, LEFT - 2, lane.h);
      g.fillStyle = colors.late; g.fillRect(0, lane.y, 4, lane.h);
    }
    if (k % skip && !rank.late) return;
    g.fillStyle = colors.text; g.font = (rank.late ? "600 " : "") + "12px system-ui, sans-serif";
    g.fillText("rank " + rank.rank + (rank.late ? " \\u2190 late" : ""), 8,
      lane.y + lane.h / 2 + 1);
  });
  if (shown) {
    g.save(); g.beginPath(); g.rect(LEFT - 2, TOP - 4, width, height); g.clip();
    g.strokeStyle = colors.text; g.lineWidth = 2;
    for (const e of shown[6] >= 0 ? byMeeting.get(shown[6]) : [shown]) outline(g, e);
    g.restore();
  }
}
function redraw() { if (!pending) { pending = true; requestAnimationFrame(draw); } }
function hit(ev) {
  const box = canvas.getBoundingClientRect(), px = ev.clientX - box.left, py = ev.clientY - box.top;
  const lane = lanes.find(l => py >= l.y && py < l.y + l.h + 1);
  if (!lane || px < LEFT) return null;
  const t = time(px), near = 2 * (to - from) / width;
  let best = null, most = Infinity;
  for (let k = first(lane, t - near); k < lane.events.length; k++) {
    const e = lane.events[k], off = Math.max(0, e[1] - t, t - e[1] - e[2]);
    if (e[1] > t + near) break;
    if (off <= near && off <= most) { best = e; most = off; }
  }
  return best;
}
function describe(e) {
  const rank = ranks[lanes[e[0]].rank].rank, kind = kinds[e[3]];
  const head = e[3] === 0 && e[7] >= 0 ? "rank " + rank + " waits for rank " + e[7]
    : "rank " + rank + ": " + kind[1];
  const step = e[8] > 0 || e[9] > 0 ? "\\nepoch " + e[8] + ", step " + e[9] : "";
  return head + "\\nfor " + text(e[2]) + ", from " + text(e[1], Math.max(1, e[2] / 10))
    + (e[5] ? "\\n" + data.calls[e[5]] : "") + step;
}
function zoom(t, factor) {
  const span = Math.min(end, Math.max(2, (to - from) * factor)), part = (t - from) / (to - from);
  from = Math.max(0, Math.min(end - span, t - span * part)); to = from + span; redraw();
}
function move(us) {
  const by = Math.max(-from, Math.min(end - to, us)); from += by; to += by; redraw();
}
function all() { from = 0; to = end; redraw(); }
let drag = null;
canvas.addEventListener("wheel", ev => {
  const px = ev.clientX - canvas.getBoundingClientRect().left;
  if (px < LEFT) return;  // over the labels the wheel scrolls the page
  ev.preventDefault();
  if (Math.abs(ev.deltaX) > Math.abs(ev.deltaY)) move(ev.deltaX / (width - LEFT) * (to - from));
  else zoom(time(px), Math.exp(Math.max(-0.5, Math.min(0.5, ev.deltaY / 400))));
}, { passive: false });
canvas.onpointerdown = ev => { drag = ev.clientX; canvas.setPointerCapture(ev.pointerId); };
canvas.onpointerup = canvas.onpointercancel = () => { drag = null; };
canvas.onpointermove = ev => {
  if (drag !== null) {
    move((drag - ev.clientX) / (width - LEFT) * (to - from)); drag = ev.clientX; return;
  }
  const e = hit(ev);
  if (e !== shown) { shown = e; redraw(); }
  tip.style.display = e ? "block" : "none";
  if (e) {
    tip.textContent = describe(e);
    tip.style.left = Math.min(ev.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
    const below = ev.clientY + 18;
    tip.style.top = (below + tip.offsetHeight < window.innerHeight ? below
      : ev.clientY - tip.offsetHeight - 12) + "px";
  }
};
canvas.onpointerleave = () => { tip.style.display = "none"; shown = null; redraw(); };
canvas.ondblclick = all;
canvas.onkeydown = ev => {
  const part = (to - from) / 8, middle = (from + to) / 2;
  const act = { ArrowLeft: () => move(-part), ArrowRight: () => move(part), "0": all,
    "+": () => zoom(middle, 0.7), "=": () => zoom(middle, 0.7), "-": () => zoom(middle, 1.4) };
  if (act[ev.key]) { ev.preventDefault(); act[ev.key](); }
};
document.getElementById("in").onclick = () => zoom((from + to) / 2, 0.5);
document.getElementById("out").onclick = () => zoom((from + to) / 2, 2);
document.getElementById("all").onclick = all;
window.onresize = redraw;
matchMedia("(prefers-color-scheme: dark)").onchange = () => { readColors(); redraw(); };
readColors(); draw();
</script></body></html>
""")
