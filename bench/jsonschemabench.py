"""How much of the schemas of jsonschemabench is enforced?  Prints the figures of docs/constrained-output.md.

    python bench/jsonschemabench.py REPOSITORY/maskbench/data [NAME.json ...] [--jobs 16] [--part schemas|walks]

REPOSITORY is a copy of https://github.com/guidance-ai/jsonschemabench: schemas from the field, each with instances that
fit and others that do not.

schemas: Each schema goes through the product's own preparation, strict and not, and a matcher follows each instance.  A
valid instance that is refused is put down to what lets it pass: further properties in every object (*unnamed*: objects
are closed on purpose), another order of properties (*order*), other forms of its numbers (*numbers*), or the schema
without a keyword; or to what llguidance says.

walks: Some of the schemas are the parameters of a tool, strict and not, in each call format.  A random walk through the
grammar writes a call, the format's parser reads it, and the arguments of a strict one must fit.

``--wall`` ends what one schema takes; ``--list`` names the instances and walks that are wrong; ``--out`` writes all.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from decimal import Decimal
from pathlib import Path

import jsonschema
from json_schema_suite import TOKENIZER, grammar, opened
from records import machine, write_json

from lucevisor.text.grammar.matcher import GrammarError
from tests.text.call_walks import NAMES, allowed, matcher, parsed, written

MODES = ("strict", "lenient")
COLUMNS = ("schemas", "refused", "none fits", "valid", "valid refused", "invalid", "invalid accepted", "wall")
WALK_COLUMNS = ("walks", "refused", "read back", "too long", "invalid", "unread", "error", "no schema", "wall")
MAX_TRIES = 200
MAX_WALKED_CHARS = 20_000
MAX_WALKED_TOKENS = 500
KEYWORDS = frozenset(jsonschema.Draft202012Validator.VALIDATORS) | {"additionalItems", "dependencies", "$recursiveRef"}
VALUES = ("enum", "const", "default", "examples")
INTENDED = ("unnamed", "order", "order, unnamed")


class WallLimit(BaseException):
    """The time for a schema is over; no handler of errors takes it."""


@contextlib.contextmanager
def wall_limit(seconds):
    def end(*_):
        raise WallLimit

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# -- one instance


def accepts(compiled, text):
    """Whether an answer may be this text."""
    walk, ids = compiled.matcher(), TOKENIZER.encode(text)
    return n_followed(walk, ids) == len(ids) and bool(TOKENIZER.eos_ids & set(allowed(walk.masks(0, ids, []))))


def n_followed(walk, ids):
    """How many tokens the grammar takes, in steps that no draft is longer than."""
    n = 0
    while n < len(ids):
        n_valid = walk.n_valid(0, ids[:n], ids[n : n + 16])
        if n_valid == 0 and ids[n] not in allowed(walk.masks(0, ids[:n], [])):
            break
        n += max(n_valid, 1)
    return n


def accepts_in_an_order(compiled, instance, write):
    """Whether an answer may be the instance, with the properties of each object in some order."""
    n_left = MAX_TRIES

    def texts(value, text):
        nonlocal n_left
        n_left -= 1
        ids = TOKENIZER.encode(text)  # what is certain must come in the tokens that the tokenizer makes of it
        if n_left < 0 or n_followed(compiled.matcher(), ids) < len(ids):
            return
        if isinstance(value, dict):
            yield from members(value, text + "{", "")
        elif isinstance(value, list):
            yield from items(value, text + "[", "")
        else:
            yield text + write(value)

    def members(left, text, comma):
        if not left:
            yield text + "}"
        for key, value in left.items():
            others = {name: left[name] for name in left if name != key}
            for longer in texts(value, f"{text}{comma}{json.dumps(key, ensure_ascii=False)}: "):
                yield from members(others, longer, ", ")

    def items(left, text, comma):
        if not left:
            yield text + "]"
            return
        for longer in texts(left[0], text + comma):
            yield from items(left[1:], longer, ", ")

    return any(accepts(compiled, text) for text in texts(instance, ""))


def in_order(schema, instance):
    """The instance with the properties of each object in the order of the schema that names most of them."""
    known = [list(part["properties"]) for part in parts(schema) if isinstance(part.get("properties"), dict)]

    def moved(value):
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not isinstance(value, dict):
            return value
        by_fit = sorted(known, key=lambda names: -len(value.keys() & names))
        keys = dict.fromkeys(name for names in by_fit for name in names if name in value) | dict.fromkeys(value)
        return {key: moved(value[key]) for key in keys}

    return moved(instance)


def as_it_is(value):
    return json.dumps(value, ensure_ascii=False)


def plain(value):
    """A value with numbers as most people write them: 2 for 2.0, 0.000001 for 1e-06."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{as_it_is(key)}: {plain(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(plain, value))}]"
    if not isinstance(value, float):
        return as_it_is(value)
    return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")


