"""One self-contained HTML page that draws a timeline: no script or style from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from string import Template

from instep.launch.timeline.events import Event

MOST = 200_000
"""The page draws this many events, the longest."""

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<style>
body { font: 14px system-ui, sans-serif; margin: 16px; color: #1f2933; background: #fff }
pre { background: #f4f6f8; padding: 8px 12px; overflow-x: auto }
canvas { width: 100%; border: 1px solid #cbd2d9; display: block; cursor: grab }
#tip { min-height: 3em; white-space: pre-wrap; font-family: monospace }
</style></head><body>
<h1>$title</h1>
<pre>$summary</pre>
<p>Wheel: zoom. Drag: move. Double click: everything.</p>
<canvas id="c"></canvas><div id="tip"></div>
<script>
const data = $data, rows = data.rows, events = data.events, names = data.names;
const canvas = document.getElementById("c"), tip = document.getElementById("tip");
const H = 22, TOP = 24, LEFT = 110, end = Math.max(1, ...events.map(e => e[1] + e[2]));
let from = 0, to = end, width = 800;
const hue = name => [...name].reduce((h, c) => (h * 31 + c.charCodeAt(0)) % 360, 7);
const x = t => LEFT + (t - from) / (to - from) * (width - LEFT);
const text = us => us >= 1e6 ? (us / 1e6).toFixed(3) + " s" : us >= 1e3 ? (us / 1e3).toFixed(2)
  + " ms" : us.toFixed(0) + " us";
function draw() {
  const scale = window.devicePixelRatio || 1, height = TOP + rows.length * H;
  width = canvas.clientWidth;
  canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = height + "px";
  const g = canvas.getContext("2d");
  g.scale(scale, scale); g.font = "12px system-ui, sans-serif"; g.textBaseline = "middle";
  rows.forEach((row, k) => {
    g.fillStyle = k % 2 ? "#f4f6f8" : "#fff"; g.fillRect(0, TOP + k * H, width, H);
  });
  for (const [row, start, length, name] of events) {
    if (start + length < from || start > to) continue;
    const left = Math.max(LEFT, x(start)), right = Math.min(width, x(start + length));
    g.fillStyle = "hsl(" + hue(names[name]) + " 55% 62%)";
    g.fillRect(left, TOP + row * H + 2, Math.max(1, right - left), H - 4);
    if (right - left > 60) {
      g.save(); g.beginPath(); g.rect(left, TOP + row * H, right - left, H); g.clip();
      g.fillStyle = "#1f2933"; g.fillText(names[name], left + 4, TOP + row * H + H / 2);
      g.restore();
    }
  }
  g.fillStyle = "#fff"; g.fillRect(0, TOP, LEFT, height); g.fillStyle = "#1f2933";
  rows.forEach((row, k) => g.fillText(row, 4, TOP + k * H + H / 2));
  for (let k = 0; k < 5; k++) {
    const t = from + (to - from) * k / 5; g.fillText(text(t), x(t), TOP / 2);
  }
}
function hit(ev) {
  const box = canvas.getBoundingClientRect(), px = ev.clientX - box.left;
  const row = Math.floor((ev.clientY - box.top - TOP) / H);
  const t = from + (px - LEFT) / (width - LEFT) * (to - from), near = (to - from) / width;
  return events.find(e => e[0] === row && e[1] - near <= t && t <= e[1] + e[2] + near);
}
let drag = null;
canvas.onwheel = ev => {
  ev.preventDefault();
  const px = ev.clientX - canvas.getBoundingClientRect().left;
  const t = from + (px - LEFT) / (width - LEFT) * (to - from), f = ev.deltaY > 0 ? 1.25 : 0.8;
  from = Math.max(0, t - (t - from) * f); to = Math.min(end, t + (to - t) * f); draw();
};
canvas.onmousedown = ev => { drag = [ev.clientX, from, to]; };
window.onmouseup = () => { drag = null; };
canvas.onmousemove = ev => {
  if (drag) {
    let move = (drag[0] - ev.clientX) / (width - LEFT) * (drag[2] - drag[1]);
    move = Math.max(-drag[1], Math.min(end - drag[2], move));
    from = drag[1] + move; to = drag[2] + move; draw(); return;
  }
  const e = hit(ev);
  tip.textContent = e ? rows[e[0]] + "  " + text(e[1]) + "  for " + text(e[2]) + "\\n"
    + (data.calls[e[4]] || names[e[3]]) : "";
};
canvas.ondblclick = () => { from = 0; to = end; draw(); };
window.onresize = draw; draw();
</script></body></html>
""")


def format_html(title: str, events: Iterable[Event], summary: Sequence[str]) -> str:
    """The page. A rank's tracks lie one below the other: phases, then collectives."""
    shown = sorted(events, key=lambda event: -float(event["dur"]))[:MOST]
    shown.sort(key=lambda event: float(event["ts"]))
    tracks = sorted({(event["pid"], event["tid"]) for event in shown})
    rows = {track: k for k, track in enumerate(tracks)}
    names: dict[str, int] = {}
    calls: dict[str, int] = {"": 0}
    drawn = []
    for event in shown:
        call = event.get("args", {}).get("call", "")
        drawn.append(
            [
                rows[event["pid"], event["tid"]],
                round(event["ts"], 1),
                round(event["dur"], 1),
                names.setdefault(event["name"], len(names)),
                calls.setdefault(call, len(calls)),
            ]
        )
    labels = [f"rank {rank}" + ("" if tid else " phases") for rank, tid in tracks]
    data = {"rows": labels, "events": drawn, "names": [*names], "calls": [*calls]}
    # "</script>" in a string would end the script.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return _PAGE.substitute(title=escape(title), summary=escape("\n".join(summary)), data=text)
