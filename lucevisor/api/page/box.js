// The box: GET /status once a second while the page is visible. Shares of time are of what passed between two answers.

const EVERY_MS = 1000;
const SPARK_POINTS = 60;
const COLOURS = 6;
const speeds = [];
let last = null; // the answer before, with the time it came
const remembered = new Map(); // devices by group: a group that is away has none, and still has its place
let asking = false;
let needsKey = false; // nothing is asked until one is given: a request a second would be refused and logged

async function refresh() {
  if (asking || needsKey) return;
  asking = true;
  try {
    const response = await fetch("status", {
      headers: authorised(apiKey()),
      signal: AbortSignal.timeout(5000),
    });
    if (!response.ok) {
      lost(await problemOf(response), response.status === 401 ? "key needed" : "refused");
      if (response.status === 401) askForKey();
      return;
    }
    draw(await response.json(), performance.now() / 1000);
  } catch {
    lost(`No answer from ${location.host}. Shown is what was last known; asking again every second.`, "no answer");
  } finally {
    asking = false;
  }
}

function askForKey() {
  needsKey = true;
  showKeys(true);
  byId("api-key").focus();
}

function lost(text, state) {
  notice(text);
  setState(state, "lost");
}

function setState(text, className) {
  byId("state").className = `pill ${className}`;
  setText("state", text);
}

function draw(now, at) {
  notice("");
  for (const group of now.groups) {
    if (group.devices.length) remembered.set(group.name, group.devices);
    else group.devices = remembered.get(group.name) ?? [];
  }
  setState(now.state, now.state);
  if (!last) showSampling(now.model.name);
  offerModels(now);
  setText("model", modelLine(now));
  document.title = `${[...new Set(now.models.map((model) => model.name))].join(", ")} – Lucevisor`;
  const colours = stageColours(now);
  drawFigures(totals(now));
  drawRecovery(now);
  drawPauses(now.engine.recovery);
  drawLayers(now, colours);
  drawShards(now, colours);
  drawWaits(now, at);
  drawRequests(now.requests);
  drawPages(now.engine.pages);
  drawDrafts(now.draft);
  drawScoring(now.pflash);
  last = { now, at };
}

// The model, or all models and whether they are loaded.
function modelLine(now) {
  const states = now.models.filter((model) => !model.replica && model.residency);
  const { name, architecture, layers, quant } = now.model;
  if (states.length > 1) return states.map((model) => `${model.name}: ${model.residency.state}`).join(" · ");
  const away = states.length && states[0].residency.state !== "loaded" ? ` · ${states[0].residency.state}` : "";
  return `${name} · ${architecture} · ${layers} layers · ${quant}${away}`;
}

// The parts of the status that have pipelines of the model: its replicas, or the whole status.
function pipelines(now) {
  const replicas = now.models.filter((model) => model.replica);
  if (!replicas.length) return [now];
  return replicas.map((part) => ({ ...part, groups: now.groups.filter((group) => part.groups.includes(group.name)) }));
}

function totals(now) {
  const sum = (name) => pipelines(now).reduce((total, part) => total + (part.engine[name] ?? 0), 0);
  return Object.fromEntries(["tokens_per_s", "running", "queued", "held", "generated_tokens"].map((name) => [name, sum(name)]));
}

function drawFigures(engine) {
  speeds.push(engine.tokens_per_s);
  if (speeds.length > SPARK_POINTS) speeds.shift();
  const most = Math.max(...speeds, 1);
  const points = speeds.map((v, i) => `${(i * 120) / (SPARK_POINTS - 1)},${27 - (26 * v) / most}`);
  byId("spark").firstElementChild.setAttribute("points", points.join(" "));
  setText("speed", engine.tokens_per_s.toFixed(1));
  for (const name of ["running", "queued", "held"]) setText(name, count(engine[name]));
  setText("generated", count(engine.generated_tokens));
}

function loadingLine(group) {
  const { phase, done_bytes: done, total_bytes: total } = group.loading;
  if (!total) return make("div", "small", phase);
  const share = done / total;
  const text = `${phase}: ${bytes(done)} of ${bytes(total)}, ${percent(share)}`;
  return make("div", "line", make("div", "small", text), bar(`group ${group.name} loads`, [["done", share, text]]));
}

