"use strict";
// Elements, numbers and keys. Text reaches the page as text nodes only; the content security policy forbids more.

const byId = (id) => document.getElementById(id);

function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function fill(parent, ...children) {
  parent.replaceChildren(...children);
}

function setText(id, text) {
  byId(id).textContent = text;
}

// parts: [class name, share of 1, what it says when pointed at]
function bar(label, parts) {
  const shown = make("div", "bar");
  shown.setAttribute("role", "img");
  shown.setAttribute("aria-label", `${label}: ${parts.map(([, , title]) => title).join(", ")}`);
  for (const [className, share, title] of parts) {
    const part = make("i", className);
    part.style.width = `${100 * Math.min(1, Math.max(0, share || 0))}%`;
    part.title = title;
    shown.append(part);
  }
  return shown;
}

function bytes(n) {
  let value = Number(n) || 0;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024 || unit === "GiB") return `${value.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    value /= 1024;
  }
}

const count = (n) => Number(n || 0).toLocaleString("en");
const percent = (share) => `${Math.round(100 * share)} %`;

function duration(s) {
  if (s == null) return "–";
  if (s < 0.001) return `${Math.round(1e6 * s)} µs`;
  if (s < 1) return `${Math.round(1000 * s)} ms`;
  if (s < 60) return `${s.toFixed(1)} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

// ---- keys, of this tab only

const stored = (name) => sessionStorage.getItem(name) || "";
const apiKey = () => stored("api-key") || stored("admin-key"); // an admin key is an API key too

function authorised(key, more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function problemOf(response) {
  try {
    const answer = await response.json();
    return answer.error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

function notice(text) {
  byId("notice").hidden = !text;
  setText("notice", text);
}

function showKeys(shown) {
  byId("keys").hidden = !shown;
  byId("show-keys").setAttribute("aria-expanded", String(shown));
}

byId("show-keys").addEventListener("click", () => showKeys(byId("keys").hidden));
byId("keys").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("api-key", byId("api-key").value.trim());
  sessionStorage.setItem("admin-key", byId("admin-key").value.trim());
  showKeys(false);
  needsKey = false;
  refresh();
});
byId("api-key").value = stored("api-key");
byId("admin-key").value = stored("admin-key");

for (const view of ["box", "chat"]) {
  byId(`show-${view}`).addEventListener("click", () => {
    document.body.dataset.view = view;
    for (const other of ["box", "chat"]) byId(`show-${other}`).setAttribute("aria-pressed", String(other === view));
  });
}
