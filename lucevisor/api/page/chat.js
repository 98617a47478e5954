// The chat pane: a client of POST /v1/chat/completions like any other.

let conversation = []; // "New" begins another; what an answer to the old one still says goes to the old one
let stopping = null; // the AbortController of the answer that is on its way

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ") && block !== "data: [DONE]") yield JSON.parse(block.slice(6));
    }
  }
}

async function answer(messages, entry) {
  const system = byId("system").value.trim();
  const temperature = byId("temperature").value;
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: authorised(apiKey(), { "Content-Type": "application/json" }),
    body: JSON.stringify({
      model: byId("chat-model").value || last?.now.model.name,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true,
      stream_options: { include_usage: true },
      ...(temperature === "" ? {} : { temperature: Number(temperature) }), // else the model card's
    }),
    signal: stopping.signal,
  });
  if (!response.ok) throw new Error(await problemOf(response));
  let first = 0;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices?.[0]?.delta ?? {};
    if (delta.content || delta.reasoning_content) first ||= performance.now();
    entry.add(delta);
    if (event.usage && first) entry.finish(event.usage, (performance.now() - first) / 1000);
  }
}

function newEntry() {
  const thought = make("details", "", make("summary", "", "thinking"), "");
  const body = make("div", "answer");
  const foot = make("div", "small");
  const copy = make("button", "copy", "Copy");
  const parts = { text: "" };
  thought.hidden = copy.hidden = true;
  copy.type = "button";
  copy.addEventListener("click", () => copyText(parts.text, copy));
  byId("log").append(make("div", "", thought, body, make("div", "row", foot, copy)));
  return {
    parts,
    body,
    foot,
    add(delta) {
      if (delta.reasoning_content) {
        thought.hidden = false;
        thought.lastChild.appendData(delta.reasoning_content);
      }
      if (delta.content) {
        fill(body, ...rendered((parts.text += delta.content)));
        copy.hidden = false;
      }
      toEnd();
    },
    finish(usage, seconds) {
      const n = usage.completion_tokens;
      const speed = n > 1 && seconds > 0 ? `, ${((n - 1) / seconds).toFixed(1)} tokens/s` : "";
      foot.textContent = `${usage.prompt_tokens} → ${n} tokens${speed}`;
    },
  };
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", "hidden", text); // a page over plain HTTP from another machine has no clipboard
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// Offers the models to choose from, if there are several.
function offerModels(now) {
  const names = now.models.filter((model) => !model.replica).map((model) => model.name);
  const select = byId("chat-model");
  byId("choose-model").hidden = names.length < 2;
  if ([...select.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  fill(select, ...names.map((name) => Object.assign(make("option", "", name), { value: name })));
}

byId("chat-model").addEventListener("change", (event) => showSampling(event.target.value));

// What answers are drawn with where this page says nothing: the model card's sampling.
async function showSampling(model) {
  const response = await fetch(`props?model=${encodeURIComponent(model)}`, { headers: authorised(apiKey()) });
  if (!response.ok) return;
  const { params } = (await response.json()).default_generation_settings;
  const shown = Object.entries(params).filter(([, value]) => typeof value === "number" && value !== 0);
  byId("temperature").placeholder = params.temperature ?? "";
  setText("sampling", `Without a value of yours: ${shown.map(([name, value]) => `${name} ${value}`).join(", ")}`);
}

function toEnd() {
  const log = byId("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

async function ask() {
  const text = byId("prompt").value.trim();
  if (!text || stopping) return;
  byId("prompt").value = "";
  const messages = conversation;
  messages.push({ role: "user", content: text });
  byId("log").append(make("div", "said", text));
  byId("log").scrollTop = byId("log").scrollHeight;
  const entry = newEntry();
  stopping = new AbortController();
  setText("send", "Stop");
  try {
    await answer(messages, entry);
  } catch (error) {
    const stopped = error.name === "AbortError";
    entry.foot.textContent = stopped ? "stopped" : error.message;
    entry.foot.classList.toggle("failed-answer", !stopped);
  } finally {
    stopping = null;
    setText("send", "Send");
  }
  if (entry.parts.text) messages.push({ role: "assistant", content: entry.parts.text });
  else messages.pop(); // nothing was answered: it may be asked again
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (stopping) stopping.abort();
  else ask();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});
byId("new-chat").addEventListener("click", () => {
  stopping?.abort();
  conversation = [];
  fill(byId("log"));
  byId("prompt").focus();
});
