"""Reads a bash script without running it: follows its assignments and branches, and records the commands it would run.

Nothing is executed, and no file is opened except scripts that it sources.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tree_sitter import Node

from rlscale.errors import ConfigError, Problem
from rlscale.migration.shell_commands import CommandCalls
from rlscale.migration.shell_record import ScriptRecord, StopBlock
from rlscale.migration.shell_tests import Answer, ConditionReader, negate
from rlscale.migration.shell_tree import REDIRECTS, find_errors, line, parse, raw, statements, words
from rlscale.migration.shell_values import Source, Text, Variables, is_known, literal, unquoted, value_of
from rlscale.migration.shell_words import WordExpander, unknown

MAX_STEPS = 100_000
MAX_DEPTH = 40
MAX_CHARACTERS = 2_000_000


def read_script(path: Path, *, given: Mapping[str, str], arguments: Sequence[str] = ()) -> ScriptRecord:
    """Follows a script from its first line to its last.

    Args:
        given: values of variables, which the script then cannot change.
        arguments: words of its command line.

    Raises ConfigError when it cannot be read.
    """
    record = ScriptRecord(variables=Variables(given=dict(given)))
    source = Source(file=str(path), line=1)
    positional: list[Text] = [(literal(word, source),) for word in arguments]
    reader = ShellReader(record, folder=path.parent, positional=positional)
    reader.run_file(path)
    return record


class ShellReader:
    """Follows the statements of a script. Sourced scripts share its variables, `$(...)` gets a copy."""

    def __init__(self, record: ScriptRecord, *, folder: Path, positional: list[Text]) -> None:
        self.record, self.folder, self.positional = record, folder, positional
        self.output: list[Text] | None = None  # what `$(...)` prints; None: the terminal
        self.file = str(folder)
        self._first_line = 0  # added to the lines of a text that is part of a file
        self._steps, self._depth = 0, 0
        self.functions: dict[str, tuple[Node, str]] = {}
        self._calls = CommandCalls(self)
        self.expander = WordExpander(record.variables, lambda: self.positional, self._substitute)
        self.conditions = ConditionReader(self.expander, self._calls.exists)
        self._statements: Mapping[str, Callable[[Node], Answer]] = {
            "command": self._command,
            "variable_assignment": self._assignment,
            "variable_assignments": self._all,
            "declaration_command": self._declaration,
            "test_command": lambda node: self.conditions.answer(node, self._source(node)),
            "negated_command": lambda node: negate(self.run(next(statements(node)))),
            "list": self._list,
            "pipeline": self._pipeline,
            "redirected_statement": self._redirected,
            "if_statement": self._if,
            "case_statement": self._case,
            "for_statement": self._for,
            "c_style_for_statement": self._count,
            "while_statement": self._while,
            "function_definition": self._define,
            "compound_statement": self._compound,
            "subshell": self._all,
            "do_group": self._all,
            "program": self._all,
            "ERROR": self._all,  # what can be read of it
        }

    def run_file(self, path: Path) -> Answer:
        """Follows a script or a sourced file."""
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            fix = error.strerror or str(error)
            raise ConfigError([Problem(path="input", rule="be readable", value=str(path), fix=fix)]) from error
        before, self.file = self.file, str(path)
        try:
            return self.run_text(text, first_line=0)
        finally:
            self.file = before

    def run_text(self, text: str, *, first_line: int) -> Answer:
        """Follows a script in a text."""
        before, self._first_line = self._first_line, first_line
        try:
            with self.nested():
                tree = parse(text)
                for node in find_errors(tree):
                    self.record.note(self._source(node), f"bash cannot read `{raw(node)[:40].strip()}`")
                return self.run(tree)
        finally:
            self._first_line = before

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Counts the calls and sourced files that are open."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._refuse(f"be nested at most {MAX_DEPTH} times")
        try:
            yield
        finally:
            self._depth -= 1

    def run(self, node: Node) -> Answer:
        """Follows a statement; returns whether it would succeed."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            self._refuse("end: a loop does not seem to")
        follow = self._statements.get(node.type)
        return None if follow is None else follow(node)

    def _refuse(self, rule: str) -> None:
        fix = "set the variables of its loops with --set, or give the command line alone"
        raise ConfigError([Problem(path=self.file, rule=rule, value="a script", fix=fix)])

    def _source(self, node: Node) -> Source:
        return Source(file=self.file, line=line(node) + self._first_line)

    # Blocks and branches.

    def _all(self, node: Node) -> Answer:
        answer: Answer = True
        for child in statements(node):
            answer = self.run(child)
        return answer

    def _compound(self, node: Node) -> Answer:
        if raw(node).startswith("(("):
            value = self.expander.arithmetic(raw(node)[2:-2], self._source(node))
            return value_of(value) != "0" if is_known(value) else None
        return self._all(node)

    def _list(self, node: Node) -> Answer:
        left, right = list(statements(node))[:2]
        operator = raw(node.children[1])
        answer = self.run(left)
        # A command whose success is not known stands for success: scripts check for failures.
        if operator == "&&":
            return self.run(right) if answer is not False else False
        return self.run(right) if answer is False else answer

    def _pipeline(self, node: Node) -> Answer:
        children = list(statements(node))
        start = None if self.output is None else len(self.output)
        answer: Answer = None
        for child in children:
            answer = self.run(child)
        if start is not None and self.output is not None:
            # The filters of a pipeline are not imitated.
            self.output[start:] = [unknown(raw(node), self._source(node))]
        return None if len(children) > 1 else answer

    def _if(self, node: Node) -> Answer:
        taken: bool | None = None
        conditions = node.children_by_field_name("condition")
        if self._holds([each for each in conditions if each.is_named]):
            return self._body(node, skip=set(conditions))
        for child in statements(node):
            if child.type == "elif_clause" and not taken:
                first = next(statements(child))
                if self._holds([first]):
                    taken = True
                    self._body(child, skip={first})
            elif child.type == "else_clause" and not taken:
                self._body(child, skip=set())
        return True

    def _holds(self, conditions: list[Node]) -> bool:
        answer: Answer = True
        for condition in conditions:
            answer = self.run(condition)
        return answer is True

    def _body(self, node: Node, *, skip: set[Node]) -> Answer:
        for child in statements(node):
            if child not in skip and child.type not in ("elif_clause", "else_clause"):
                self.run(child)
        return True

    def _case(self, node: Node) -> Answer:
        subject = node.child_by_field_name("value")
        value = self.expander.condition(raw(subject), self._source(node)) if subject is not None else ()
        if not is_known(value):
            self.record.note(self._source(node), f"skipped `case {raw(subject) if subject else ''}`: not known")
            return None
        for item in statements(node):
            if item.type != "case_item":
                continue
            patterns = item.children_by_field_name("value")
            texts = [value_of(self.expander.text(raw(each), self._source(item))) for each in patterns]
            if any(fnmatchcase(value_of(value), text) for text in texts):
                return self._body(item, skip=set(patterns))
        return True

    # Loops.

    def _for(self, node: Node) -> Answer:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        values = node.children_by_field_name("value")
        if variable is None or body is None:
            return None
        elements = [word for _, text in words(values) for word in self.expander.words(text, self._source(node))]
        for element in elements if values else list(self.positional):
            self.record.variables.assign(raw(variable), unquoted(element))
            if self._loops(body):
                break
        return True

    def _count(self, node: Node) -> Answer:
        source, body = self._source(node), node.child_by_field_name("body")
        parts = {name: node.child_by_field_name(name) for name in ("initializer", "condition", "update")}
        texts = {name: "" if part is None else raw(part) for name, part in parts.items()}
        self.expander.arithmetic(texts["initializer"], source)
        while body is not None:
            value = self.expander.arithmetic(texts["condition"] or "1", source)
            if not is_known(value) or value_of(value) == "0" or self._loops(body):
                break
            self.expander.arithmetic(texts["update"], source)
        return True

    def _while(self, node: Node) -> Answer:
        condition, body = node.child_by_field_name("condition"), node.child_by_field_name("body")
        # `until` is a `while` with the opposite answer; both have the same node type.
        wanted = not raw(node).startswith("until")
        while condition is not None and body is not None and self.run(condition) is wanted:
            if self._loops(body):
                break
        return True

    def _loops(self, body: Node) -> bool:
        """Follows the body of a loop once; returns whether the loop ends."""
        try:
            self.run(body)
        except StopBlock as stop:
            if stop.kind == "return":
                raise
            return stop.kind == "break"
        return False

    # Assignments.

    def _assignment(self, node: Node) -> Answer:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return None
        append = any(child.type == "+=" for child in node.children)
        self.assign(raw(name), self._value(value, self._source(node)), append=append)
        return True

    def assign(self, name: str, value: Text | list[Text], *, append: bool = False) -> None:
        """Assigns a variable, or one element of an array."""
        variables = self.record.variables
        name, bracket, index = name.partition("[")
        key = index.rstrip("]").strip("'\"")
        if bracket and isinstance(value, tuple) and not key.isdigit() and not variables.is_set(key):
            variables.texts[f"{name}[{key}]"] = value
            return
        if bracket and isinstance(value, tuple):
            place = self.expander.arithmetic(index.rstrip("]"), Source(file=self.file, line=1))
            elements = variables.elements(name, Source(file=self.file, line=1))
            if is_known(place) and 0 <= int(value_of(place)) < 1000:
                # An index behind the end makes bash leave gaps; here they are empty.
                elements += [()] * (int(value_of(place)) + 1 - len(elements))
                elements[int(value_of(place))] = value
                variables.assign(name, elements)
            return
        variables.assign(name, value, append=append)
        if len(value_of(variables.texts.get(name, ()))) > MAX_CHARACTERS:
            self._refuse(f"assign less than {MAX_CHARACTERS} characters to {name}")

    def _value(self, node: Node | None, source: Source) -> Text | list[Text]:
        if node is None:
            return ()
        if node.type == "array":
            children = [child for child in node.children[1:-1] if child.type != "comment"]
            found: list[Text] = []
            for first, text in words(children):
                found += map(unquoted, self.expander.words(text, self._source(first)))
            return found
        return unquoted(self.expander.text(raw(node), source))

    def _declaration(self, node: Node) -> Answer:
        exports = raw(node).startswith("export")
        for child in statements(node):
            if child.type == "variable_assignment":
                self._assignment(child)
                name = child.child_by_field_name("name")
                if exports and name is not None:
                    self._export(raw(name), self._source(child))
            elif child.type == "variable_name" and exports:
                self._export(raw(child), self._source(child))
        return True

    def _export(self, name: str, source: Source) -> None:
        if self.record.variables.is_set(name):
            self.record.variables.exported[name] = self.record.variables.read(name, source)

    # Commands.

    def _define(self, node: Node) -> Answer:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[raw(name)] = (body, self.file)
        return True

    def _redirected(self, node: Node) -> Answer:
        body = node.child_by_field_name("body")
        redirects = [child for child in node.children if child.type in REDIRECTS]
        here = next((child for child in redirects if child.type == "heredoc_redirect"), None)
        if here is not None:
            return self._here_document(body, here, redirects)
        before = self.output
        if any(child.type == "file_redirect" and raw(child).startswith((">", "1>")) for child in redirects):
            self.output = [] if before is not None else None
        try:
            return None if body is None else self.run(body)
        finally:
            self.output = before

    def _here_document(self, body: Node | None, here: Node, redirects: list[Node]) -> Answer:
        """Records the text that `cat > file <<EOF` writes."""
        content = next((child for child in here.children if child.type == "heredoc_body"), None)
        start = next((child for child in here.children if child.type == "heredoc_start"), None)
        text: Text = ()
        if content is not None and start is not None:
            source = self._source(content)
            literal_text = raw(start)[:1] in "'\"\\"
            text = (literal(raw(content), source),) if literal_text else self.expander.quoted_text(raw(content), source)
        files = [*redirects, *here.children]
        target = next((each for each in files if each.type == "file_redirect" and raw(each).startswith(">")), None)
        if target is not None and (destination := target.child_by_field_name("destination")) is not None:
            self.record.files[value_of(self.expander.text(raw(destination), self._source(target)))] = text
        elif body is not None and raw(body).split()[:1] == ["cat"] and self.output is not None:
            self.output.append(text)
        elif body is not None:
            return self.run(body)
        return True

    def _command(self, node: Node) -> Answer:
        source = self._source(node)
        environment: dict[str, Text] = {}
        parts: list[Node] = []
        redirect: Node | None = None
        for child in node.children:
            if child.type == "variable_assignment":
                name, value = child.child_by_field_name("name"), child.child_by_field_name("value")
                found = self._value(value, source)
                if name is not None and isinstance(found, tuple):
                    environment[raw(name)] = found
            elif child.type in REDIRECTS:
                redirect = child
            elif child.type != "comment":
                parts.append(child)
        expanded = [word for first, text in words(parts) for word in self.expander.words(text, self._source(first))]
        if not expanded:
            return True
        return self._calls.call(expanded, environment, source, redirect)

    def _substitute(self, script: str, source: Source) -> Text:
        """The output of the commands of `$(script)`."""
        record = replace(self.record, variables=copy.deepcopy(self.record.variables))
        inner = ShellReader(record, folder=self.folder, positional=list(self.positional))
        inner.file, inner.functions = self.file, self.functions
        inner._depth, inner._steps = self._depth + 1, self._steps
        inner.output = []
        commands = len(record.commands)
        inner.run_text(script, first_line=source.line - 1)
        self._steps = inner._steps
        # A command in `$(...)` computes a value; the run itself is started elsewhere.
        del record.commands[commands:]
        self.record.variables.uses.update(record.variables.uses)
        printed: list[Any] = [piece for text in inner.output for piece in text]
        return _strip_end(tuple(printed)) if inner.output else unknown(script, source)


def _strip_end(text: Text) -> Text:
    """The text without its last line ends, as `$(...)` gives it."""
    pieces = list(text)
    while pieces and pieces[-1].known and pieces[-1].value == pieces[-1].template:
        value = pieces[-1].value.rstrip("\n")
        if value:
            pieces[-1] = replace(pieces[-1], value=value, template=value)
            break
        pieces.pop()
    return tuple(pieces)
