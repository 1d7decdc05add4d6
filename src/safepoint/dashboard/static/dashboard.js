// Adds to a page: live updates, curves, keys, and times in the viewer's time zone.
// If this script does not run, every page can still be read, and every form can be sent.
"use strict";
(() => {
  const body = document.body;
  document.documentElement.classList.add("has-script");
  const wait = { page: 1000, curves: 2000, logs: 2000, saved: 3000, lost: 3000, again: 10000 };

  // ---- times: ages, which grow, and exact times in the viewer's time zone ----
  const ahead = Date.parse(body.dataset.now) - Date.now();  // the clock of this computer may be wrong
  const now = () => Date.now() + (ahead || 0);
  const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });
  const short = new Intl.DateTimeFormat(undefined, { month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const units = [["d", 86400], ["h", 3600], ["m", 60]];
  function age(seconds) {
    const past = Math.max(0, seconds);
    for (const [unit, size] of units) if (past >= size) return `${Math.floor(past / size)} ${unit} ago`;
    return `${Math.floor(past)} s ago`;
  }
  function showTimes(root) {
    for (const element of root.querySelectorAll("time[datetime]")) {
      const time = new Date(element.dateTime);
      if (Number.isNaN(time.getTime())) continue;
      if (!element.dataset.shown) { element.title = exact.format(time); element.dataset.shown = "yes"; }
      const text = element.hasAttribute("data-exact") ? short.format(time) : age((now() - time.getTime()) / 1000);
      if (element.textContent !== text) element.textContent = text;
    }
  }
  showTimes(document);
  setInterval(() => showTimes(document), 5000);

  // ---- at most one call in each interval, and always a call after the last request ----
  function atMost(interval, act) {
    let timer = null, last = 0;
    return () => {
      if (timer !== null) return;
      timer = setTimeout(() => { timer = null; last = Date.now(); act(); }, Math.max(0, last + interval - Date.now()));
    };
  }

  // ---- live ----
  const live = body.dataset.live;
  const dot = document.getElementById("connection"), lost = document.getElementById("lost");
  let lostTimer = null;
  function connected(isOn) {
    if (!dot) return;
    if (isOn) { clearTimeout(lostTimer); lostTimer = null; lost.hidden = true; }
    else if (lostTimer === null) {
      const since = exact.format(new Date(now()));
      lostTimer = setTimeout(() => { lost.querySelector("span").textContent = since; lost.hidden = false; }, wait.lost);
    }
    const text = isOn ? "Live updates are on" : "Live updates are off";
    dot.dataset.state = isOn ? "on" : "off";
    dot.title = text;
    dot.setAttribute("aria-label", text);
  }
  function isBusy() {  // whether a person types, selects text or has opened a form in the part that would be replaced
    const region = document.getElementById("live"), active = document.activeElement;
    const types = active && region && region.contains(active) && /^(INPUT|SELECT|TEXTAREA)$/.test(active.tagName);
    const selection = document.getSelection();
    const selects = selection && !selection.isCollapsed && region && region.contains(selection.anchorNode);
    return types || selects || (region && region.querySelector("form details[open], td details[open]"));
  }
  const focusable = "a[href], button, summary, [tabindex]";
  function place(region) {  // what a replacement would lose: the focus, and which details are open
    const all = [...region.querySelectorAll(focusable)], at = all.indexOf(document.activeElement);
    const open = [...region.querySelectorAll("details")].map((one) => one.open);
    return { at, href: at < 0 ? "" : all[at].getAttribute("href"), text: at < 0 ? "" : all[at].textContent, open };
  }
  function restore(region, was) {
    region.querySelectorAll("details").forEach((one, index) => { if (was.open[index]) one.open = true; });
    if (was.at < 0) return;
    const all = [...region.querySelectorAll(focusable)];
    const isSame = (one) => one && one.getAttribute("href") === was.href && one.textContent === was.text;
    const found = isSame(all[was.at]) ? all[was.at] : all.find(isSame);
    if (found) found.focus({ preventScroll: true });
  }
  async function refresh() {
    const region = document.getElementById("live");
    if (!region || isBusy() || !window.htmx) return;
    let was = null;
    const remember = (event) => { if (event.detail.target === region) was = place(region); };
    body.addEventListener("htmx:beforeSwap", remember);
    try {
      await window.htmx.ajax("GET", location.href, { target: "#live", select: "#live", swap: "outerHTML" });
      if (was) restore(document.getElementById("live"), was);
    } catch { /* the server does not answer; the next event repeats the request */ } finally {
      body.removeEventListener("htmx:beforeSwap", remember);
    }
  }
  const refreshSoon = atMost(wait.page, refresh);
  const logsSoon = atMost(wait.logs, () => window.htmx && window.htmx.trigger(body, "logged"));
  const savedSoon = atMost(wait.saved, () => window.htmx && !isBusy() && window.htmx.trigger(body, "saved"));
  const curvesSoon = atMost(wait.curves, () => drawCurves());
  function changed(keys) {
    if (document.hidden) { body.dataset.stale = "yes"; return; }
    if (live !== "all" && !keys.includes(live)) return;
    refreshSoon();
    if (body.dataset.job) { logsSoon(); savedSoon(); curvesSoon(); }
  }
  if (live && dot) connected(false);
  // A browser opens only six connections to a server. So one page receives the events, and tells the other pages.
  const others = live && new BroadcastChannel("live");
  function hear({ isOn, keys }) {
    connected(isOn);
    if (keys) changed(keys === "all" ? [live] : keys);
  }
  function receive() {
    let source = null, isOn = false;
    const say = (message) => { isOn = message.isOn; hear(message); others.postMessage(message); };
    function open() {
      source = new EventSource("/live");
      // The pages are read again, because something may have changed before the connection was open.
      source.addEventListener("hello", () => say({ isOn: true, keys: "all" }));
      source.addEventListener("changed", (event) => say({ isOn: true, keys: JSON.parse(event.data) }));
      source.addEventListener("error", () => {
        say({ isOn: false });
        // After an answer such as 401 or 503, the browser does not try again.
        if (source.readyState === EventSource.CLOSED) setTimeout(open, wait.again);
      });
    }
    open();
    others.addEventListener("message", ({ data }) => { if (data === "new page") others.postMessage({ isOn }); });
    addEventListener("pagehide", () => source.close());
    return new Promise(() => {});  // until the page is closed
  }
  if (live) {
    others.addEventListener("message", ({ data }) => { if (data !== "new page") hear(data); });
    others.postMessage("new page");
    if (navigator.locks) navigator.locks.request("live", receive); else receive();
    addEventListener("pageshow", ({ persisted }) => { if (persisted) location.reload(); });
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && body.dataset.stale) { delete body.dataset.stale; changed([live]); }
    });
  }
  body.addEventListener("htmx:afterSettle", (event) => {
    showTimes(document);
    addCopies(document);
    mark(chosen, false);
    if (event.detail.target && event.detail.target.id === "curves") { plots.clear(); drawCurves(); }
    showLines();
  });

  // ---- output: show the last lines, unless a person has scrolled up ----
  let readFrom = null;
  document.addEventListener("scroll", ({ target }) => {
    if (target.id !== "lines") return;
    readFrom = target.scrollHeight - target.scrollTop - target.clientHeight < 40 ? null : target.scrollTop;
  }, true);
  function showLines() {
    const lines = document.getElementById("lines");
    if (lines) lines.scrollTop = readFrom === null ? lines.scrollHeight : readFrom;
  }
  showLines();

  // ---- curves ----
  const plots = new Map(), asked = new Set();
  function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  function resolved(name) {  // a custom property with light-dark() is resolved only in an element that uses it
    const probe = document.createElement("span");
    probe.style.color = `var(${name})`;
    body.append(probe);
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value || colour(name);
  }
  function tick(value) {
    const large = Math.abs(value) >= 1e5, small = value !== 0 && Math.abs(value) < 1e-3;
    return large || small ? value.toExponential(1) : String(Number(value.toPrecision(4)));
  }
  function showRange(figure, steps, values) {
    const shown = (value, digits) => Number(value.toPrecision(digits)).toString();
    const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    figure.querySelector("figcaption .num").textContent = shown(values.at(-1), 5);
    const [first, range, last] = figure.querySelectorAll(".range span");
    first.textContent = `step ${steps[0].toLocaleString("en-US")}`;
    range.textContent = `${shown(low, 4)} to ${shown(high, 4)}`;
    last.textContent = `step ${steps.at(-1).toLocaleString("en-US")}`;
  }
  async function drawCurves() {
    const section = document.getElementById("curves");
    if (!section || !window.uPlot) return;
    let data;
    try {
      const answer = await fetch(section.dataset.metrics, { headers: { Accept: "application/json" } });
      if (!answer.ok) return;
      data = await answer.json();
    } catch { return; }
    const line = resolved("--accent"), quiet = resolved("--muted"), grid = resolved("--line"), stop = resolved("--wait");
    const shown = new Set([...section.querySelectorAll("figure[data-metric]")].map((one) => one.dataset.metric));
    const fresh = Object.keys(data.metrics).filter((name) => !shown.has(name) && !asked.has(name)
      && data.metrics[name].filter((value) => value !== null).length > 1);
    if (fresh.length && window.htmx) {  // the server draws the new curves first, then this script; the server is asked once for each name
      for (const name of fresh) asked.add(name);
      window.htmx.trigger(body, "measured");
      return;
    }
    const breaks = data.attempts.slice(1).map((one) => one.first_step);
    for (const figure of section.querySelectorAll("figure[data-metric]")) {
      const values = data.metrics[figure.dataset.metric];
      const box = figure.querySelector(".plot");
      if (!values || !box) continue;
      const given = values.map((_, index) => index).filter((index) => values[index] !== null);
      if (given.length > 1) showRange(figure, given.map((index) => data.steps[index]), given.map((index) => values[index]));
      const known = plots.get(figure);
      if (known) { known.breaks = breaks; known.plot.setData([data.steps, values]); continue; }
      const label = box.querySelector("svg") ? box.querySelector("svg").getAttribute("aria-label") : "";
      const entry = { breaks, plot: null };
      const axis = { stroke: quiet, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 30 };
      box.textContent = "";
      box.setAttribute("role", "img");
      box.setAttribute("aria-label", label || figure.dataset.metric);
      entry.plot = new window.uPlot({
        width: box.clientWidth, height: 140, padding: [10, 8, 0, 0],
        cursor: { y: false, points: { size: 6 } },
        legend: { show: false },
        scales: { x: { time: false } },
        axes: [{ ...axis, size: 26 }, { ...axis, size: 56, values: (_, ticks) => ticks.map(tick) }],
        series: [{}, { stroke: line, width: 1.6, spanGaps: true, points: { show: false } }],
        hooks: {
          setCursor: [(plot) => {
            const at = plot.cursor.idx;
            const value = at === null || at === undefined ? null : plot.data[1][at];
            if (value !== null && value !== undefined) box.title = `step ${plot.data[0][at].toLocaleString()}: ${value}`;
          }],
          draw: [(plot) => {
            const pen = plot.ctx;
            pen.save();
            pen.strokeStyle = stop;
            pen.setLineDash([4, 4]);
            for (const step of entry.breaks) {
              const x = plot.valToPos(step, "x", true);
              pen.beginPath();
              pen.moveTo(x, plot.bbox.top);
              pen.lineTo(x, plot.bbox.top + plot.bbox.height);
              pen.stroke();
            }
            pen.restore();
          }],
        },
      }, [data.steps, values], box);
      plots.set(figure, entry);
    }
  }
  drawCurves();
  function redraw() {
    for (const [figure, entry] of plots) { entry.plot.destroy(); plots.delete(figure); }
    drawCurves();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", atMost(300, () => {
    for (const [figure, entry] of plots) entry.plot.setSize({ width: figure.querySelector(".plot").clientWidth, height: 140 });
  }));

  // ---- copy a command ----
  function addCopies(root) {
    if (!navigator.clipboard) return;
    for (const line of root.querySelectorAll(".command:not([data-copy])")) {
      line.dataset.copy = "yes";
      const button = document.createElement("button");
      button.type = "button";
      button.className = "copy";
      button.textContent = "Copy";
      button.setAttribute("aria-label", `Copy ${line.querySelector("code").textContent}`);
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(line.querySelector("code").textContent);
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
      line.append(button);
    }
  }
  addCopies(document);

  // ---- keys ----
  const help = document.getElementById("help");
  let chosen = null;
  function rows() { return [...document.querySelectorAll("tr[data-row]")]; }
  function mark(url, moves) {
    for (const row of rows()) {
      const isChosen = row.dataset.row === url;
      row.classList.toggle("at", isChosen);
      if (isChosen && moves) { row.querySelector("a").focus(); row.scrollIntoView({ block: "nearest" }); }
    }
  }
  function move(by) {
    const all = rows();
    if (!all.length) return;
    const at = all.findIndex((row) => row.dataset.row === chosen);
    chosen = all[Math.min(all.length - 1, Math.max(0, at < 0 ? 0 : at + by))].dataset.row;
    mark(chosen, true);
  }
  function act(name) {
    const row = rows().find((one) => one.dataset.row === chosen);
    const link = (row || (body.dataset.job ? document : null))?.querySelector(`a[data-action="${name}"]`);
    if (link) location.assign(link.href);
  }
  const keys = {
    "/": () => { const search = document.getElementById("search"); if (search) { search.focus(); search.select(); } },
    j: () => move(1),
    k: () => move(-1),
    p: () => act("suspend"),
    r: () => act("resume"),
    "?": () => help && !help.open && help.showModal(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (help && help.open) return;
    const handler = keys[event.key];
    if (handler) { event.preventDefault(); handler(); }
  });
  document.getElementById("help-button")?.addEventListener("click", () => help.showModal());
  document.addEventListener("focusin", (event) => {
    const row = event.target.closest("tr[data-row]");
    if (row) { chosen = row.dataset.row; mark(chosen, false); }
  });
})();
