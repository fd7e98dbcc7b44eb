"""Follows the statements of a Python file with known values only; whatever else happens has an unknown value."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlscale.migration.python_objects import Record, Unknown, as_number, as_text, is_text, plain
from rlscale.migration.shell_record import ScriptRecord
from rlscale.migration.shell_values import Piece, Source, Text, VariableUse, literal, value_of

MAX_STEPS = 50_000
MAX_DEPTH = 30
MAX_ITEMS = 10_000


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Loop(Exception):
    pass


_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
        ast.In: lambda left, right: left in right,
        ast.NotIn: lambda left, right: left not in right,
        ast.Is: operator.is_,
        ast.IsNot: operator.is_not,
    }
)
_TEXT_METHODS = ("strip", "lower", "upper", "replace", "split", "removeprefix", "removesuffix", "rstrip", "lstrip")
_ERRORS = (TypeError, ValueError, KeyError, IndexError, ZeroDivisionError, AttributeError, OverflowError)


class PythonReader:
    """Follows one file. Calls of the watched names are recorded with their arguments."""

    def __init__(self, record: ScriptRecord, *, file: str, lines: Sequence[str], watched: Sequence[str]) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._record, self._file, self._lines, self._watched = record, file, lines, watched
        self._functions: dict[str, ast.FunctionDef] = {}
        self._classes: dict[str, ast.ClassDef] = {}
        self._scopes: list[dict[str, Any]] = [{"__file__": (literal(file, Source(file=file, line=1)),)}]
        self._called: set[str] = set()
        self._options: dict[str, Any] = {}  # of argparse, with their defaults
        self._steps = 0

    def follow(self, tree: ast.Module) -> None:
        """Follows the module as if it were started; then the functions that nothing has called."""
        self._block(tree.body)
        for name, function in list(self._functions.items()):
            starts = any(watched in ast.dump(function) for watched in self._watched)
            if name not in self._called and starts and not self.calls:
                self._function(function, [], {})

    def _source(self, node: ast.AST) -> Source:
        return Source(file=self._file, line=getattr(node, "lineno", 1))

    # Statements.

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._steps += 1
            if self._steps < MAX_STEPS:
                self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                found = self.value(value)
                for target in targets:
                    self._assign(target, found)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self.value(value))
            case ast.AugAssign(target=target, op=op, value=value):
                self._assign(target, self._binary(op, self.value(target), self.value(value), node))
            case ast.FunctionDef(name=name):
                self._functions[name] = node
            case ast.ClassDef(name=name):
                self._classes[name] = node
            case ast.If(test=test, body=body, orelse=other):
                answer = self._truth(self.value(test))
                self._block(body if answer else other)
            case ast.For(target=target, iter=iterator, body=body):
                self._for(target, self.value(iterator), body)
            case ast.With(items=items, body=body):
                for item in items:
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, self.value(item.context_expr))
                self._block(body)
            case ast.Try(body=body, finalbody=final):
                self._block([*body, *final])
            case ast.Match(subject=subject, cases=cases):
                self._match(self.value(subject), cases)
            case ast.Expr(value=value):
                self.value(value)
            case ast.Return(value=value):
                raise _Return(None if value is None else self.value(value))
            case ast.Break() | ast.Continue():
                raise _Loop(node)

    def _for(self, target: ast.expr, items: Any, body: Sequence[ast.stmt]) -> None:
        for item in items[:MAX_ITEMS] if isinstance(items, list) else []:
            self._assign(target, item)
            try:
                self._block(body)
            except _Loop as stop:
                if isinstance(stop.args[0], ast.Break):
                    break

    def _match(self, subject: Any, cases: Sequence[ast.match_case]) -> None:
        for case in cases:
            if self._matches(case.pattern, subject) and (case.guard is None or self._truth(self.value(case.guard))):
                self._block(case.body)
                return

    def _matches(self, pattern: ast.pattern, subject: Any) -> bool:
        match pattern:
            case ast.MatchValue(value=value):
                return bool(plain(self.value(value)) == plain(subject))
            case ast.MatchSequence(patterns=patterns):
                items = subject if isinstance(subject, list | tuple) and not is_text(subject) else None
                return items is not None and len(items) == len(patterns) and all(map(self._matches, patterns, items))
            case ast.MatchOr(patterns=patterns):
                return any(self._matches(each, subject) for each in patterns)
            case ast.MatchAs(pattern=None):
                return True
        return False

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                given = self._record.variables.given.get(name)
                if given is not None and len(self._scopes) == 1:
                    source = self._source(target)
                    self._record.variables.uses[name] = VariableUse(name=name, source=source, default=None, given=given)
                    value = (literal(given, source),)
                self._scopes[-1][name] = value
            case ast.Tuple(elts=targets) if isinstance(value, list | tuple) and len(value) == len(targets):
                for each, item in zip(targets, value, strict=True):
                    self._assign(each, item)
            case ast.Attribute(value=owner, attr=name):
                found = self.value(owner)
                if isinstance(found, Record):
                    found.fields[name] = value
            case ast.Subscript(value=owner, slice=index):
                container = self.value(owner)
                if isinstance(container, dict):
                    container[plain(self.value(index))] = value

    def _truth(self, value: Any) -> bool:
        return not isinstance(value, Unknown) and bool(plain(value))

    # Expressions.

    def value(self, node: ast.expr) -> Any:
        """The value of an expression; Unknown when only a run would show it."""
        try:
            return self._value(node)
        except _ERRORS:
            return Unknown(ast.unparse(node))

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=str()):
                return self._string(node)
            case ast.Constant(value=value):
                return value
            case ast.JoinedStr(values=parts):
                return tuple(piece for part in parts for piece in as_text(self.value(part), self._source(part)))
            case ast.FormattedValue(value=value, format_spec=layout):
                return self._formatted(self.value(value), layout, node)
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=owner, attr=name):
                found = self.value(owner)
                return found.fields[name] if isinstance(found, Record) else Unknown(ast.unparse(node))
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(op, self.value(left), self.value(right), node)
            case ast.BoolOp(op=op, values=values):
                return self._either(values, is_or=isinstance(op, ast.Or))
            case ast.UnaryOp(op=op, operand=operand):
                return self._unary(op, self.value(operand))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._binary(op, plain(self.value(left)), plain(self.value(right)), node)
            case ast.IfExp(test=test, body=yes, orelse=no):
                return self.value(yes if self._truth(self.value(test)) else no)
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return self._items(items)
            case ast.Dict(keys=keys, values=values):
                return self._dict(keys, values)
            case ast.Subscript(value=owner, slice=index):
                return self._subscript(node, owner, index)
            case ast.NamedExpr(target=target, value=value):
                found = self.value(value)
                self._assign(target, found)
                return found
            case ast.ListComp(elt=element, generators=[ast.comprehension(target=target, iter=iterator, ifs=[])]):
                return self._comprehension(element, target, self.value(iterator))
            case ast.GeneratorExp(elt=element, generators=[ast.comprehension(target=target, iter=iterator, ifs=[])]):
                return self._comprehension(element, target, self.value(iterator))
            case ast.Call():
                return self._call(node)
        return Unknown(ast.unparse(node))

    def _string(self, node: ast.Constant) -> Text:
        """A string, each word with the line that it stands on: neighbouring strings are one constant."""
        pieces: list[Piece] = []
        line, last = node.lineno, node.end_lineno or node.lineno
        for part in re.split(r"(\s+)", str(node.value)):
            if not part:
                continue
            if part.strip() and last > node.lineno:
                numbers = range(line, last + 1)
                line = next((number for number in numbers if self._has(number, part)), line)
            pieces.append(literal(part, Source(file=self._file, line=line)))
        return tuple(pieces)

    def _has(self, line: int, part: str) -> bool:
        text = self._lines[line - 1].strip()
        return part in text and not text.startswith("#")

    def _formatted(self, value: Any, layout: ast.expr | None, node: ast.expr) -> Any:
        if layout is None or isinstance(value, Unknown):
            return value
        return (literal(format(plain(value), value_of(as_text(self.value(layout)))), self._source(node)),)

    def _name(self, name: str) -> Any:
        if name == "__name__":
            return (literal("__main__", Source(file=self._file, line=1)),)
        # Local names first, then those of the module; closures are not followed.
        for scope in (self._scopes[-1], self._scopes[0]):
            if name in scope:
                return scope[name]
        return Unknown(name)

    def _binary(self, op: ast.AST, left: Any, right: Any, node: ast.AST) -> Any:
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            if isinstance(op, ast.Add) and (is_text(left) or is_text(right)):
                return (*as_text(left, self._source(node)), *as_text(right, self._source(node)))
            return left if isinstance(left, Unknown) else right
        if isinstance(op, ast.Add) and is_text(left) and is_text(right):
            return (*left, *right)
        if isinstance(op, ast.Div) and (is_text(left) or is_text(right)):
            # Path(a) / b
            return (*as_text(left), literal("/", self._source(node)), *as_text(right))
        numbers = [as_number(plain(each)) for each in (left, right)]
        if isinstance(op, ast.Mult | ast.Pow) and not all(isinstance(each, int | float) for each in numbers):
            repeated = next((each for each in numbers if isinstance(each, int)), 0)
            if repeated > MAX_ITEMS:
                return Unknown("a long list")
        if isinstance(op, ast.Add | ast.Mult) and isinstance(left, list):
            return _OPERATORS[type(op)](left, right)
        return _OPERATORS[type(op)](*numbers)

    def _either(self, values: Sequence[ast.expr], *, is_or: bool) -> Any:
        found: Any = None
        for value in values:
            found = self.value(value)
            if self._truth(found) == is_or:
                break
        return found

    def _unary(self, op: ast.unaryop, value: Any) -> Any:
        if isinstance(value, Unknown):
            return value
        return not self._truth(value) if isinstance(op, ast.Not) else -as_number(plain(value))

    def _items(self, nodes: Sequence[ast.expr]) -> list[Any]:
        items: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found = self.value(node.value)
                items += found if isinstance(found, list) else [found]
            else:
                items.append(self.value(node))
        return items

    def _dict(self, keys: Sequence[ast.expr | None], values: Sequence[ast.expr]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(keys, values, strict=True):
            item = self.value(value)
            if key is None:
                found |= item if isinstance(item, dict) else {}
            else:
                found[plain(self.value(key))] = item
        return found

    def _comprehension(self, element: ast.expr, target: ast.expr, items: Any) -> Any:
        if not isinstance(items, list):
            return Unknown(ast.unparse(element))
        found = []
        for item in items[:MAX_ITEMS]:
            self._assign(target, item)
            found.append(self.value(element))
        return found

    def _subscript(self, node: ast.expr, owner: ast.expr, index: ast.expr) -> Any:
        if ast.unparse(owner) in ("os.environ", "environ"):
            return self._environment(value_of(as_text(self.value(index))), None, node)
        container, place = self.value(owner), plain(self.value(index))
        if isinstance(container, dict | list):
            return container[place]
        return Unknown(ast.unparse(node))

    def _environment(self, name: str, default: Any, node: ast.AST) -> Any:
        """A variable of the environment with its default."""
        source, variables = self._source(node), self._record.variables
        if name in variables.given or default is None or isinstance(default, Unknown):
            return variables.read(name, source) if name in variables.given or default is None else default
        return variables.read_default(name, as_text(default, source), source)

    # Calls.

    def _call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func)
        short = name.rpartition(".")[2]
        arguments = self._items(node.args)
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            found = self.value(keyword.value)
            if keyword.arg is None:
                # Nothing is known of `**extra` from elsewhere; it stays an argument, to be reported.
                unread = {f"**{ast.unparse(keyword.value)}": found} if short in self._watched else {}
                named |= found if isinstance(found, dict) else unread
            else:
                named[keyword.arg] = found
        if short in self._watched:
            lines = {f"line {keyword.arg}": keyword.value.lineno for keyword in node.keywords if keyword.arg}
            self.calls.append((short, {"": node.lineno, **lines, **named}))
            return Unknown(short)
        if name in self._functions:
            return self._function(self._functions[name], arguments, named)
        if name in self._classes:
            return self._instance(self._classes[name], named)
        return self._built_in(node, name, short, arguments, named)

    def _function(self, node: ast.FunctionDef, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        self._called.add(node.name)
        if len(self._scopes) > MAX_DEPTH:
            return Unknown(node.name)
        # Defaults belong to the last parameters, as in Python's own syntax tree.
        parameters = [*node.args.posonlyargs, *node.args.args]
        scope: dict[str, Any] = {}
        defaults = dict(zip([each.arg for each in reversed(parameters)], reversed(node.args.defaults), strict=False))
        defaults |= {
            each.arg: value for each, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value
        }
        for place, parameter in enumerate([*parameters, *node.args.kwonlyargs]):
            if parameter.arg in named:
                scope[parameter.arg] = named[parameter.arg]
            elif place < len(arguments):
                scope[parameter.arg] = arguments[place]
            elif parameter.arg in defaults:
                scope[parameter.arg] = self.value(defaults[parameter.arg])
            else:
                scope[parameter.arg] = self._default_instance(parameter.annotation)
        self._scopes.append(scope)
        try:
            self._block(node.body)
        except _Return as result:
            return result.value
        finally:
            self._scopes.pop()
        return None

    def _default_instance(self, annotation: ast.expr | None) -> Any:
        """The settings that a command-line library creates for `main(args: ScriptArgs)`."""
        name = "" if annotation is None else ast.unparse(annotation)
        return self._instance(self._classes[name], {}) if name in self._classes else Unknown(name or "argument")

    def _instance(self, node: ast.ClassDef, named: Mapping[str, Any]) -> Record:
        record = Record()
        for base in node.bases:
            if ast.unparse(base) in self._classes:
                record.fields |= self._instance(self._classes[ast.unparse(base)], {}).fields
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
                record.fields[statement.target.id] = self.value(statement.value)
        given = self._record.variables.given
        source = self._source(node)
        record.fields |= {name: (literal(given[name], source),) for name in record.fields if name in given}
        record.fields |= named
        return record

    def _built_in(self, node: ast.Call, name: str, short: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        if name in ("os.environ.get", "os.getenv", "environ.get") or short == "get_env":
            return self._environment(plain(arguments[0]), (arguments[1:] or [None])[0], node)
        if short == "get_bool_env_var":
            return self._truth(arguments[1]) and plain(arguments[1]) not in ("0", "false") if arguments[1:] else False
        if short in ("get_default_wandb_args",):
            return ()
        if name in ("int", "float", "str", "bool", "Path", "pathlib.Path", "os.path.abspath", "os.path.expanduser"):
            found = arguments[0]
            # The text stays, so that a variable of the environment remains an interpolation.
            return (
                found
                if is_text(found) or isinstance(found, Unknown)
                else plain(found)
                if name != "str"
                else as_text(found)
            )
        if name in ("list", "tuple", "sorted", "range", "len", "max", "min", "sum", "map"):
            return self._collection(name, arguments)
        if name == "os.path.join":
            return tuple(
                piece
                for place, each in enumerate(arguments)
                for piece in ((literal("/", self._source(node)),) if place else ()) + as_text(each)
            )
        if name == "dict":
            return dict(named)
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func, arguments)
        for argument in arguments:  # `typer.run(main)`, `app(main)`
            if isinstance(argument, Unknown) and argument.what in self._functions:
                self._function(self._functions[argument.what], [], {})
        return Unknown(name)

    def _collection(self, name: str, arguments: list[Any]) -> Any:
        if name == "map":
            return arguments[1]
        known = [plain(each) for each in arguments]
        if name == "range":
            numbers = range(*map(as_number, known))
            return list(numbers) if len(numbers) < MAX_ITEMS else Unknown("range")
        functions: dict[str, Callable[..., Any]] = {"len": len, "max": max, "min": min, "sum": sum, "sorted": sorted}
        return functions[name](*known) if name in functions else arguments[0]

    def _method(self, node: ast.Call, function: ast.Attribute, arguments: list[Any]) -> Any:
        owner, name = self.value(function.value), function.attr
        if name in ("parse_args", "parse_known_args"):
            given = self._record.variables.given
            known = {key: (literal(given[key], self._source(node)),) for key in self._options if key in given}
            return Record({**self._options, **known})
        if name == "add_argument":
            return self._option(node, arguments)
        if name == "run" and arguments and isinstance(arguments[0], Unknown) and arguments[0].what in self._functions:
            return self._function(self._functions[arguments[0].what], [], {})
        if name == "join" and is_text(owner) and isinstance(arguments[0], list):
            pieces: list[Piece] = []
            for place, item in enumerate(arguments[0]):
                pieces += [*(owner if place else ()), *as_text(item, self._source(node))]
            return tuple(pieces)
        if name in ("append", "extend") and isinstance(owner, list):
            owner += [arguments[0]] if name == "append" else arguments[0]
            return None
        if name in ("get",) and isinstance(owner, dict):
            return owner.get(plain(arguments[0]), (arguments[1:] or [None])[0])
        if name == "items" and isinstance(owner, dict):
            return [[key, value] for key, value in owner.items()]
        if is_text(owner) and name in _TEXT_METHODS:
            return self._text_method(owner, name, [plain(each) for each in arguments], node)
        return Unknown(ast.unparse(node.func))

    def _option(self, node: ast.Call, arguments: list[Any]) -> None:
        """An argument of argparse, whose default is its value."""
        names = [str(plain(each)) for each in arguments if is_text(each)]
        long = next((name for name in names if name.startswith("--")), names[0] if names else "")
        named = {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        dest = str(plain(named.get("dest"))) if named.get("dest") else long.lstrip("-").replace("-", "_")
        action = plain(named.get("action"))
        default = action == "store_false" if action in ("store_true", "store_false") else Unknown(long)
        found = named.get("default")
        self._options[dest] = default if found is None else found

    def _text_method(self, owner: Text, name: str, arguments: list[Any], node: ast.AST) -> Any:
        changed = getattr(value_of(owner), name)(*arguments)
        if isinstance(changed, list):
            return [(literal(each, self._source(node)),) for each in changed]
        return owner if changed == value_of(owner) else (literal(changed, self._source(node)),)
