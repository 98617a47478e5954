
// Markdown of answers: headings, lists, quotes, tables, rules, fenced code; code, bold, italics and links within lines.
// Makes elements and text nodes, never markup; what is no markdown stays as it was written.

const INLINE =
  /(`{1,9})(.{1,300}?)\1(?!`)|\*\*([^*\s](?:[^\n]{0,300}?[^*\s])?)\*\*|\*([^*\s](?:[^*\n]{0,300}[^*\s])?)\*(?!\*)|\[([^\]\n]{1,300})\]\((https?:[^\s()]+)\)/;

function inline(text) {
  const nodes = [];
  for (let found; (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    if (found.index) nodes.push(text.slice(0, found.index));
    const [, , code, bold, italic, label, address] = found;
    if (code) nodes.push(make("code", "", code));
    else if (bold) nodes.push(make("strong", "", ...inline(bold)));
    else if (italic) nodes.push(make("em", "", ...inline(italic)));
    else nodes.push(link(label, address));
  }
  return text ? [...nodes, text] : nodes;
}

function link(label, address) {
  const found = make("a", "", label);
  found.href = address; // the pattern admits http and https alone
  found.rel = "noopener noreferrer";
  found.target = "_blank";
  return found;
}

// Fences first: an odd part is code, also before its end has come.
function rendered(text) {
  return text
    .split(/^ {0,3}```[^\n]*\n?/m)
    .flatMap((part, i) => (i % 2 ? make("pre", "", part.replace(/\n$/, "")) : blocks(part)));
}

function blocks(text) {
  const out = [];
  let open = null; // the block that the next line may continue: its kind, its element
  const into = (kind, tag) => {
    if (open?.kind !== kind) {
      open = { kind, element: make(tag) };
      out.push(open.element);
    }
    return open.element;
  };
  for (const line of text.split("\n")) {
    const heading = /^(#{1,6}) +(.+)/.exec(line);
    const item = /^( *)(?:[-*+]|(\d{1,9})[.)]) +(.+)/.exec(line);
    if (!line.trim()) open = null;
    else if (heading) {
      open = null;
      out.push(make(`h${Math.min(6, heading[1].length + 2)}`, "", ...inline(heading[2])));
    } else if (/^ *([-*_])( *\1){2,} *$/.test(line)) {
      open = null;
      out.push(make("hr"));
    } else if (item) {
      const one = make("li", "", ...inline(item[3]));
      one.style.marginLeft = `${Math.min(item[1].length, 12) / 2}rem`;
      if (item[2]) one.value = Number(item[2]);
      into(item[2] ? "ol" : "ul", item[2] ? "ol" : "ul").append(one);
    } else if (line.startsWith("|")) {
      const cells = line.replace(/^\||\| *$/g, "").split("|").map((cell) => cell.trim());
      const table = into("table", "table");
      if (cells.every((cell) => /^:?-+:?$/.test(cell))) continue;
      table.append(make("tr", "", ...cells.map((cell) => make(table.rows.length ? "td" : "th", "", ...inline(cell)))));
    } else if (line.startsWith(">")) {
      into("quote", "blockquote").append(...inline(line.replace(/^> ?/, "")), "\n");
    } else {
      const paragraph = into("text", "p");
      paragraph.append(...(paragraph.hasChildNodes() ? ["\n"] : []), ...inline(line));
    }
  }
  return out;
}
