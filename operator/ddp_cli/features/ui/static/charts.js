// Charts by uPlot: several processes of a run are parts of one line; zoom and pointer are common to all charts.
"use strict";
const ddpCharts = {};
{
  const options = { axis: "t", smooth: 0, log: false, range: null };
  const plots = new Map();
  let data = null;
  let isSyncing = false;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = (line, place) => css(`--c${((line.color ?? place) % 8) + 1}`);

  function formatValue(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e6) return value.toLocaleString(undefined, { notation: "compact", maximumFractionDigits: 2 });
    if (size >= 1000) return value.toLocaleString(undefined, { maximumFractionDigits: 0 });
    return value === 0 ? "0" : size < 1e-4 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  }

  function formatTime(seconds) {
    const whole = Math.floor(seconds);
    const two = (number) => String(number).padStart(2, "0");
    if (whole < 60) return `${Number.isInteger(seconds) ? whole : seconds.toFixed(1)}s`;
    if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
    if (whole < 86400) return `${Math.floor(whole / 3600)}h${two(Math.floor(whole / 60) % 60)}m`;
    return `${Math.floor(whole / 86400)}d${two(Math.floor(whole / 3600) % 24)}h`;
  }

  const formatPlace = (x) => options.axis === "t" ? formatTime(x) : `step ${Math.round(x).toLocaleString()}`;

  function smooth(values) {
    let last = 0;
    let weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      last = options.smooth * last + (1 - options.smooth) * value;
      weight = options.smooth * weight + (1 - options.smooth);
      return last / weight;
    });
  }

  // The points of a part over the chosen axis, ascending: steps are repeated after a restart, but in another part.
  function pick(part) {
    const xs = [];
    const values = [];
    part[options.axis].forEach((x, place) => {
      if (x !== null && (!xs.length || x > xs[xs.length - 1])) { xs.push(x); values.push(part.v[place]); }
    });
    return [xs, values];
  }

  function buildSeries(chart) {
    const tables = [];
    const series = [{}];
    chart.lines.forEach((line, place) => {
      const stroke = color(line, place);
      for (const part of line.parts) {
        const [xs, values] = pick(part);
        if (!xs.length) continue;
        const points = { show: values.length < 40, size: 5, fill: stroke };
        if (options.smooth > 0) {
          tables.push([xs, values]);
          series.push({ stroke, width: 1, alpha: 0.22, points: { show: false }, line: -1 });
          tables.push([xs, smooth(values)]);
          series.push({ stroke, width: 2, points: { show: false }, line: place });
        } else {
          tables.push([xs, values]);
          series.push({ stroke, width: 1.6, points, line: place });
        }
      }
    });
    return { series, joined: tables.length ? uPlot.join(tables) : null };
  }

  function stepAt(time) {
    let step = null;
    for (const part of data.charts[0]?.lines[0]?.parts ?? []) {
      part.t.forEach((t, place) => { if (t <= time && part.s[place] !== null) step = part.s[place]; });
    }
    return step;
  }

  function drawMarks(plot) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    const place = (time) => {
      const x = options.axis === "t" ? time : stepAt(time);
      return x === null ? -1 : plot.valToPos(x, "x", true);
    };
    const isInside = (x) => x >= bbox.left && x <= bbox.left + bbox.width;
    ctx.save();
    ctx.lineWidth = ratio;
    ctx.font = `${11 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
    let free = -Infinity;
    data.marks.forEach((mark, number) => {
      const x = place(mark.t);
      if (!isInside(x)) return;
      ctx.strokeStyle = ctx.fillStyle = css("--bad");
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (x > free) { ctx.fillText(String(number + 1), x + 3 * ratio, bbox.top + 10 * ratio); free = x + 12 * ratio; }
    });
    for (const attempt of data.attempts) {
      const x = place(attempt.t);
      if (!isInside(x)) continue;
      ctx.fillStyle = css("--soft");
      ctx.fillText(`attempt ${attempt.attempt}`, x + 3 * ratio, bbox.top + bbox.height - 12 * ratio);
    }
    free = -Infinity;
    for (const checkpoint of data.checkpoints) {
      const x = options.axis === "t" ? place(checkpoint.t) : plot.valToPos(checkpoint.step, "x", true);
      if (!isInside(x) || x < free) continue;
      free = x + 7 * ratio;
      const base = bbox.top + bbox.height;
      ctx.fillStyle = css("--soft");
      ctx.beginPath();
      ctx.moveTo(x, base - 7 * ratio);
      ctx.lineTo(x - 4 * ratio, base);
      ctx.lineTo(x + 4 * ratio, base);
      ctx.fill();
    }
    ctx.restore();
  }

  function axisOf(format) {
    return {
      stroke: css("--soft"), font: `11px ${getComputedStyle(document.body).fontFamily}`,
      grid: { stroke: css("--rule"), width: 1 }, ticks: { show: false }, ...format,
    };
  }

  const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000];

  function build(chart, holder, readout) {
    const { series, joined } = buildSeries(chart);
    if (!joined) return null;
    const isLog = options.log && series.slice(1).every((_, place) => joined[place + 1].every((v) => v == null || v > 0));
    const plot = new uPlot({
      width: holder.clientWidth, height: holder.clientHeight, legend: { show: false }, padding: [8, 20, 0, 0],
      series,
      scales: {
        x: { time: false, min: options.range?.[0], max: options.range?.[1] },
        y: isLog ? { distr: 3 } : {},
      },
      axes: [
        axisOf({ size: 26, space: 70, incrs: options.axis === "t" ? SECONDS : undefined,
          values: (_, ticks) => ticks.map((tick) => options.axis === "t" ? formatTime(tick) : tick.toLocaleString()) }),
        axisOf({ size: 58, space: 34, values: (_, ticks) => ticks.map((tick) => tick === null ? "" : formatValue(tick)) }),
      ],
      cursor: { sync: { key: "ddp", setSeries: false, scales: ["x", null] }, y: false, points: { size: 7 }, drag: { x: true, y: false } },
      hooks: {
        draw: [drawMarks],
        setCursor: [(own) => showValues(own, chart, readout)],
        setScale: [(own, key) => { if (key === "x") shareRange(own); }],
      },
    }, joined, holder);
    showValues(plot, chart, readout);
    return plot;
  }

  function shareRange(plot) {
    const { min, max } = plot.scales.x;
    if (isSyncing || min === null || min === undefined || plot.status === 0) return;
    const xs = plot.data[0];
    const isWhole = min <= xs[0] && max >= xs[xs.length - 1];
    options.range = isWhole ? null : [min, max];
    isSyncing = true;
    for (const { plot: other } of plots.values()) {
      if (other && other !== plot) other.setScale("x", isWhole ? { min: other.data[0][0], max: other.data[0].at(-1) } : { min, max });
    }
    isSyncing = false;
  }

  function nearest(values, place) {
    for (let off = 0; off < values.length; off++) {
      if (values[place - off] != null) return place - off;
      if (values[place + off] != null) return place + off;
    }
    return null;
  }

  // The values under the pointer, or the last ones.
  function showValues(plot, chart, readout) {
    const hovered = plot.cursor.idx;
    const xs = plot.data[0];
    readout.at.textContent = hovered == null ? "last" : formatPlace(xs[hovered]);
    chart.lines.forEach((line, place) => {
      let best = null;
      plot.series.forEach((one, number) => {
        if (one.line !== place) return;
        const values = plot.data[number];
        const index = hovered == null ? nearest(values, values.length - 1) : nearest(values, hovered);
        const away = index === null ? Infinity : Math.abs(xs[index] - xs[hovered ?? xs.length - 1]);
        if (away !== Infinity && (best === null || away <= best.away)) best = { away, value: values[index] };
      });
      readout.values[place].textContent = formatValue(best?.value);
    });
  }

  function describe(chart) {
    return chart.lines.map((line) => {
      const values = line.parts.flatMap((part) => part.v).filter((value) => value !== null);
      return `${line.name}: first ${formatValue(values[0])}, lowest ${formatValue(Math.min(...values))}, highest ` +
        `${formatValue(Math.max(...values))}, last ${formatValue(values.at(-1))} ${chart.unit}`;
    }).join("; ");
  }

  function buildFigure(chart) {
    const at = ddpMake("span", { className: "at" });
    const values = chart.lines.map(() => ddpMake("b"));
    const labels = chart.lines.map((line, place) =>
      ddpMake("span", { className: `value line-${((line.color ?? place) % 8) + 1}` }, line.name, values[place]));
    const name = ddpMake("b", {}, chart.title + (chart.unit ? `, ${chart.unit}` : ""));
    const holder = ddpMake("div", { className: "plot", tabIndex: 0, role: "img" });
    holder.addEventListener("keydown", (event) => moveCursor(chart.id, event));
    const figure = ddpMake("figure", {}, ddpMake("figcaption", {}, name, at, ...labels), holder);
    return { figure, holder, readout: { at, values } };
  }

  function moveCursor(id, event) {
    const plot = plots.get(id)?.plot;
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Escape") { options.range = null; draw(); }
    if (!plot || !step) return;
    event.preventDefault();
    const xs = plot.data[0];
    const place = Math.max(0, Math.min(xs.length - 1, (plot.cursor.idx ?? xs.length) + step));
    plot.setCursor({ left: plot.valToPos(xs[place], "x"), top: 10 });
  }

  const watcher = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const held = [...plots.values()].find((one) => one.holder === entry.target);
      if (held?.plot && held.plot.width !== entry.target.clientWidth) {
        held.plot.setSize({ width: entry.target.clientWidth, height: entry.target.clientHeight });
      }
    }
  });

  function draw() {
    const place = document.getElementById("charts");
    if (!data?.charts.length || !place) return;
    const shape = JSON.stringify(data.charts.map((chart) => [chart.id, chart.unit, chart.lines.map((line) => line.name)]));
    if (place.dataset.shape !== shape) {
      place.dataset.shape = shape;
      watcher.disconnect();
      plots.clear();
      place.replaceChildren(...data.charts.map((chart) => {
        const built = buildFigure(chart);
        plots.set(chart.id, built);
        return built.figure;
      }));
      for (const { holder } of plots.values()) watcher.observe(holder);
    }
    isSyncing = true;
    for (const chart of data.charts) {
      const held = plots.get(chart.id);
      held.plot?.destroy();
      held.plot = build(chart, held.holder, held.readout);
      held.holder.setAttribute("aria-label", `${chart.title}. ${describe(chart)}`);
    }
    isSyncing = false;
    const signs = [];
    if (data.marks.length) signs.push("┆ interruption, numbered as in the timeline");
    if (data.checkpoints.length) signs.push("▲ checkpoint");
    if (options.axis === "t") signs.push(`time since ${data.clock}`);
    signs.push("drag to zoom, double-click or Escape to reset");
    document.getElementById("signs").replaceChildren(...signs.map((text) => ddpMake("span", {}, text)));
  }

  ddpCharts.show = (curves) => { data = curves; draw(); };

  function setUp() {
    const source = document.getElementById("curves");
    if (!source) return;
    for (const button of document.querySelectorAll("[data-axis]")) {
      button.addEventListener("click", () => {
        options.axis = button.dataset.axis;
        options.range = null;
        for (const other of document.querySelectorAll("[data-axis]")) other.setAttribute("aria-pressed", String(other === button));
        draw();
      });
    }
    document.getElementById("smooth").addEventListener("input", (event) => { options.smooth = Number(event.target.value); draw(); });
    document.getElementById("log-scale").addEventListener("click", (event) => {
      options.log = !options.log;
      event.currentTarget.setAttribute("aria-pressed", String(options.log));
      draw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    ddpCharts.show(JSON.parse(source.textContent));
  }

  addEventListener("DOMContentLoaded", setUp);
}
