// Charts by uPlot, whose pointer and zoom are common to all charts of a page.
"use strict";
const ddpCharts = {};
{
  let options = { axis: "t", smooth: 0, log: false };
  const plots = new Map();
  let data = null;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function formatValue(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    const notation = size >= 1e15 || size > 0 && size < 1e-4 ? "scientific" : size >= 1e6 ? "compact" : "standard";
    const digits = size >= 1000 && size < 1e6 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 };
    return value.toLocaleString(undefined, { notation, ...digits });
  }

  const formatTick = (x) => options.axis === "t" ? ddpDuration(x) : x.toLocaleString();
  const formatPlace = (x) => options.axis === "t" ? ddpDuration(x) : `step ${Math.round(x).toLocaleString()}`;

  // The points of a line over the chosen axis: a restart leaves a gap, and its values replace those of repeated steps.
  function pick(line) {
    const xs = [];
    const values = [];
    for (const part of line.parts) {
      const places = part[options.axis];
      const first = places.find((x) => x !== null);
      if (first === undefined) continue;
      while (xs.at(-1) >= first) {
        xs.pop();
        values.pop();
      }
      if (xs.length) {
        xs.push((xs.at(-1) + first) / 2);
        values.push(null);
      }
      places.forEach((x, place) => {
        if (x === null || x <= xs.at(-1)) return;
        xs.push(x);
        values.push(part.v[place]);
      });
    }
    return [xs, values];
  }

  function smooth([xs, values]) {
    let last = 0;
    let weight = 0;
    return [xs, values.map((value) => {
      if (value === null) return null;
      last = options.smooth * last + (1 - options.smooth) * value;
      weight = options.smooth * weight + (1 - options.smooth);
      return last / weight;
    })];
  }

  function joinLines(chart) {
    const tables = chart.lines.map(pick);
    return uPlot.join(options.smooth ? [...tables, ...tables.map(smooth)] : tables);
  }

  function buildSeries(chart) {
    const series = chart.lines.map((line, place) => {
      const stroke = css(`--c${((line.color ?? place) % 8) + 1}`);
      const isSparse = line.parts.reduce((sum, part) => sum + part.v.length, 0) < 80;
      const points = { show: isSparse && !options.smooth, size: 5, fill: stroke };
      return { label: line.name, stroke, width: 1.6, points, value: (_, value) => formatValue(value) };
    });
    const raw = series.map((one) => ({ ...one, width: 1, alpha: 0.22, class: "raw" }));
    const place = { label: "at", value: (plot, x) => plot.cursor.idx == null ? "last" : formatPlace(x) };
    return [place, ...(options.smooth ? raw : []), ...series];
  }

  function drawMarks({ ctx, bbox, valToPos }) {
    const ratio = devicePixelRatio;
    const bottom = bbox.top + bbox.height;
    const end = bbox.left + bbox.width;
    let free = -Infinity; // A mark that would cover the one before is left out.
    const find = (mark, width) => {
      const x = mark[options.axis] === null ? -1 : valToPos(mark[options.axis], "x", true);
      if (x < bbox.left || x > end || x < free) return null;
      free = x + width;
      return x;
    };
    ctx.save();
    ctx.lineWidth = ratio;
    ctx.font = `${11 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    ctx.strokeStyle = ctx.fillStyle = css("--bad");
    for (const mark of data.marks) {
      const width = ctx.measureText(mark.text).width + 6 * ratio;
      const x = find(mark, width);
      if (x === null) continue;
      ctx.stroke(new Path2D(`M${x} ${bbox.top}V${bottom}`));
      ctx.textAlign = x + width > end ? "right" : "left";
      ctx.fillText(mark.text, x + (x + width > end ? -3 : 3) * ratio, bbox.top + 10 * ratio);
    }
    free = -Infinity;
    ctx.fillStyle = css("--soft");
    for (const checkpoint of data.checkpoints) {
      const x = find(checkpoint, 7 * ratio);
      if (x !== null) ctx.fill(new Path2D(`M${x} ${bottom - 7 * ratio}l${-4 * ratio} ${7 * ratio}h${8 * ratio}z`));
    }
    ctx.restore();
  }

  const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000];

  // All charts of a page show the same span, with all marks, unless it is zoomed.
  function findRange({ data: [xs] }, min, max) {
    if (!xs?.length || min !== xs[0] || max !== xs.at(-1)) return [min, max];
    const lines = data.charts.flatMap((chart) => chart.lines).flatMap((line) => pick(line)[0]);
    const places = [...lines, ...data.marks.map((mark) => mark[options.axis] ?? min)];
    return [places.reduce((one, other) => Math.min(one, other)), places.reduce((one, other) => Math.max(one, other))];
  }

  const isWhole = ({ scales, data: [xs] }) => scales.x.min <= xs[0] && scales.x.max >= xs.at(-1);

  // Beside the pointer the values there, else the last ones.
  function showLast(plot) {
    if (plot.cursor.idx != null) return;
    const last = plot.data[0].length - 1;
    plot.setLegend({ idxs: plot.series.map((_, number) => plot.cursor.dataIdx(plot, number, last, plot.data[0][last])) });
  }

  function build(chart, figure, joined, isLog, zoom) {
    const axis = { stroke: css("--soft"), font: `11px ${getComputedStyle(document.body).fontFamily}`, ticks: { show: false } };
    const grid = { stroke: css("--rule"), width: 1 };
    const [caption, holder] = figure.children;
    return new uPlot({
      width: holder.clientWidth, height: holder.clientHeight, padding: [8, 20, 0, 0], series: buildSeries(chart),
      legend: { mount: (_, legend) => caption.append(legend), markers: { width: 0, fill: (plot, number) => plot.series[number].stroke() } },
      scales: { x: { time: false, range: findRange, ...zoom }, y: { distr: isLog ? 3 : 1 } },
      axes: [
        { ...axis, grid, size: 26, space: 70, incrs: options.axis === "t" ? SECONDS : undefined, values: (_, ticks) => ticks.map(formatTick) },
        { ...axis, grid, size: 58, space: 34, values: (_, ticks) => ticks.map((tick) => tick === null ? "" : formatValue(tick)) },
      ],
      cursor: { sync: { key: "ddp", setSeries: false, scales: ["x", null] }, y: false, hover: { skip: [null] }, points: { size: 7 } },
      hooks: { draw: [drawMarks], ready: [showLast], setCursor: [showLast], setData: [showLast] },
    }, joined, holder);
  }

  function describe(chart) {
    return chart.lines.map((line) => {
      const values = line.parts.flatMap((part) => part.v).filter((value) => value !== null);
      const [first, lowest, highest, last] = [values[0], Math.min(...values), Math.max(...values), values.at(-1)].map(formatValue);
      return `${line.name}: first ${first}, lowest ${lowest}, highest ${highest}, last ${last} ${chart.unit}`;
    }).join("; ");
  }

  const watcher = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      plots.get(target.id)?.setSize({ width: target.clientWidth, height: target.clientHeight });
    }
  });

  function buildFigure(chart) {
    const holder = ddpMake("div", { id: `plot-${chart.id}`, className: "plot", tabIndex: 0, role: "img" });
    holder.addEventListener("keydown", (event) => moveCursor(plots.get(holder.id), event));
    watcher.observe(holder);
    const name = ddpMake("b", {}, chart.title + (chart.unit ? `, ${chart.unit}` : ""));
    return ddpMake("figure", { id: `figure-${chart.id}` }, ddpMake("figcaption", {}, name), holder);
  }

  function moveCursor(plot, event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Escape") for (const one of plots.values()) one.setData(one.data);
    if (!step) return;
    event.preventDefault();
    const xs = plot.data[0];
    const place = Math.max(0, Math.min(xs.length - 1, (plot.cursor.idx ?? xs.length) + step));
    plot.setCursor({ left: plot.valToPos(xs[place], "x"), top: 10 });
  }

  // New points go into the present chart; another axis, smoothing, scale or theme needs a new one, with the same zoom.
  function drawChart(chart) {
    const figure = document.getElementById(`figure-${chart.id}`);
    const holder = figure.lastChild;
    const joined = joinLines(chart);
    const isLog = options.log && joined.slice(1).every((values) => values.every((value) => value == null || value > 0));
    const shape = JSON.stringify([options, isLog, chart.lines.map((line) => line.name), css("--ink")]);
    const before = plots.get(holder.id);
    holder.setAttribute("aria-label", `${chart.title}. ${describe(chart)}`);
    if (figure.dataset.shape === shape) {
      before.setData(joined, isWhole(before));
      before.redraw();
      return;
    }
    const isZoomed = before && figure.dataset.axis === options.axis && !isWhole(before);
    const zoom = isZoomed ? { min: before.scales.x.min, max: before.scales.x.max } : {};
    before?.destroy();
    figure.querySelector(".u-legend")?.remove();
    Object.assign(figure.dataset, { shape, axis: options.axis });
    plots.set(holder.id, build(chart, figure, joined, isLog, zoom));
  }

  function draw() {
    const place = document.getElementById("charts");
    if (!data?.charts.length || !place) return;
    place.querySelector(".empty")?.remove();
    const parts = data.charts.flatMap((chart) => chart.lines).flatMap((line) => line.parts);
    document.querySelector("[name=axis][value=s]").disabled = !parts.some((part) => part.s.some((step) => step !== null));
    const figures = data.charts.map((chart) => document.getElementById(`figure-${chart.id}`) ?? buildFigure(chart));
    if (figures.some((figure) => !figure.isConnected)) place.append(...figures);
    data.charts.forEach(drawChart);
    const signs = [
      data.marks.length && ["sign mark", "failure or restart, numbered as in the timeline"],
      data.checkpoints.length && ["sign checkpoint", "checkpoint"],
      options.axis === "t" && ["", `time since ${data.clock}`],
      ["", "drag to zoom, double-click or Escape to reset"],
    ];
    document.getElementById("signs").replaceChildren(...signs.filter(Boolean).map(([className, text]) => ddpMake("span", { className }, text)));
  }

  ddpCharts.show = (curves) => { data = curves; draw(); };

  addEventListener("DOMContentLoaded", () => {
    const source = document.getElementById("curves");
    const tools = document.getElementById("tools");
    if (!source) return;
    tools.addEventListener("input", () => {
      const { axis, smooth, log } = tools.elements;
      options = { axis: axis.value, smooth: Number(smooth.value), log: log.checked };
      draw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    tools.reset(); // A browser restores the choices of a former visit.
    ddpCharts.show(JSON.parse(source.textContent));
  });
}