def parts(schema):
    """All objects in a schema."""
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from parts(inner)


def without(schema, keyword):
    """The schema without a keyword, wherever it is."""
    if isinstance(schema, list):
        return [without(item, keyword) for item in schema]
    if not isinstance(schema, dict):
        return schema
    left = {key: value for key, value in schema.items() if key != keyword}
    return {key: value if key in VALUES else without(value, keyword) for key, value in left.items()}


def why_refused(schema, compiled, instance):
    """What lets a valid instance pass."""
    open_too, sorted_instance = grammar(opened(schema), lenient=True), in_order(schema, instance)
    forms = [("", compiled)] if isinstance(open_too, str) else [("", compiled), (", unnamed", open_too)]
    for test in (lambda form, write: accepts(form, write(sorted_instance)),
                 lambda form, write: accepts_in_an_order(form, sorted_instance, write)):  # fmt: skip
        for name, write in (("order", as_it_is), ("numbers", plain)):
            if len(forms) > 1 and accepts(open_too, write(instance)):
                return "unnamed" if write is as_it_is else "numbers, unnamed"
            for more, form in forms:
                if test(form, write):
                    return name + more
    for keyword in ("format", "pattern", "type", *sorted({key for part in parts(schema) for key in part} & KEYWORDS)):
        other = grammar(without(opened(schema), keyword), lenient=True)
        if not isinstance(other, str) and accepts(other, plain(sorted_instance)):
            return keyword
    return "other"


# -- one schema


def schema_record(path, mode, wall):
    """What one mode does to a schema and its instances."""
    given, started = json.loads(path.read_text()), time.monotonic()
    record = {"name": path.name, "mode": mode, "count": Counter(schemas=1), "reasons": []}
    with contextlib.suppress(WallLimit), wall_limit(wall):
        follow(record, given, grammar(given["schema"], lenient=mode == "lenient"))
    seconds = time.monotonic() - started
    record["count"]["wall"] += seconds > wall
    return record | {"seconds": round(seconds, 2)}


def follow(record, given, compiled):
    count = record["count"]
    if isinstance(compiled, str):
        none_fits = "no value fits" in compiled
        count["none fits" if none_fits else "refused"] += 1
        record["refusal"] = compiled
        if none_fits:
            count["valid refused"] += sum(test["valid"] for test in given["tests"])
        return
    for index, test in enumerate(given["tests"]):
        kind, accepted, why = "valid" if test["valid"] else "invalid", False, "accepted"
        count[kind] += 1
        with contextlib.suppress(GrammarError):
            accepted = accepts(compiled, as_it_is(test["data"]))
        if accepted == test["valid"]:
            continue
        count[f"{kind} {'accepted' if accepted else 'refused'}"] += 1
        reason = [index, kind, "not found in time"]
        record["reasons"].append(reason)
        if not accepted:
            try:
                why = why_refused(given["schema"], compiled, test["data"])
            except GrammarError as error:
                why = str(error)
        reason[2] = why


# -- one walk


def parameters(path, rng):
    """A schema as the parameters of a tool; None for one that cannot be."""
    schema = json.loads(path.read_text())["schema"]
    if not isinstance(schema, dict) or len(json.dumps(schema)) > MAX_WALKED_CHARS:
        return None
    wraps = rng.random() < 0.3
    if schema.get("type", "object") == "object" and not wraps:
        return schema
    if any("$ref" in part for part in parts(schema)):
        return None  # references would lead elsewhere
    return {"type": "object", "properties": {"value": schema}, "required": ["value"]}


def walk_record(path, kind, mode, schema, seed, wall):
    """What becomes of a random walk through the grammar of one tool."""
    started, record = time.monotonic(), {"name": path.name, "mode": f"{kind} {mode}", "count": Counter(walks=1)}
    outcome, said = "wall", ""
    with contextlib.suppress(WallLimit), wall_limit(wall):
        outcome, said = walked(kind, schema, seed, strict=mode == "strict")
    record["count"][outcome] += 1
    record["wrong"] = outcome in ("invalid", "unread", "error", "wall") or (outcome == "refused" and mode != "strict")
    return record | {"outcome": outcome, "said": said[:1000], "seconds": round(time.monotonic() - started, 2)}


