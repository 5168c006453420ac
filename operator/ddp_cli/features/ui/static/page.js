// Live parts, times, the list, and the log. Text from jobs arrives as escaped markup of the server, never as code.
"use strict";
const ddpMake = (tag, values, ...children) => {
  const element = Object.assign(document.createElement(tag), values);
  element.append(...children);
  return element;
};
// As in the texts of the server: 42s, 5m12s, 3h04m, 2d07h.
const ddpDuration = (seconds) => {
  const whole = Math.floor(seconds);
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  if (whole < 60) return `${Number.isInteger(seconds) ? whole : seconds.toFixed(1)}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two(whole / 60 % 60)}m`;
  return `${Math.floor(whole / 86400)}d${two(whole / 3600 % 24)}h`;
};
{
  const find = (id) => document.getElementById(id);
  const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
  const date = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });
  const second = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });
  const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });

  // A saved page is read on another day: it has no ages, but seconds, which tell events apart that are close together.
  function describe(moment) {
    const { job, list: isList } = document.body.dataset;
    const seconds = Math.round((Date.now() - moment) / 1000);
    if (Math.abs(seconds) < 86400 && (job || isList)) {
      const [age] = ddpDuration(Math.abs(seconds)).match(/^\d+./);
      return seconds < 0 ? `in ${age}` : `${age} ago`;
    }
    if (!isList) return second.format(moment);
    return moment.getFullYear() === new Date().getFullYear() ? day.format(moment) : date.format(moment);
  }

  function showTimes(root) {
    for (const element of root.querySelectorAll("time[datetime]")) {
      const moment = new Date(element.dateTime);
      if (Number.isNaN(moment.getTime())) continue;
      const text = element.hasAttribute("data-clock") ? clock.format(moment) : describe(moment);
      if (element.textContent !== text) element.textContent = text;
      if (!element.title) element.title = exact.format(moment);
    }
  }

  // What the user has opened or sorted stays when a part is drawn again.
  function keep(name, node) {
    return !(name === "open" && node.tagName === "DETAILS") && name !== "title";
  }

  function morph(element, html) {
    Idiomorph.morph(element, html, { morphStyle: "outerHTML", callbacks: { beforeAttributeUpdated: keep } });
  }

  function showProblems(texts) {
    find("problems").replaceChildren(...texts.map((text) => ddpMake("p", {}, text)));
  }

  function connect(url, handlers) {
    const live = find("live");
    const source = new EventSource(url);
    const set = (kind, text) => { live.className = `live ${kind}`; live.textContent = text; };
    source.onerror = () => set("off", "not connected");
    source.addEventListener("problem", (event) => showProblems([JSON.parse(event.data)]));
    for (const [name, handler] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => {
        set("on", "live");
        showProblems([]);
        handler(JSON.parse(event.data));
      });
    }
    addEventListener("pagehide", () => source.close());
    return source;
  }

  document.addEventListener("click", async ({ target }) => {
    const copy = target.closest("[data-copy]");
    if (target.closest("[data-reload]")) location.reload();
    if (!copy) return;
    const command = copy.previousElementSibling;
    try {
      await navigator.clipboard.writeText(command.textContent);
    } catch { // a browser that forbids it
      getSelection().selectAllChildren(command);
      document.execCommand("copy");
    }
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });

  // The list of jobs.
  const list = { filter: "", text: "", sort: "order", down: false, order: [] };

  function compareRows(one, other) {
    if (list.sort === "order") return list.order.indexOf(one.id) - list.order.indexOf(other.id);
    const left = one.dataset[list.sort];
    const right = other.dataset[list.sort];
    if (list.sort === "name") return left.localeCompare(right);
    if (left === "" || right === "") return (left === "") - (right === "");
    return left - right;
  }

  const isIn = (row, filter) => filter === "" || row.dataset.attention.split(" ").includes(filter);

  function arrange() {
    const body = find("rows");
    const rows = [...body.children];
    for (const row of rows) {
      const isFound = row.textContent.toLowerCase().includes(list.text);
      row.hidden = !isFound || !isIn(row, list.filter);
    }
    for (const chip of document.querySelectorAll("[data-filter]")) {
      const { filter } = chip.dataset;
      chip.querySelector("b").textContent = rows.filter((row) => isIn(row, filter)).length;
      chip.setAttribute("aria-pressed", String(filter === list.filter));
    }
    rows.sort((one, other) => (list.down ? -1 : 1) * compareRows(one, other));
    rows.forEach((row, place) => { if (body.children[place] !== row) body.insertBefore(row, body.children[place]); });
    find("empty").hidden = rows.length > 0;
    find("unmatched").hidden = rows.length === 0 || rows.some((row) => !row.hidden);
    const compare = find("compare");
    const chosen = body.querySelectorAll("input:checked").length;
    compare.disabled = chosen < 2 || chosen > Number(compare.dataset.most);
    compare.textContent = compare.disabled ? `Compare: select 2 to ${compare.dataset.most} jobs` : `Compare ${chosen} jobs`;
    body.classList.toggle("places", new Set(rows.map((row) => row.querySelector(".job small").textContent)).size > 1);
  }

  function takeRows({ rows, order, problems }) {
    const body = find("rows");
    for (const [key, html] of Object.entries(rows)) {
      const present = find(key);
      if (present) morph(present, html);
      else body.insertAdjacentHTML("beforeend", html);
    }
    list.order = order;
    for (const row of [...body.children]) if (!order.includes(row.id)) row.remove();
    showProblems(problems);
    showTimes(body);
    arrange();
  }

  function moveFocus(step) {
    const links = [...document.querySelectorAll("#rows tr:not([hidden]) a")];
    const place = links.indexOf(document.activeElement.closest("tr")?.querySelector("a"));
    links[Math.max(0, Math.min(links.length - 1, place < 0 ? 0 : place + step))]?.focus();
  }

  function sortBy(head) {
    list.down = list.sort === head.dataset.sort && !list.down;
    list.sort = head.dataset.sort;
    for (const cell of document.querySelectorAll(".jobs th")) cell.removeAttribute("aria-sort");
    head.closest("th").setAttribute("aria-sort", list.down ? "descending" : "ascending");
  }

  function startList(url) {
    list.order = [...find("rows").children].map((row) => row.id);
    find("search").addEventListener("input", ({ target }) => { list.text = target.value.toLowerCase(); arrange(); });
    find("rows").addEventListener("change", arrange);
    document.addEventListener("click", ({ target }) => {
      const chip = target.closest("[data-filter]");
      const head = target.closest("[data-sort]");
      if (chip) list.filter = chip.dataset.filter;
      if (head) sortBy(head);
      if (chip || head) arrange();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.target.blur();
      if (event.target.matches("input[type=search]") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "/") { event.preventDefault(); find("search").focus(); }
      if (event.key === "j") moveFocus(1);
      if (event.key === "k") moveFocus(-1);
      if (event.key === "x") document.activeElement.closest("tr")?.querySelector("input").click();
    });
    arrange();
    connect(url, { rows: takeRows });
  }

  // The log of a job.
  function startLog(job) {
    const lines = find("lines");
    let stream = null;
    let turn = 0;

    const query = () => {
      const rank = /^\d+$/.test(find("log-rank").value) ? `rank=${find("log-rank").value}&` : "";
      return `${rank}q=${encodeURIComponent(find("log-search").value)}`;
    };

    function markAttempts() {
      for (const divider of lines.querySelectorAll(".divider")) divider.remove();
      let before = null;
      for (const line of [...lines.querySelectorAll(".line")]) {
        if (before !== null && line.dataset.attempt !== before) {
          line.before(ddpMake("div", { className: "divider" }, `attempt ${line.dataset.attempt}`));
        }
        before = line.dataset.attempt;
      }
      showTimes(lines);
    }

    function describe(piece) {
      if (lines.querySelector(".line")) return piece.note || (piece.before ? "" : "the beginning of the log");
      const isChosen = find("log-search").value || find("log-rank").value;
      return piece.note || (isChosen ? "No such line here." : "The log is empty.");
    }

    async function load(before) {
      const number = before ? turn : ++turn;
      const response = await fetch(`${job}/log?${query()}&before=${before ?? ""}`);
      const piece = response.ok ? await response.json() : { lines: "", note: "The log cannot be read; reload the page." };
      if (number !== turn) return;
      const height = lines.scrollHeight;
      if (!before || piece.whole) lines.replaceChildren();
      lines.querySelector(".older")?.remove();
      lines.insertAdjacentHTML("afterbegin", piece.lines);
      const older = ddpMake("button", { type: "button", hidden: !piece.before, onclick: () => load(piece.before) }, "Older lines");
      lines.prepend(ddpMake("div", { className: "older soft" }, older, " ", describe(piece)));
      markAttempts();
      if (piece.before && !piece.note && !lines.querySelector(".line")) load(piece.before);
      lines.scrollTop = before ? lines.scrollTop + lines.scrollHeight - height : lines.scrollHeight;
    }

    function follow() {
      stream?.close();
      if (!find("log-follow").checked) return;
      stream = new EventSource(`${job}/follow?${query()}`);
      stream.addEventListener("lines", (event) => {
        const isAtEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
        lines.insertAdjacentHTML("beforeend", JSON.parse(event.data));
        const all = lines.querySelectorAll(".line");
        for (let place = 0; place < all.length - 5000; place++) all[place].remove();
        markAttempts();
        if (isAtEnd) lines.scrollTop = lines.scrollHeight;
      });
    }

    let wait = 0;
    const renew = () => {
      clearTimeout(wait);
      wait = setTimeout(() => { load(); follow(); }, 250);
    };
    find("log-search").addEventListener("input", renew);
    find("log-rank").addEventListener("input", renew);
    find("log-follow").addEventListener("change", follow);
    addEventListener("pagehide", () => stream?.close());
    load();
    follow();
  }

  function takeParts(parts) {
    for (const [name, html] of Object.entries(parts)) {
      const element = find(`part-${name}`);
      if (element) { morph(element, html); showTimes(find(`part-${name}`)); }
    }
    const state = document.querySelector("#part-head .pill")?.textContent;
    if (state) document.title = `${document.querySelector("h1").textContent} · ${state}`;
  }

  addEventListener("DOMContentLoaded", start);
  function start() {
    showTimes(document);
    setInterval(() => showTimes(document), 10_000);
    const { list: listUrl, job } = document.body.dataset;
    if (listUrl) startList(listUrl);
    const lines = find("lines");
    if (lines) lines.scrollTop = lines.scrollHeight; // a saved page has its lines already
    if (job && location.protocol !== "file:") {
      connect(`${job}/events`, { parts: takeParts, curves: (data) => ddpCharts.show(data) });
      startLog(job);
    }
  }
}