function drawRecovery(now) {
  const idle = (group) => group.state === "stopped" && now.state === "ready"; // its models are not loaded
  const away = now.groups.filter((group) => group.state !== "ready" && !idle(group));
  const { done, of: all } = now.engine.recovery.rebuilding_tokens;
  byId("recovery").hidden = now.state === "ready" && !away.length && !now.engine.held && !all;
  const parts = [make("h2", "", now.state === "starting" ? "Starting" : "Recovery")];
  const soon = now.retry_in_s == null ? "" : `; tries again in ${duration(now.retry_in_s)}`;
  if (now.engine.held) {
    const since = duration(now.engine.recovery.held_s);
    parts.push(make("p", "", `${count(now.engine.held)} requests are held since ${since}${soon}`));
  } else if (soon) parts.push(make("p", "", soon.slice(2)));
  if (all) {
    const text = `rebuilt ${count(done)} of ${count(all)} tokens`;
    parts.push(make("div", "line", make("div", "small", text), bar("rebuild", [["done", done / all, text]])));
  }
  for (const group of away) {
    const why = group.reason ? `: ${group.reason}` : "";
    parts.push(make("div", "small", `group ${group.name} is ${group.state} for ${duration(group.state_s)}${why}`));
    if (group.loading) parts.push(loadingLine(group));
  }
  if (!away.length && now.reason) parts.push(make("div", "small", now.reason));
  fill(byId("recovery"), ...parts);
}

// What losses and restarts have cost since the start.
function drawPauses(recovery) {
  const total = (counts) => Object.values(counts).reduce((sum, n) => sum + n, 0);
  const pauses = recovery.pauses ? total(recovery.pauses) : 0;
  byId("pauses").hidden = !pauses;
  if (!pauses) return;
  const kinds = Object.entries(recovery.pauses).filter(([, n]) => n).map(([reason, n]) => `${count(n)} ${reason}`);
  const tokens = [["kept", recovery.kept_tokens], ["rebuilt", recovery.rebuilt_tokens], ["computed again", recovery.recomputed_tokens]]
    .filter(([, n]) => n).map(([what, n]) => `${count(n)} ${what}`);
  const requests = recovery.sequences ? `; ${count(recovery.sequences)} requests went on` : "";
  const how = tokens.length ? `, tokens: ${tokens.join(", ")}` : "";
  setText("pauses", `Pauses since the start: ${kinds.join(", ")}, longest ${duration(recovery.longest_pause_s)}${requests}${how}`);
}

function devicesOf(now) {
  const devices = now.groups.flatMap((group) => group.devices);
  return devices.sort((a, b) => a.layers[0] - b.layers[0]);
}

function stageColours(now) {
  return new Map(devicesOf(now).map((device, i) => [device.device, i % COLOURS]));
}

function drawLayers(now, colours) {
  fill(
    byId("layers"),
    ...devicesOf(now).map((device) => {
      const part = make("i", `s${colours.get(device.device)}`);
      part.style.flexGrow = String(device.layers[1] - device.layers[0]);
      part.title = `${device.device} layers ${device.layers[0]} to ${device.layers[1] - 1}`;
      return part;
    }),
  );
}

function drawShards(now, colours) {
  const groups = [...now.groups].sort((a, b) => (a.stages[0] ?? 1e9) - (b.stages[0] ?? 1e9));
  const several = now.models.filter((model) => !model.replica).length > 1;
  const cards = groups.flatMap((group) =>
    (group.devices.length ? group.devices : [null]).map((device) => shardCard(group, device, colours, now.admin, several)),
  );
  const focused = document.activeElement?.dataset?.group; // redrawn buttons keep the focus
  fill(byId("shards"), ...cards);
  if (focused) [...byId("shards").querySelectorAll("button")].find((b) => b.dataset.group === focused)?.focus();
}

