"""How much of the schemas of jsonschemabench is enforced?  Prints the tables of docs/constrained-output.md.

    python bench/jsonschemabench.py REPOSITORY/maskbench/data [--sample 1000] [--list] [--save]

REPOSITORY is a copy of https://github.com/guidance-ai/jsonschemabench: schemas from the field, each with instances that
fit and others that do not.  Each schema goes through the product's own preparation, strict and not, and each instance
is written out and followed by a matcher.  A valid instance that is refused is put down to what lets it pass: further
properties in every object (*unnamed*: objects are closed on purpose), another order of properties (*order*), or the
schema without a keyword.  ``--list`` names the instances that are judged wrong for another reason.
"""

import argparse
import json
import random
from collections import Counter
from pathlib import Path

import jsonschema
from json_schema_suite import TOKENIZER, grammar, opened
from records import machine, save

from lucevisor.text.grammar.matcher import GrammarError

IDS = {text[0]: i for i in range(TOKENIZER.n_vocab) if len(text := TOKENIZER.token_bytes(i)) == 1}
MODES = ("strict", "lenient")
COLUMNS = ("schemas", "refused", "none fits", "valid", "valid refused", "invalid", "invalid accepted")
KEYWORDS = frozenset(jsonschema.Draft202012Validator.VALIDATORS) | {"additionalItems", "dependencies", "$recursiveRef"}
VALUES = ("enum", "const", "default", "examples")


def accepts(found, instance):
    ids = [IDS[byte] for byte in json.dumps(instance, ensure_ascii=False).encode()]
    one = found.matcher()
    taken = one.n_valid(0, [], ids)
    while True:  # all at once may take more work than one step may
        row = one.masks(0, ids[:taken], [])
        if not any(row[i // 8] >> (i % 8) & 1 for i in (ids[taken : taken + 1] or TOKENIZER.eos_ids)):
            return False
        if taken == len(ids):
            return True
        taken += 1


def ordered(schema, instance):
    """The instance with the properties of each object in the order of the schemas that name most of them."""
    known = [list(one["properties"]) for one in parts(schema) if isinstance(one.get("properties"), dict)]

    def moved(value):
        if isinstance(value, list):
            return [moved(one) for one in value]
        if not isinstance(value, dict):
            return value
        fitting = sorted(known, key=lambda some: -len(value.keys() & some))
        keys = dict.fromkeys(name for some in fitting for name in some if name in value) | dict.fromkeys(value)
        return {key: moved(value[key]) for key in keys}

    return moved(instance)


def parts(schema):
    """All objects in a schema."""
    if isinstance(schema, dict):
        yield schema
    for one in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from parts(one)


def without(schema, keyword):
    """The schema without a keyword, wherever it is."""
    if isinstance(schema, list):
        return [without(one, keyword) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != keyword}
    return {key: value if key in VALUES else without(value, keyword) for key, value in kept.items()}


def why_refused(schema, found, instance):
    """What lets a valid instance pass."""
    open_too = grammar(opened(schema), lenient=True)
    if not isinstance(open_too, str) and accepts(open_too, instance):
        return "unnamed"
    moved = ordered(schema, instance)
    if accepts(found, moved) or (not isinstance(open_too, str) and accepts(open_too, moved)):
        return "order"
    for keyword in ("format", "pattern", "type", *sorted({key for one in parts(schema) for key in one} & KEYWORDS)):
        found = grammar(without(opened(schema), keyword), lenient=True)
        if not isinstance(found, str) and (accepts(found, instance) or accepts(found, moved)):
            return keyword
    return "other"


class Tally:
    """What one mode does to the schemas so far."""

    def __init__(self):
        self.count, self.reasons, self.refusals, self.listed = Counter(), Counter(), Counter(), []

    def add(self, given, found, name):
        self.count["schemas"] += 1
        if isinstance(found, str):
            none_fits = "no value fits" in found
            self.count["none fits" if none_fits else "refused"] += 1
            self.refusals[found.split(" at #")[0].split("/")[0][:60]] += 1
            if none_fits:
                self.count["valid refused"] += sum(test["valid"] for test in given["tests"])
            return
        for index, test in enumerate(given["tests"]):
            kind, why = "valid" if test["valid"] else "invalid", "accepted"
            self.count[kind] += 1
            try:
                accepted = accepts(found, test["data"])
                if test["valid"] and not accepted:
                    why = why_refused(given["schema"], found, test["data"])
            except GrammarError as error:
                accepted, why = False, str(error)
            if accepted != test["valid"]:
                self.count[f"{kind} {'accepted' if accepted else 'refused'}"] += 1
                self.reasons[why] += 1
                if why not in ("unnamed", "order"):
                    self.listed.append(f"{name} {index}: {kind} {why}")


def measure(paths):
    tallies = {mode: Tally() for mode in MODES}
    for number, path in enumerate(paths):
        given = json.loads(path.read_text())
        for mode, tally in tallies.items():
            tally.add(given, grammar(given["schema"], lenient=mode == "lenient"), path.name)
        if number % 500 == 499:
            print(number + 1, "schemas")
            show(tallies)
    return tallies


def show(tallies):
    print("| mode |", " | ".join(COLUMNS), "|")
    print("|---|" + "---:|" * len(COLUMNS))
    for mode, tally in tallies.items():
        print(f"| {mode} |", " | ".join(str(tally.count[column]) for column in COLUMNS), "|")
    for mode, tally in tallies.items():
        for name, many in (("wrong", tally.reasons), ("refused", tally.refusals)):
            print(f"{mode}, {name}:", ", ".join(f"{reason} {n}" for reason, n in many.most_common()), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    paths = sorted(options.folder.glob("*.json"))
    if options.sample:
        paths = random.Random(options.seed).sample(paths, options.sample)
    tallies = measure(paths)
    show(tallies)
    for mode, tally in tallies.items():
        for line in tally.listed if options.list else ():
            print(mode, line)
    if options.save:
        save("jsonschemabench", {"machine": machine(), **{mode: vars(tally) for mode, tally in tallies.items()}})


if __name__ == "__main__":
    main()