def walked(kind, schema, seed, *, strict):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}]
    rng = random.Random(seed)
    markers = kind == "gemma" or rng.random() < 0.5
    try:
        walk = matcher(kind, tools, n_most=1, markers=markers)
    except GrammarError as error:
        return "refused", str(error)
    except Exception as error:
        return "error", repr(error)
    try:
        text = written(walk, rng, markers, n_most=MAX_WALKED_TOKENS)
        content, calls = parsed(text or "", kind, tools)
    except Exception as error:
        return "error", repr(error)
    if text is None:
        return "too long", ""
    if len(calls) != 1 or content.strip() or not isinstance(calls[0][1], dict):
        return "unread", text
    if strict:
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            validator(schema).validate(calls[0][1])
        except jsonschema.ValidationError as error:
            return "invalid", f"{error.message[:300]} at {list(error.path)} of {text}"
        except Exception as error:  # a schema that is none, or that refers elsewhere
            return "no schema", repr(error)
    return "read back", ""


# -- all


def run(task):
    function, *arguments = task
    try:
        return function(*arguments)
    except BaseException as error:  # a panic of llguidance is no Exception
        return {
            "name": arguments[0].name,
            "mode": "lost",
            "count": Counter(schemas=1),
            "reasons": [[0, "lost", repr(error)]],
        }


def tasks(paths, options):
    """What is to be done, the largest schemas first, so that none is left over at the end."""
    paths = sorted(paths, key=lambda path: -path.stat().st_size)
    if options.part in (None, "schemas"):
        for path in paths:
            yield from ((schema_record, path, mode, options.wall) for mode in MODES)
    if options.part in (None, "walks"):
        rng, suitable = random.Random(options.seed), []
        for path in random.Random(options.seed).sample(sorted(paths), len(paths)):
            if len(suitable) < options.walks and (schema := parameters(path, rng)) is not None:
                suitable.append((path, schema))
        for path, schema in suitable:
            for kind in NAMES:
                seed = rng.getrandbits(32)
                yield from ((walk_record, path, kind, mode, schema, seed, options.wall) for mode in MODES)


def measured(paths, options):
    """The records of all tasks, in the order in which they end."""
    all_tasks = list(tasks(paths, options))
    with ProcessPoolExecutor(options.jobs) as pool:
        started = time.monotonic()
        futures = [pool.submit(run, task) for task in all_tasks]
        for number, future in enumerate(as_completed(futures), 1):
            if number % 2000 == 0 or number == len(futures):
                print(f"{number} of {len(futures)} after {time.monotonic() - started:.0f} s", flush=True)
            yield future.result()


def show(records):
    for columns, of_walks in ((COLUMNS, False), (WALK_COLUMNS, True)):
        counts, reasons = {}, {}
        for record in records:
            if ("outcome" in record) == of_walks:
                counts.setdefault(record["mode"], Counter()).update(record["count"])
                reasons.setdefault(record["mode"], Counter()).update(list(why(record)))
        if not counts:
            continue
        print("| mode |", " | ".join(columns), "|")
        print("|---|" + "---:|" * len(columns))
        for mode in sorted(counts):
            print(f"| {mode} |", " | ".join(str(counts[mode][column]) for column in columns), "|")
        for mode in sorted(counts):
            print(f"{mode}:", "; ".join(f"{reason} {n}" for reason, n in reasons[mode].most_common(30)))


def why(record):
    """What is counted of a record besides its columns."""
    refusal = record.get("refusal") or (record["said"] if record.get("outcome") == "refused" else "")
    if refusal:
        reason = refusal.rpartition("cannot enforce ")[2].split(" at #")[0].split("/")[0]
        yield "refused: " + re.sub(r'"[^"]*"?|[^\x20-\x7e]', "", reason)[:60]
    yield from (f"{kind} {reason}" for _, kind, reason in record.get("reasons", ()))


def wrong(record):
    """What ``--list`` shows of a record."""
    head = f"{record['mode']} {record['name']}"
    if record.get("wrong"):
        yield f"{head}: {record['outcome']} {record['said']}"
    for index, kind, reason in record.get("reasons", ()):
        if reason not in INTENDED:
            yield f"{head} {index}: {kind} {reason}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="of schemas; all without")
    parser.add_argument("--part", choices=("schemas", "walks"), help="both without")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--wall", type=float, default=30, help="seconds for a schema in one mode, or a walk")
    parser.add_argument("--sample", type=int, help="so many schemas")
    parser.add_argument("--walks", type=int, default=3000, help="schemas that are walked through")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON file of all results")
    options = parser.parse_args()
    paths = [options.folder / name for name in options.names] or sorted(options.folder.glob("*.json"))
    if options.sample:
        paths = random.Random(options.seed).sample(paths, options.sample)
    started, records = time.monotonic(), sorted(measured(paths, options), key=lambda r: (r["mode"], r["name"]))
    show(records)
    if options.list:
        print("\n".join(line for record in records for line in wrong(record)))
    seconds = round(time.monotonic() - started)
    print(f"{len(paths)} schemas in {seconds} s with {options.jobs} processes")
    if options.out:
        write_json(options.out, {"machine": machine(), "seconds": seconds, "records": records})


if __name__ == "__main__":
    main()
