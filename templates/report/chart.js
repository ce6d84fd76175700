// Thousands of rectangles on a canvas, with axes, zoom, hover and choice. Rectangles are given in the units of the axes:
// item i is [x0[i], x1[i]) by [y0[i], y1[i]); `colours[i]` names a colour of the style sheet.
class Chart {
  // options: label, height, left (of the plot: pixels, or a function of the pen), x: {low, high, show, title}, y
  // likewise, describe(i), choose(i), under(chart), over(chart)
  constructor(place, options) {
    this.options = options;
    this.items = { count: 0, x0: [], x1: [], y0: [], y1: [], colours: [] };
    this.chosen = -1;
    this.hovered = -1;
    this.canvas = element("canvas", { role: "img", tabindex: "0", "aria-label": options.label });
    this.front = element("canvas", { "aria-hidden": "true" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.box = element("div", { class: "chart" }, this.canvas, this.front, this.tip);
    const button = (text, label, act) => element("button", { type: "button", "aria-label": label, onclick: act }, text);
    place.append(
      element("div", { class: "controls" },
        button("+", "zoom in", () => this.zoom(0.5)),
        button("−", "zoom out", () => this.zoom(2)),
        button("whole", "show the whole chart", () => this.reset()),
        element("span", { class: "note" }, options.hint || "drag to move, Ctrl and wheel to zoom, arrows to step"),
      ),
      this.box,
    );
    this.listen();
    this.reset();
    redraws.push(() => this.draw());
  }

  set(items, x, y) {
    this.items = items;
    this.chosen = this.hovered = -1;
    if (x) this.options.x = x;
    if (y) this.options.y = y;
    this.reset();
  }

  reset() {
    const { x, y } = this.options;
    this.view = { x0: x.low, x1: Math.max(x.high, x.low + 1e-9), y0: y.low, y1: Math.max(y.high, y.low + 1e-9) };
    this.draw();
  }

  zoom(factor, px = 0.5, py = 0.5) {
    const { x, y } = this.options;
    const zoomed = (low, high, at, least, most) => {
      const centre = low + (high - low) * at;
      const a = centre - (centre - low) * factor;
      const b = centre + (high - centre) * factor;
      return b - a >= most - least ? [least, most] : [a, b];
    };
    [this.view.x0, this.view.x1] = zoomed(this.view.x0, this.view.x1, px, x.low, x.high);
    if (!this.options.wide) [this.view.y0, this.view.y1] = zoomed(this.view.y0, this.view.y1, py, y.low, y.high);
    this.draw();
  }

  move(dx, dy) {
    const { x, y } = this.options;
    const moved = (low, high, by, least, most) => {
      const step = Math.max(least - low, Math.min(most - high, by * (high - low)));
      return [low + step, high + step];
    };
    [this.view.x0, this.view.x1] = moved(this.view.x0, this.view.x1, dx, x.low, x.high);
    [this.view.y0, this.view.y1] = moved(this.view.y0, this.view.y1, dy, y.low, y.high);
    this.draw();
  }

  // Brings an item into view and selects it.
  show(i) {
    if (i < 0) return;
    const { x0, x1, y0, y1 } = this.items;
    const inside = x1[i] >= this.view.x0 && x0[i] <= this.view.x1 && y1[i] >= this.view.y0 && y0[i] <= this.view.y1;
    if (!inside) this.reset();
    this.chosen = i;
    this.mark();
  }

  listen() {
    let drag = null;
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (drag && event.buttons) {
        const whole = this.view.x1 - this.view.x0 >= this.options.x.high - this.options.x.low;
        if (!whole) this.move((drag.x - x) / this.plot.width, (y - drag.y) / this.plot.height);
        drag = { ...drag, x, y, moved: drag.moved || Math.hypot(x - drag.x, y - drag.y) > 3 };
      }
      this.hover(this.hit(x, y), x, y);
    });
    this.canvas.addEventListener("pointerdown", (event) => {
      const [x, y] = at(event);
      drag = { x, y, moved: false };
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const still = drag && !drag.moved;
      drag = null;
      if (still) this.choose(this.hit(...at(event)));
    });
    this.canvas.addEventListener("pointerleave", () => {
      drag = null;
      this.hover(-1, 0, 0);
    });
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const [x, y] = at(event);
      const { left, width, top, height } = this.plot;
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, (x - left) / width, 1 - (y - top) / height);
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "+") this.zoom(0.5);
      else if (event.key === "-") this.zoom(2);
      else if (step && this.items.count) {
        const from = this.chosen < 0 && step < 0 ? 0 : this.chosen; // the first step back is to the last one
        this.choose((from + step + this.items.count) % this.items.count);
      } else return;
      event.preventDefault();
    });
  }

  choose(i) {
    this.chosen = i;
    this.mark();
    if (i >= 0 && this.options.choose) this.options.choose(i);
  }

  // The last item drawn at a point; also near ones, if items are thinner than a finger.
  hit(px, py) {
    const { x0, x1, y0, y1, count } = this.items;
    const near = this.options.near || 1;
    const [a, b] = [this.toX(px - near), this.toX(px + near)];
    const [d, c] = [this.toY(py - near), this.toY(py + near)];
    for (let i = count - 1; i >= 0; i--) {
      if (x0[i] <= b && x1[i] >= a && y0[i] <= d && y1[i] >= c) return i;
    }
    return -1;
  }

  hover(i, x, y) {
    this.tip.hidden = i < 0;
    if (i >= 0) {
      if (i !== this.hovered) this.tip.textContent = this.options.describe(i);
      const width = this.box.clientWidth;
      this.tip.style.left = x < width / 2 ? `${x + 12}px` : "";
      this.tip.style.right = x < width / 2 ? "" : `${width - x + 12}px`;
      this.tip.style.top = `${Math.max(0, Math.min(y + 12, this.box.clientHeight - this.tip.offsetHeight))}px`;
    }
    if (i !== this.hovered) {
      this.hovered = i;
      this.mark();
    }
  }

  px(x) { return this.plot.left + ((x - this.view.x0) / (this.view.x1 - this.view.x0)) * this.plot.width; }
  py(y) { return this.plot.top + (1 - (y - this.view.y0) / (this.view.y1 - this.view.y0)) * this.plot.height; }
  toX(px) { return this.view.x0 + ((px - this.plot.left) / this.plot.width) * (this.view.x1 - this.view.x0); }
  toY(py) { return this.view.y0 + (1 - (py - this.plot.top) / this.plot.height) * (this.view.y1 - this.view.y0); }

  fitted(canvas) {
    const ratio = devicePixelRatio || 1;
    const width = this.box.clientWidth;
    const height = this.options.height;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "11px system-ui, sans-serif";
    return pen;
  }

  draw() {
    if (!this.box.clientWidth) return;
    const pen = (this.pen = this.fitted(this.canvas));
    const { left: wanted = 64 } = this.options;
    const left = typeof wanted === "function" ? wanted(pen) : wanted; // a function measures the labels
    const width = this.box.clientWidth - left - 8;
    this.plot = { left, top: 6, width, height: this.options.height - (this.options.x.show ? 30 : 12) };
    this.axes(pen);
    pen.save();
    pen.beginPath();
    pen.rect(this.plot.left, this.plot.top, this.plot.width, this.plot.height);
    pen.clip();
    if (this.options.under) this.options.under(this, pen);
    const { count, x0, x1, y0, y1, colours } = this.items;
    const { view } = this;
    const cache = {};
    let last = null;
    const gap = this.options.gap ? 0.5 : 0;
    for (let i = 0; i < count; i++) {
      if (x1[i] < view.x0 || x0[i] > view.x1 || y1[i] < view.y0 || y0[i] > view.y1) continue;
      const name = colours[i];
      if (name !== last) {
        pen.fillStyle = name[0] === "#" || name.startsWith("hsl") ? name : cache[name] || (cache[name] = colour(name));
        last = name;
      }
      const [a, b, c, d] = [this.px(x0[i]), this.px(x1[i]), this.py(y1[i]), this.py(y0[i])];
      pen.fillRect(a, c, Math.max(0.7, b - a - (b - a > 4 ? gap : 0)), Math.max(0.7, d - c - (d - c > 4 ? gap : 0)));
    }
    if (this.options.over) this.options.over(this, pen);
    pen.restore();
    this.mark();
  }

  axes(pen) {
    const { left, top, width, height } = this.plot;
    pen.fillStyle = colour("faint");
    pen.strokeStyle = colour("line");
    const { x, y } = this.options;
    if (y.show) {
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      for (const tick of y.ticks ? y.ticks() : ticks(this.view.y0, this.view.y1, height / 45)) {
        const at = this.py(tick);
        if (at < top - 1 || at > top + height + 1) continue;
        pen.fillText(y.show(tick), left - 5, Math.min(Math.max(at, top + 5), top + height - 4));
        pen.beginPath();
        pen.moveTo(left, at);
        pen.lineTo(left + width, at);
        pen.stroke();
      }
    }
    if (x.show) {
      pen.textAlign = "center";
      pen.textBaseline = "top";
      for (const tick of x.ticks ? x.ticks() : ticks(this.view.x0, this.view.x1, width / 90)) {
        const at = this.px(tick);
        if (at >= left + 12 && at <= left + width - 12) pen.fillText(x.show(tick), at, top + height + 3);
      }
      pen.textAlign = "right";
      pen.fillText(x.title || "", left + width, top + height + 14);
    }
  }

  mark() {
    if (!this.plot) return;
    const pen = this.fitted(this.front);
    const { x0, x1, y0, y1 } = this.items;
    for (const [i, name] of [[this.hovered, "faint"], [this.chosen, "ink"]]) {
      if (i < 0) continue;
      pen.strokeStyle = colour(name);
      pen.lineWidth = 2;
      const [a, b, c, d] = [this.px(x0[i]), this.px(x1[i]), this.py(y1[i]), this.py(y0[i])];
      pen.strokeRect(a - 1, c - 1, Math.max(2, b - a + 2), Math.max(2, d - c + 2));
    }
  }
}

// About `count` round numbers between two numbers.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || power;
  const numbers = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) numbers.push(at);
  return numbers;
}

// About `count` round sizes between two sizes, in steps of powers of two.
function byteTicks(low, high, count) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(1, (high - low) / Math.max(1, count))));
  const sizes = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) sizes.push(at);
  return sizes;
}