function shardCard(group, device, colours, admin, several) {
  const card = make("article", `shard t${device ? colours.get(device.device) : ""}`);
  const name = make("b", "", device ? device.device : group.name);
  card.append(make("div", "row", name, make("span", `pill ${group.state}`, group.state)));
  if (device) {
    const [start, stop] = device.layers;
    const layers = `layers ${start} to ${stop - 1}${several ? ` of ${device.model}` : ""}`;
    card.append(make("div", "", layers), make("div", "small", device.name), ...memory(device));
  }
  if (group.loading) card.append(loadingLine(group));
  const warm = (group.spares ?? []).filter((spare) => spare.warm).length;
  const spares = group.spares?.length ? ` · spares ${warm} of ${group.spares.length} warm` : "";
  const host = group.host ? ` · host ${group.host}` : "";
  const facts = `${group.backend}${host} · pid ${(group.host ? group.daemon_pid : group.pid) ?? "–"} · restarts ${group.restarts}${spares}`;
  const last = make("div", "row", make("span", "small", facts));
  if (admin) last.append(restartButton(group));
  card.append(last);
  return card;
}

function memory(device) {
  const { weight_bytes: weights, state_bytes: state, free_bytes: free } = device;
  const total = Math.max(device.total_bytes || 0, weights + state + free);
  const other = Math.max(0, total - weights - state - free);
  const shown = bar(`memory of ${device.device}`, [
    ["weights", weights / total, `weights ${bytes(weights)}`],
    ["state", state / total, `pages and states ${bytes(state)}`],
    ["other", other / total, `other use ${bytes(other)}`],
  ]);
  const text = `${bytes(weights)} weights, ${bytes(state)} state, ${bytes(free)} of ${bytes(total)} free`;
  return [shown, make("div", "small", text)];
}

function restartButton(group) {
  const button = make("button", "", "Restart");
  button.type = "button";
  button.dataset.group = group.name;
  button.setAttribute("aria-label", `Restart group ${group.name}`);
  button.disabled = group.state !== "ready" && group.state !== "failed";
  button.addEventListener("click", () => restart(group.name));
  return button;
}

async function restart(name) {
  if (!stored("admin-key")) {
    showKeys(true);
    setText("keys-note", `Restarting group ${name} needs an admin key.`);
    byId("admin-key").focus();
    return;
  }
  if (!confirm(`Restart group ${name}? Requests are held until it is back.`)) return;
  const response = await fetch("admin/restart", {
    method: "POST",
    headers: authorised(stored("admin-key"), { "Content-Type": "application/json" }),
    body: JSON.stringify({ group: name }),
  });
  if (!response.ok) notice(`Group ${name} is not restarted: ${await problemOf(response)}`);
  refresh();
}

function stageNames(now) {
  const names = [];
  for (const group of now.groups) for (const stage of group.stages) names[stage] = `${group.name} (stage ${stage})`;
  return names;
}

function drawWaits(now, at) {
  const seconds = last ? at - last.at : 0;
  const before = last ? pipelines(last.now) : [];
  const lines = pipelines(now).flatMap((part, i) => waitLines(part, before[i], seconds));
  fill(byId("waits"), ...(lines.length ? lines : [make("div", "small", "Nothing has run yet.")]));
}

function waitLines(now, earlier, seconds) {
  const names = stageNames(now);
  const lines = now.engine.stages.map((stage, i) => {
    const before = earlier?.engine.stages[i];
    const steps = before ? stage.steps - before.steps : 0;
    const name = names[i] ?? `stage ${i} (drafter)`;
    if (steps <= 0) return waitLine(name, "idle", []);
    const compute = Math.min(1, (stage.compute_s - before.compute_s) / seconds);
    const wait = Math.min(1 - compute, Math.max(0, (stage.wait_s - before.wait_s) / seconds));
    const whom = i > 0 ? names[i - 1] ?? `stage ${i - 1}` : `the next step${names.length > 1 ? `, from ${names.at(-1)}` : ""}`;
    const each = `${((1000 * (stage.compute_s - before.compute_s)) / steps).toFixed(1)} ms a step`;
    const text = `computes ${percent(compute)} (${each}), waits ${percent(wait)} for ${whom}`;
    return waitLine(name, text, [["compute", compute, `computes ${percent(compute)}`], ["wait", wait, `waits ${percent(wait)}`]]);
  });
  const hops = now.engine.boundaries.map((boundary, i) => {
    const mean = boundary.hops ? duration(boundary.seconds / boundary.hops) : "–";
    return make("div", "small", `hand-over ${i} to ${i + 1}: ${mean} on average`);
  });
  return [...lines, ...hops];
}

