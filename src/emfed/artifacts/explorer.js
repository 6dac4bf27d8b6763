"use strict";
// Panels among which the reader chooses. Everything is drawn here, from the numbers in the page.
(() => {
  const sample = document.createElement("div");
  sample.innerHTML = "<svg></svg>";
  const SVG = sample.firstChild.namespaceURI; // so that no address stands in the page
  const make = (name, attributes, ...inside) => {
    const svg = ["svg", "path", "line", "text", "circle", "g"].includes(name);
    const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...inside);
    return node;
  };
  const power = (exponent) => {
    const digits = String(exponent).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");
    return exponent === 0 ? "1" : exponent === 1 ? "10" : `10${digits}`;
  };
  const short = (value) =>
    value >= 0.01 && value < 1e6
      ? Number(value.toPrecision(3)).toLocaleString("en")
      : value.toExponential(1).replace("e-", "e−").replace("e+", "e");

  const explore = (box) => {
    const data = JSON.parse(box.querySelector("script").textContent);
    const hidden = new Set();
    const chooser = (name, choices) => {
      const select = make("select", {}, ...choices.map((c) => make("option", { value: c }, c)));
      select.addEventListener("change", draw);
      return [make("label", {}, name, select), select];
    };
    const firsts = Object.keys(data.panels);
    const [firstLabel, first] = chooser(data.names[0], firsts);
    const [secondLabel, second] = chooser(data.names[1], Object.keys(data.panels[firsts[0]]));
    const swatch = (look) =>
      make("i", {}, make("svg", { viewBox: "0 0 26 8", width: 26, height: 8 },
        look.dot ? make("circle", { cx: 13, cy: 4, r: 4, fill: look.colour })
          : make("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke: look.colour, "stroke-width": 2.5, "stroke-dasharray": look.dash })));
    const methods = Object.entries(data.looks).map(([label, look]) => {
      const tick = make("input", { type: "checkbox" });
      tick.checked = true;
      tick.addEventListener("change", () => {
        tick.checked ? hidden.delete(label) : hidden.add(label);
        draw();
      });
      return make("label", {}, tick, swatch(look), label);
    });
    const chart = make("div", {});
    const told = make("output", { "aria-live": "off" });
    box.append(
      make("div", { class: "controls" }, firstLabel, secondLabel),
      chart,
      told,
      make("fieldset", { class: "methods", "aria-label": "shown" }, ...methods),
    );
    box.hidden = false;

    function draw() {
      const panel = data.panels[first.value][second.value];
      const shown = panel.series.filter((s) => !hidden.has(s.label));
      const width = Math.max(280, chart.clientWidth), height = Math.min(460, Math.max(300, width * 0.56));
      const left = 58, right = 12, top = 12, bottom = 44;
      const known = (values) => values.filter((v) => v !== null && v > 0);
      // Axes follow all series, so that nothing moves when one is hidden.
      const xs = panel.series.flatMap((s) => known(s.x));
      const ys = panel.series.flatMap((s) => known(s.y));
      const range = (values) => {
        const low = Math.log10(Math.min(...values)), high = Math.log10(Math.max(...values));
        return [low - 0.03 * (high - low), high + 0.03 * (high - low) + 1e-9];
      };
      const [x0, x1] = range(xs), [y0, y1] = range(ys);
      const x = (v) => left + ((Math.log10(v) - x0) / (x1 - x0)) * (width - left - right);
      const y = (v) => top + ((y1 - Math.log10(Math.max(v, 10 ** y0))) / (y1 - y0)) * (height - top - bottom);
      const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
        "aria-label": `${panel.y} against ${panel.x}, ${first.value}` });
      const ticks = (low, high, most) => {
        const every = Math.max(1, Math.ceil((high - low) / most)), found = [];
        for (let e = Math.ceil(low); e <= high; e += every) found.push(e);
        return found;
      };
      for (const e of ticks(x0, x1, width / 70)) {
        const at = x(10 ** e);
        svg.append(make("line", { x1: at, x2: at, y1: top, y2: height - bottom, stroke: "#e3e6e9" }),
          make("text", { x: at, y: height - bottom + 18, "text-anchor": "middle", fill: "currentColor" }, power(e)));
      }
      for (const e of ticks(y0, y1, 8)) {
        const at = y(10 ** e);
        svg.append(make("line", { x1: left, x2: width - right, y1: at, y2: at, stroke: "#e3e6e9" }),
          make("text", { x: left - 7, y: at + 4, "text-anchor": "end", fill: "currentColor" }, power(e)));
      }
      svg.append(
        make("text", { x: (left + width - right) / 2, y: height - 7, "text-anchor": "middle", fill: "currentColor" }, panel.x),
        make("text", { transform: `translate(13 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle", fill: "currentColor" }, panel.y),
      );
      const path = (xs, ys) => xs.map((v, k) => v === null || ys[k] === null ? null
        : `${k && xs[k - 1] !== null ? "L" : "M"}${x(v).toFixed(1)} ${y(ys[k]).toFixed(1)}`).filter(Boolean).join("");
      const points = [];
      for (const s of shown) {
        const look = data.looks[s.label];
        if (s.low && s.line)
          svg.append(make("path", { d: `${path(s.x, s.high)}${path([...s.x].reverse(), [...s.low].reverse()).replace("M", "L")}Z`,
            fill: look.colour, opacity: 0.14 }));
        if (s.line)
          svg.append(make("path", { d: path(s.x, s.y), fill: "none", stroke: look.colour, "stroke-width": 2, "stroke-dasharray": look.dash, "stroke-linejoin": "round" }));
        s.x.forEach((v, k) => {
          if (v === null || s.y[k] === null) return;
          if (!s.line) svg.append(make("circle", { cx: x(v), cy: y(s.y[k]), r: 5, fill: look.colour, stroke: "#fff" }));
          points.push([x(v), y(s.y[k]), s, k]);
        });
      }
      const mark = make("circle", { r: 6, fill: "none", stroke: "currentColor", "stroke-width": 1.5, visibility: "hidden" });
      svg.append(mark);
      svg.addEventListener("pointermove", (event) => {
        const frame = svg.getBoundingClientRect();
        const px = ((event.clientX - frame.left) * width) / frame.width, py = ((event.clientY - frame.top) * height) / frame.height;
        let best = null, least = 40 ** 2;
        for (const point of points) {
          const far = (point[0] - px) ** 2 + (point[1] - py) ** 2;
          if (far < least) [best, least] = [point, far];
        }
        mark.setAttribute("visibility", best ? "visible" : "hidden");
        if (!best) return;
        const [cx, cy, s, k] = best;
        mark.setAttribute("cx", cx);
        mark.setAttribute("cy", cy);
        const band = s.low ? ` (${short(s.low[k])} to ${short(s.high[k])} over seeds)` : "";
        told.textContent = `${s.label}: ${short(s.y[k])} ${panel.y}${band} at ${short(s.x[k])} ${panel.x}`;
      });
      chart.replaceChildren(svg);
    }
    let drawn = 0;
    new ResizeObserver(() => {
      if (chart.clientWidth !== drawn) draw();
      drawn = chart.clientWidth;
    }).observe(chart);
    draw();
  };
  document.querySelectorAll(".explorer").forEach(explore);
})();