function waitLine(name, text, parts) {
  const head = make("div", "row", make("span", "", name), make("span", "small", text));
  return make("div", "line", head, bar(name, parts));
}

function drawRequests(requests) {
  if (!requests.length) return fill(byId("requests"), make("div", "small", "None."));
  const named = requests.some((one) => one.key);
  const key = named ? ["key"] : [];
  const head = make("tr", "", ...["request", ...key, "call", "for", "first token", "prompt", "generated", "drafts accepted"].map((t) => make("th", "", t)));
  const rows = requests.map((one) => {
    const accepted = one.generated_tokens ? percent(one.accepted_tokens / one.generated_tokens) : "–";
    const first = one.first_token_s == null ? "waits" : duration(one.first_token_s);
    const cells = [one.id, ...(named ? [one.key] : []), one.path, duration(one.elapsed_s), first, count(one.prompt_tokens), count(one.generated_tokens), `${count(one.accepted_tokens)} (${accepted})`];
    return make("tr", "", ...cells.map((cell) => make("td", "", cell)));
  });
  fill(byId("requests"), make("table", "", make("thead", "", head), make("tbody", "", ...rows)));
}

function drawPages({ spaces, out, host, host_total: inHost }) {
  const lines = Object.entries(spaces).map(([space, use]) => {
    const what = space === "recurrent" ? "states" : "pages";
    const text = `${count(use.used)} used, ${count(use.cached)} cached, ${count(use.total)} in all`;
    const parts = [["used", use.used / use.total, `used ${use.used}`], ["cached", use.cached / use.total, `cached ${use.cached}`]];
    return make("div", "line", make("div", "row", make("span", "", `${space} ${what}`), make("span", "small", text)), bar(space, parts));
  });
  if (inHost) {
    const text = `${count(host)} used, ${count(inHost)} in all`;
    const head = make("div", "row", make("span", "", "pages in host memory"), make("span", "small", text));
    lines.push(make("div", "line", head, bar("host memory", [["host", host / inHost, `used ${host}`]])));
  }
  if (out) lines.push(make("div", "small", `${count(out)} pages of running sequences are paged out`));
  fill(byId("pages"), ...(lines.length ? lines : [make("div", "small", "Not placed yet.")]));
}

function drawDrafts(draft) {
  const lines = [];
  const what = draft.name ? `${draft.name} (${draft.kind})${draft.device ? ` on ${draft.device}` : ""}: ${draft.state}` : draft.kind;
  lines.push(make("div", "", what));
  for (const why of [draft.reason, draft.paused]) if (why) lines.push(make("div", "small", why));
  if (draft.verify_slices) {
    lines.push(make("div", "small", `${draft.acceptance_length.toFixed(2)} tokens a verify step, width ${draft.width}`));
    lines.push(make("div", "small", `${count(draft.accepted)} of ${count(draft.verified)} drafts accepted, by position:`));
    draft.acceptance_by_position.slice(0, 8).forEach((share, i) =>
      lines.push(bar(`position ${i + 1}`, [["done", share, `position ${i + 1}: ${percent(share)}`]])));
  }
  fill(byId("drafts"), ...lines);
}

// PFlash: the model that scores long prompts, and what it shortened.
function drawScoring(pflash) {
  byId("scoring").hidden = pflash.state === "none";
  if (pflash.state === "none") return;
  const lines = [make("div", "", `${pflash.name}${pflash.device ? ` on ${pflash.device}` : ""}: ${pflash.state}`)];
  if (pflash.reason) lines.push(make("div", "small", pflash.reason));
  const { compressed, failed } = pflash.prompts;
  if (compressed) {
    const share = pflash.kept / pflash.tokens;
    const text = `${count(compressed)} prompts shortened, ${count(pflash.kept)} of ${count(pflash.tokens)} tokens kept`;
    lines.push(make("div", "small", text), bar("tokens kept", [["done", share, `kept ${percent(share)}`]]));
  }
  if (failed) lines.push(make("div", "small", `${count(failed)} prompts could not be scored`));
  fill(byId("scoring-lines"), ...lines);
}

setInterval(() => document.hidden || refresh(), EVERY_MS);
document.addEventListener("visibilitychange", () => document.hidden || refresh());
refresh();
